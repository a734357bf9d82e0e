"""Contexts: does an expensive token recur in similar surroundings?

A context is the tokens round an occurrence, itself left out, encoded as the distance-weighted mean of their vectors.
How similar counts as similar is calibrated on pairs of different types, so no threshold is tied to one embedding.
This room knows token types, rollouts and positions; it does not know losses, only which occurrences persist.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rocktokens.core.occurrences import Array, Occurrences
from rocktokens.errors import DataError

# Shapes: M recorded rows, Q persistent occurrences, V token types, H vector width, D distances, G thresholds.
Floats = Array  # float32
BLOCK_CELLS = 1_000_000  # cosines that exist at once: 4 MB, near the cache
POOL, PAIRS = 20_000, 100_000  # contexts and pairs that calibrate γ: its share of 5 % then errs by 0.1 %
ROUNDING = 1e-5  # cosines of identical contexts differ from 1 in float32


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
    """Unit encodings of the ±window tokens round the given recorded rows, weighted by 1 / distance."""
    last = len(occurrences.type_M) - 1
    rollout_Q, position_Q = occurrences.rollout_M[row_Q], occurrences.position_M[row_Q]
    total_QH = np.zeros((len(row_Q), vector_VH.shape[1]), np.float32)
    for offset in (*range(-window, 0), *range(1, window + 1)):
        near_Q = np.clip(row_Q + offset, 0, last)
        # Where positions are missing from the record, distance is that of the positions, not of the rows.
        distance_Q = np.abs(occurrences.position_M[near_Q] - position_Q)
        inside_Q = (occurrences.rollout_M[near_Q] == rollout_Q) & (distance_Q <= window) & (distance_Q > 0)
        weight_Q = np.divide(1.0, distance_Q, out=np.zeros(len(row_Q), np.float32), where=inside_Q)
        total_QH += weight_Q[:, None] * vector_VH[occurrences.type_M[near_Q]]
    return unit(total_QH)


class Contexts:
    """Encoded contexts of persistent occurrences, sorted by type; encodes on demand, block by block."""

    def __init__(self, occurrences: Occurrences, persistent_N: Array, vector_VH: Floats, window: int) -> None:
        self.occurrences = occurrences
        self.vector_VH = vector_VH
        self.window = window
        self.index_Q = np.flatnonzero(persistent_N)
        type_Q = occurrences.type_N[self.index_Q]
        by_type = np.argsort(type_Q, kind="stable")
        self.index_Q = self.index_Q[by_type]
        self.type_Q = type_Q[by_type]

    def encode(self, chosen: Array | slice) -> Floats:
        """Unit encodings of some of the persistent occurrences."""
        index = self.index_Q[chosen]
        if self.occurrences.encoding_NH is not None:
            return unit(self.occurrences.encoding_NH[index].astype(np.float32))
        return encode_windows(self.occurrences, self.occurrences.row_N[index], self.vector_VH, self.window)

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
        """ρ for each threshold, (G, N): share of a type's OTHER persistent occurrences in a similar context.

        Zero for what does not persist and for an occurrence that is alone. Above `max_others`, others are a sample
        that all occurrences of the type share, each leaving itself out.
        """
        rho_GN = np.zeros((len(gammas), len(self.occurrences)), np.float32)
        # One random key a row: a type's sample does not depend on the order of types.
        key_Q = rng.random(len(self.occurrences), dtype=np.float32)[self.index_Q]
        bounds = np.flatnonzero(np.diff(self.type_Q, prepend=-1, append=-1))
        for start, stop in pairwise(bounds.tolist()):
            if stop - start < 2:
                continue
            rho_GN[:, self.index_Q[start:stop]] = self._consistency_of_type(start, stop, gammas, max_others, key_Q)
        return rho_GN

    def _consistency_of_type(
        self, start: int, stop: int, gammas: list[float], max_others: int, key_Q: Floats
    ) -> Floats:
        count = stop - start
        sampled = np.zeros(count, bool)
        if count > max_others + 1:
            sampled[np.argpartition(key_Q[start:stop], max_others)[:max_others]] = True
        else:
            sampled[:] = True
        others_OH = self.encode(start + np.flatnonzero(sampled))
        rho_Gq = np.empty((len(gammas), count), np.float32)
        size = max(1, BLOCK_CELLS // len(others_OH))
        for begin in range(0, count, size):
            part = slice(begin, min(begin + size, count))
            own_qH = (
                others_OH
                if sampled.all() and size >= count
                else self.encode(slice(start + part.start, start + part.stop))
            )
            cosine_qO = own_qH @ others_OH.T
            self_q = np.einsum("qh,qh->q", own_qH, own_qH)
            num_others_q = len(others_OH) - sampled[part]
            for g, gamma in enumerate(np.asarray(gammas, np.float32) - np.float32(ROUNDING)):
                similar_q = np.count_nonzero(cosine_qO >= gamma, axis=1) - (sampled[part] & (self_q >= gamma))
                rho_Gq[g, part] = np.clip(similar_q, 0, None) / num_others_q
        return rho_Gq
