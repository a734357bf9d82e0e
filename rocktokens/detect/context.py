"""Contexts: does an expensive token recur in similar surroundings?

A context is the tokens around an occurrence, itself left out, encoded as the distance-weighted mean of their vectors.
How similar counts as similar is calibrated on pairs of different types, so no threshold is tied to one embedding.
This module knows token types, rollouts and positions; it does not know losses, only which occurrences persist.
"""

from __future__ import annotations

import numpy as np

from rocktokens.detect.grouped import index_type
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.detect.similar import shares_of_types, similar_shares
from rocktokens.errors import DataError
from rocktokens.parallel import for_each

# Shapes: M recorded rows, Q persistent occurrences, V token types, H vector width, D distances, G thresholds.
Floats = Array  # float32
ENCODE_ROWS = 16_384  # contexts encoded in one go
MIX_ROWS = 2_048  # of them mixed at once, which the cache holds
POOL, PAIRS = 20_000, 100_000  # contexts and pairs that calibrate γ: its share of 5 % then errs by 0.1 %


def type_vectors(
    token_ids_V: Array, *, dims: int, rng: np.random.Generator, embedding_VH: Array | None = None
) -> Floats:
    """A vector for every type: its embedding where there is one, else a random unit vector that its id decides."""
    if embedding_VH is not None:
        if len(embedding_VH) <= token_ids_V.max():
            raise DataError(
                f"token id {token_ids_V.max()} lies outside an embedding of {len(embedding_VH)} rows: "
                "occurrences from another tokenizer?"
            )
        return np.ascontiguousarray(embedding_VH[token_ids_V], dtype=np.float32)
    table = rng.standard_normal((int(token_ids_V.max()) + 1, dims), dtype=np.float32)
    return unit(table[token_ids_V])


def unit(vector_QH: Floats) -> Floats:
    """Rows at unit length; a row of zeros (no context at all) stays zero and is similar to nothing."""
    length_Q1 = np.linalg.norm(vector_QH, axis=1, keepdims=True)
    return np.divide(vector_QH, length_Q1, out=np.zeros_like(vector_QH), where=length_Q1 > 0)


def encode_windows(occurrences: Occurrences, row_Q: Array, vector_VH: Floats, window: int) -> Floats:
    """Unit encodings of the ±window tokens around the given recorded rows, weighted by 1 / distance."""
    offset_D = np.array([*range(-window, 0), *range(1, window + 1)], row_Q.dtype)
    wanted_QD = row_Q[:, None] + offset_D
    near_QD = np.clip(wanted_QD, 0, len(occurrences.type_M) - 1)
    # Where positions are missing from the record, distance is that of the positions, not of the rows.
    distance_QD = np.abs(occurrences.position_M.take(near_QD) - occurrences.position_M[row_Q][:, None])
    inside_QD = (near_QD == wanted_QD) & (occurrences.rollout_M.take(near_QD) == occurrences.rollout_M[row_Q][:, None])
    inside_QD &= distance_QD <= window
    weight_QD = np.divide(1, distance_QD, out=np.zeros(near_QD.shape, np.float32), where=inside_QD, dtype=np.float32)
    return unit(_mixed(occurrences.type_M.take(near_QD), weight_QD, vector_VH))


def _mixed(type_QD: Array, weight_QD: Floats, vector_VH: Floats) -> Floats:
    """Weighted sums of the types' vectors: a product with a sparse matrix, in steps that leave the interpreter free."""
    mixed_QH = np.zeros((len(type_QD), vector_VH.shape[1]), vector_VH.dtype)
    for begin in range(0, len(type_QD), MIX_ROWS):
        rows = slice(begin, begin + MIX_ROWS)
        for d in range(type_QD.shape[1]):
            part_qH = vector_VH.take(type_QD[rows, d], axis=0)
            part_qH *= weight_QD[rows, d, None]
            mixed_QH[rows] += part_qH
    return mixed_QH


