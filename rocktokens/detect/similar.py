"""Shares of similar contexts, for many token types at once: the costly inner part of context consistency.

Types with few occurrences are multiplied as one stack; a type whose occurrences are all compared with each other needs
half of the products; counts are added up byte by byte. `similar_shares` is the plain computation that the tests hold
the others to. This module knows unit vectors and which of them belong together; it does not know tokens or losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Shapes: Q encodings, q those of one type, O others, T types, H vector width, G thresholds.
Array = NDArray[Any]
Floats = NDArray[Any]  # float32
BLOCK_CELLS = 300_000  # cosines that exist at once: about 1 MB, within the cache
ROUNDING = 1e-5  # cosines of identical contexts differ from 1 in float32
STACKED = 48  # types of at most so many occurrences are multiplied as one stack
PADDING = 1.25  # a stack's types differ in size by this factor at most
BYTE = 255  # ones that a sum of bytes can hold


def similar_shares(own_qH: Floats, others_OH: Floats, sampled_q: Array, gammas: list[float]) -> Floats:
    """For each encoding, the share of the others of its type at cosine >= γ; itself, where sampled, is left out.

    Args:
        own_qH: unit encodings.
        others_OH: unit encodings that they are compared with.
        sampled_q: which of the encodings are among the others.
        gammas: thresholds.

    Returns:
        Shares, (G, q).
    """
    limit_G = limits(gammas)
    similar_Gq = np.zeros((len(gammas), len(own_qH)), np.int64)
    size = max(1, BLOCK_CELLS // BYTE)
    for begin in range(0, len(own_qH), size):
        part = slice(begin, begin + size)
        for first in range(0, len(others_OH), BYTE):
            cosine_Oq = others_OH[first : first + BYTE] @ own_qH[part].T
            for g, limit in enumerate(limit_G):
                similar_Gq[g, part] += (cosine_Oq >= limit).view(np.uint8).sum(0, dtype=np.uint8)
    itself_q = np.einsum("qh,qh->q", own_qH, own_qH)
    similar_Gq -= sampled_q & (itself_q >= limit_G[:, None])
    return (np.maximum(similar_Gq, 0) / (len(others_OH) - sampled_q)).astype(np.float32)


def limits(gammas: list[float]) -> Floats:
    """Thresholds that rounding of the cosine does not cross."""
    return np.asarray(gammas, np.float32) - np.float32(ROUNDING)


def shares_of_types(encoded_QH: Floats, bound_T: Array, sampled_Q: Array, gammas: list[float]) -> Floats:
    """`similar_shares` of consecutive types, each among its own, (G, Q); 0 for an occurrence that is alone.

    Args:
        encoded_QH: unit encodings sorted by type.
        bound_T: where each type begins; one more entry, the number of encodings.
        sampled_Q: which encodings are among the others of their type.
        gammas: thresholds.
    """
    rho_GQ = np.zeros((len(gammas), len(encoded_QH)), np.float32)
    start_T, size_T = bound_T[:-1], np.diff(bound_T)
    all_sampled_T = np.add.reduceat(~sampled_Q, start_T, dtype=np.int64) == 0 if len(start_T) else np.empty(0, bool)
    small_T = all_sampled_T & (size_T <= STACKED) & (size_T > 1)
    for start_t, size_t in _stacks(start_T[small_T], size_T[small_T]):
        _stack(encoded_QH, start_t, size_t, limits(gammas), rho_GQ)
    for t in np.flatnonzero(~small_T & (size_T > 1)):
        own = slice(int(bound_T[t]), int(bound_T[t + 1]))
        if all_sampled_T[t]:
            rho_GQ[:, own] = all_pairs(encoded_QH[own], gammas)
        else:
            others_OH = encoded_QH[own][sampled_Q[own]]
            rho_GQ[:, own] = similar_shares(encoded_QH[own], others_OH, sampled_Q[own], gammas)
    return rho_GQ


def _stacks(start_T: Array, size_T: Array) -> Iterator[tuple[Array, Array]]:
    """Types of similar size, so many that their cosines fit in the cache."""
    by_size = np.argsort(size_T, kind="stable")
    start_T, size_T = start_T[by_size], size_T[by_size]
    first = 0
    while first < len(size_T):
        widest = max(int(size_T[first] * PADDING), int(size_T[first]) + 1)
        last = min(int(np.searchsorted(size_T, widest, side="right")), first + max(1, BLOCK_CELLS // widest**2))
        yield start_T[first:last], size_T[first:last]
        first = last


def _stack(encoded_QH: Floats, start_T: Array, size_T: Array, limit_G: Floats, rho_GQ: Floats) -> None:
    """All pairs within each type of a stack; shorter types are filled up with zero vectors."""
    widest = int(size_T.max())
    inside_Tq = np.arange(widest) < size_T[:, None]
    row_Tq = np.where(inside_Tq, start_T[:, None] + np.arange(widest), 0)
    own_TqH = encoded_QH[row_Tq]
    own_TqH[~inside_Tq] = 0
    cosine_Tqq = own_TqH @ own_TqH.transpose(0, 2, 1)
    itself_Tq = np.einsum("tqq->tq", cosine_Tqq)
    row = row_Tq[inside_Tq]
    for g, limit in enumerate(limit_G):
        similar_Tq = (cosine_Tqq >= limit).view(np.uint8).sum(1, dtype=np.uint8).astype(np.int64)
        similar_Tq -= itself_Tq >= limit
        if limit <= 0:  # the zero vectors count as similar
            similar_Tq -= (widest - size_T)[:, None]
        rho_GQ[g, row] = (similar_Tq / (size_T - 1)[:, None])[inside_Tq]


def all_pairs(own_qH: Floats, gammas: list[float]) -> Floats:
    """`similar_shares` of encodings that are all compared with each other: every pair is multiplied once."""
    number = len(own_qH)
    limit_G = limits(gammas)
    similar_Gq = np.zeros((len(gammas), number), np.int64)
    begin = 0
    while begin < number:
        # Few rows: their columns' counts fit in a byte, and the cosines in the cache.
        height = min(BYTE, max(8, BLOCK_CELLS // (number - begin)), number - begin)
        end = begin + height
        cosine_bq = own_qH[begin:end] @ own_qH[begin:].T
        itself_b = np.einsum("bb->b", cosine_bq[:, :height])
        for g, limit in enumerate(limit_G):
            hit_bq = np.zeros((height, -(-(number - begin) // 8) * 8), bool)
            np.greater_equal(cosine_bq, limit, out=hit_bq[:, : number - begin])
            similar_Gq[g, begin:end] += row_counts(hit_bq) - (itself_b >= limit)
            similar_Gq[g, end:] += hit_bq[:, height : number - begin].view(np.uint8).sum(0, dtype=np.uint8)
        begin = end
    return (similar_Gq / max(number - 1, 1)).astype(np.float32)


def row_counts(hit_bq: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Ones in each row of a mask whose width is a multiple of 8: eight at a time, as bytes of one number."""
    word_bw = hit_bq.view(np.uint64)
    count_b = np.zeros(len(hit_bq), np.int64)
    for first in range(0, word_bw.shape[1], BYTE):
        total_b = word_bw[:, first : first + BYTE].sum(1)
        count_b += total_b.view(np.uint8).reshape(-1, 8).sum(1, dtype=np.int64)
    return count_b