class Contexts:
    """Encoded contexts of persistent occurrences, sorted by type; encodes on demand, block by block."""

    def __init__(self, occurrences: Occurrences, persistent_N: Array, vector_VH: Floats, window: int) -> None:
        self.occurrences = occurrences
        self.vector_VH = vector_VH
        self.window = window
        index_Q = np.flatnonzero(persistent_N).astype(index_type(len(persistent_N)))
        type_Q = occurrences.type_N[index_Q]
        # Codes of 16 bits are sorted by their digits, five times as fast.
        by_type = np.argsort(type_Q.astype(np.min_scalar_type(len(vector_VH))), kind="stable")
        self.index_Q = index_Q[by_type]
        self.type_Q = type_Q[by_type]

    def encode(self, chosen: Array | slice) -> Floats:
        """Unit encodings of some of the persistent occurrences."""
        index = self.index_Q[chosen]
        return encode_windows(self.occurrences, self.occurrences.rows(index), self.vector_VH, self.window)

    def similarity_thresholds(self, shares: list[float], rng: np.random.Generator) -> list[float]:
        """The cosines that the given shares of random pairs of DIFFERENT types exceed; drawn by row, not by id."""
        if len(self.index_Q) < 2 or self.type_Q[0] == self.type_Q[-1]:
            return [1.0] * len(shares)
        by_row = np.argsort(self.index_Q)
        pool = by_row[np.sort(rng.choice(len(by_row), min(len(by_row), POOL), replace=False))]
        encoded_QH, type_Q = self.encode(pool), self.type_Q[pool]
        first, second = rng.integers(0, len(pool), (2, PAIRS))
        differ = type_Q[first] != type_Q[second]
        first, second = first[differ], second[differ]
        if len(first) == 0:
            return [1.0] * len(shares)
        cosines = [
            np.einsum("qh,qh->q", encoded_QH[first[i : i + 10_000]], encoded_QH[second[i : i + 10_000]])
            for i in range(0, len(first), 10_000)
        ]
        return [float(np.quantile(np.concatenate(cosines), 1 - share)) for share in shares]

    def consistency(self, gammas: list[float], max_others: int, rng: np.random.Generator) -> Floats:
        """`persistent_consistency` of every occurrence, (G, N); 0 for what does not persist."""
        rho_GN = np.zeros((len(gammas), len(self.occurrences)), np.float32)
        rho_GN[:, self.index_Q] = self.persistent_consistency(gammas, max_others, rng)
        return rho_GN

    def persistent_consistency(self, gammas: list[float], max_others: int, rng: np.random.Generator) -> Floats:
        """ρ for each threshold, (G, Q): share of a type's OTHER persistent occurrences in a similar context.

        Zero for an occurrence that is alone. Above `max_others`, others are a sample that all occurrences of the type
        share, each leaving itself out. Types are shared out over the cores; the result does not depend on how many.
        """
        rho_GQ = np.zeros((len(gammas), len(self.index_Q)), np.float32)
        # One random key a row: a type's sample does not depend on the order of types.
        key_Q = rng.random(len(self.occurrences), dtype=np.float32)[self.index_Q]
        bound_T = np.flatnonzero(np.diff(self.type_Q, prepend=-1, append=-1))
        sampled_Q = np.ones(len(self.index_Q), bool)
        for t in np.flatnonzero(np.diff(bound_T) > max_others + 1):
            own = slice(int(bound_T[t]), int(bound_T[t + 1]))
            sampled_Q[own] = least(key_Q[own], max_others)

        def work(types: slice) -> None:
            start, stop = int(bound_T[types.start]), int(bound_T[types.stop])
            if types.stop - types.start > 1 or stop - start <= ENCODE_ROWS:
                local_T = bound_T[types.start : types.stop + 1] - start
                encoded_QH = self.encode(slice(start, stop))
                rho_GQ[:, start:stop] = shares_of_types(encoded_QH, local_T, sampled_Q[start:stop], gammas)
                return
            others_OH = self.encode(start + np.flatnonzero(sampled_Q[start:stop]))
            for begin in range(start, stop, ENCODE_ROWS):
                part = slice(begin, min(begin + ENCODE_ROWS, stop))
                rho_GQ[:, part] = similar_shares(self.encode(part), others_OH, sampled_Q[part], gammas)

        for_each(work, type_blocks(bound_T))
        return rho_GQ


def type_blocks(bound_T: Array) -> list[slice]:
    """Consecutive types that are encoded in one go; a type with more occurrences than that stands alone."""
    blocks, first = [], 0
    while first < len(bound_T) - 1:
        fitting = int(np.searchsorted(bound_T, bound_T[first] + ENCODE_ROWS, side="right")) - 1
        blocks.append(slice(first, max(fitting, first + 1)))
        first = blocks[-1].stop
    return blocks


def least(key_q: Floats, number: int) -> Array:
    """A mask of the `number` least keys; of all where there are not many more."""
    sampled_q = np.ones(len(key_q), bool)
    if len(key_q) > number + 1:
        sampled_q[np.argpartition(key_q, number)[number:]] = False
    return sampled_q
