"""The paper's definitions: burden, persistent occurrences, context consistency, R_ctx (docs/method.md §3).

A context is the tokens around an occurrence, itself left out, encoded as the distance-weighted mean of their vectors.
How similar counts as similar is calibrated on pairs of different types, so no threshold is tied to one embedding.
Everything here is computed on whichever occurrences it is given: on one half to choose, on the other to measure.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from rocktokens.detect.occurrences import Array, Occurrences, Pairs, for_each, rng_for
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError
from rocktokens.stats import Floats, Intervals, bootstrap_sums, resample_counts

# Shapes: M recorded rows, N occurrences, Q persistent occurrences, q those of one type, O others, V token types,
# T types of one block, U units of prompts, B resamples, H vector width, D distances.
RANDOM_WIDTH = 64  # of the vectors that stand for tokens where no embedding is at hand
ENCODE_ROWS = 16_384  # contexts encoded in one go
MIX_ROWS = 2_048  # of them mixed at once
POOL, PAIRS = 20_000, 100_000  # contexts and pairs that calibrate γ: its share of 5 % then errs by 0.1 %
BLOCK_CELLS = 300_000  # cosines that exist at once: about 1 MB, within the cache
COSINE_ROUNDING = np.float32(1e-5)  # cosines of identical contexts differ from 1 in float32
MAX_UNITS = 1024
MAX_CELLS = 16_000_000  # of one (V, U) column: 64 MB
TYPE_BLOCK = 256

ETA = 0.10  # least share of a type's other persistent occurrences in similar contexts
GAMMA_SHARE = 0.05  # contexts are similar above the cosine that this share of pairs of different types exceeds
MAX_OTHERS = 2048  # others that an occurrence is compared with; more are sampled


@dataclass(frozen=True)
class Thresholds:
    """The numbers that decide whether an occurrence is a rock occurrence."""

    tau_pre: float | None
    """None where no loss before OPD was recorded: persistence then rests on the loss after it alone."""
    tau_post: float
    gamma: float
    eta: float
    window: int


@dataclass(frozen=True)
class Scores:
    """What each token type scores on the occurrences given."""

    thresholds: Thresholds
    count_V: Array
    r_V: Array
    """Burden: total loss."""
    ccr_V: Array
    """Share of the type's occurrences that are rock occurrences: persistent, in contexts that recur."""
    persistent_V: Array
    """Share of the type's occurrences that persist."""
    rho_V: Array
    """Mean ρ of its persistent occurrences."""
    persistent_share: float
    """Share of all occurrences that persist."""

    @property
    def r_ctx_V(self) -> Array:
        """Burden in recurring contexts."""
        return self.r_V * self.ccr_V

    @property
    def consistent_V(self) -> Array:
        """Types that persist at least as often as tokens do at large, in contexts that recur."""
        return (self.persistent_V >= self.persistent_share) & (self.rho_V >= self.thresholds.eta)


def score(
    occurrences: Occurrences, pairs: Pairs, config: DetectConfig, vector_VH: Floats, at: Thresholds | None = None
) -> Scores:
    """Burden, persistence and context consistency of every type, by thresholds found here or given."""
    tau_pre, tau_post = loss_thresholds(occurrences, config) if at is None else (at.tau_pre, at.tau_post)
    high_N = occurrences.loss_post_N >= np.float32(tau_post)
    if tau_pre is not None and occurrences.loss_pre_N is not None:
        high_N &= occurrences.loss_pre_N >= np.float32(tau_pre)
    contexts = Contexts(occurrences, high_N, vector_VH, config.window)
    draws = rng_for(config.seed, "pairs")
    gamma = contexts.similarity_threshold(GAMMA_SHARE, draws) if at is None else at.gamma
    rho_Q = contexts.consistency(gamma, MAX_OTHERS, rng_for(config.seed, "others"))
    rock_Q = rho_Q >= np.float32(ETA)
    size, type_Q = pairs.num_types, contexts.type_Q
    count_V = pairs.by_type(pairs.n_S).astype(np.int64)
    persistent_V = np.bincount(type_Q, minlength=size)
    return Scores(
        thresholds=Thresholds(tau_pre, tau_post, gamma, ETA, config.window),
        count_V=count_V,
        r_V=pairs.by_type(pairs.loss_S),
        ccr_V=np.bincount(type_Q[rock_Q], minlength=size) / np.maximum(count_V, 1),
        persistent_V=persistent_V / np.maximum(count_V, 1),
        rho_V=np.bincount(type_Q, weights=rho_Q, minlength=size) / np.maximum(persistent_V, 1),
        persistent_share=float(len(type_Q) / count_V.sum()),
    )


def loss_thresholds(occurrences: Occurrences, config: DetectConfig) -> tuple[float | None, float]:
    """(τ_pre, τ_post): each stage's quantile over occurrences or its mean, whichever is larger.

    A quantile alone would call nearly everything persistent where most losses are nearly 0.
    """

    def threshold(loss_N: Array) -> float:
        return max(float(np.quantile(loss_N, config.tau_quantile)), float(loss_N.mean(dtype=float)))

    pre_N = occurrences.loss_pre_N
    pre = None if pre_N is None else threshold(pre_N)
    return pre, threshold(occurrences.loss_post_N)


def ordered(score_V: Array, eligible_V: Array) -> Array:
    """Indices of eligible types, highest score first; ties go by token id."""
    index = np.flatnonzero(eligible_V)
    return index[np.argsort(-score_V[index], kind="stable")]


def units_of(num_prompts: int, num_types: int, seed: int) -> Array:
    """Unit of every prompt: bootstraps resample prompts, or beyond 1,024 of them groups of equal number.

    Groups of independent prompts are independent too, so intervals stay valid and the cost stays linear.
    """
    limit = min(MAX_UNITS, max(100, MAX_CELLS // num_types))
    return rng_for(seed, "units").permutation(num_prompts) % min(num_prompts, limit)


def burden_intervals(pairs: Pairs, config: DetectConfig) -> Intervals:
    """Bootstrap-t interval of every type's burden; losses that are not negative have no negative sum."""
    unit_P = units_of(pairs.num_prompts, pairs.num_types, config.seed)
    num_units = int(unit_P.max()) + 1
    key_S = unit_P[pairs.prompt_S] * pairs.num_types + pairs.type_S
    summed = np.bincount(key_S, weights=pairs.loss_S, minlength=num_units * pairs.num_types)
    loss_UV = summed.astype(np.float32).reshape(num_units, pairs.num_types)
    counts_BU = resample_counts(num_units, config.resamples, rng_for(config.seed, "resamples"))
    blocks = [loss_UV[:, start : start + TYPE_BLOCK] for start in range(0, pairs.num_types, TYPE_BLOCK)]
    parts = for_each(lambda block_UT: bootstrap_sums(lambda loss: loss, [block_UT], counts_BU), blocks)
    found = Intervals(*map(np.concatenate, zip(*parts)))
    return found.within(0.0 if (pairs.loss_S >= 0).all() else -np.inf, np.inf)


# Contexts


def type_vectors(token_ids_V: Array, *, rng: np.random.Generator, embedding_VH: Array | None = None) -> Floats:
    """A vector for every type: its embedding where there is one, else a random unit vector that its id decides."""
    if embedding_VH is None:
        table = rng.standard_normal((int(token_ids_V.max()) + 1, RANDOM_WIDTH), dtype=np.float32)
        return unit(table[token_ids_V])
    if len(embedding_VH) <= token_ids_V.max():
        raise DataError(
            f"token id {token_ids_V.max()} lies outside an embedding of {len(embedding_VH)} rows: "
            "occurrences from another tokenizer?"
        )
    return np.ascontiguousarray(embedding_VH[token_ids_V], dtype=np.float32)


def unit(vector_QH: Floats) -> Floats:
    """Rows at unit length; a row of zeros (no context at all) stays zero and is similar to nothing."""
    length_Q1 = np.linalg.norm(vector_QH, axis=1, keepdims=True)
    return np.divide(vector_QH, length_Q1, out=np.zeros_like(vector_QH), where=length_Q1 > 0)


class Contexts:
    """Contexts of persistent occurrences, sorted by type; encoded on demand, block by block."""

    def __init__(self, occurrences: Occurrences, persistent_N: Array, vector_VH: Floats, window: int) -> None:
        self.occurrences, self.vector_VH, self.window = occurrences, vector_VH, window
        index_Q = np.flatnonzero(persistent_N).astype(np.int32 if 2 * len(persistent_N) < 2**31 else np.int64)
        type_Q = occurrences.type_N[index_Q]
        # Codes of 16 bits are sorted by their digits, five times as fast.
        by_type = np.argsort(type_Q.astype(np.min_scalar_type(len(vector_VH))), kind="stable")
        self.index_Q = index_Q[by_type]
        """Each one's place among the measured occurrences."""
        self.type_Q = type_Q[by_type]

    def encode(self, chosen: Array | slice) -> Floats:
        """Unit encodings of the tokens around some of the persistent occurrences, weighted by 1 / distance."""
        known, row_Q = self.occurrences, self.occurrences.row_N[self.index_Q[chosen]]
        offset_D = np.array([*range(-self.window, 0), *range(1, self.window + 1)], row_Q.dtype)
        wanted_QD = row_Q[:, None] + offset_D
        near_QD = np.clip(wanted_QD, 0, len(known.type_M) - 1)
        # Where positions are missing from the record, distance is that of the positions, not of the rows.
        distance_QD = np.abs(known.position_M.take(near_QD) - known.position_M[row_Q][:, None])
        inside_QD = (near_QD == wanted_QD) & (known.rollout_M.take(near_QD) == known.rollout_M[row_Q][:, None])
        inside_QD &= distance_QD <= self.window
        weight_QD = np.divide(
            1, distance_QD, out=np.zeros(near_QD.shape, np.float32), where=inside_QD, dtype=np.float32
        )
        type_QD = known.type_M.take(near_QD)
        # A product with a sparse matrix, in steps that the cache holds and that leave the interpreter free.
        mixed_QH = np.zeros((len(row_Q), self.vector_VH.shape[1]), self.vector_VH.dtype)
        for begin in range(0, len(row_Q), MIX_ROWS):
            rows = slice(begin, begin + MIX_ROWS)
            for d in range(len(offset_D)):
                part_qH = self.vector_VH.take(type_QD[rows, d], axis=0)
                part_qH *= weight_QD[rows, d, None]
                mixed_QH[rows] += part_qH
        return unit(mixed_QH)

    def similarity_threshold(self, share: float, rng: np.random.Generator) -> float:
        """The cosine that this share of random pairs of DIFFERENT types exceeds; 1 where there is no such pair."""
        by_row = np.argsort(self.index_Q)  # drawn by row, not by id
        pool = by_row[np.sort(rng.choice(len(by_row), min(len(by_row), POOL), replace=False))]
        if len(pool) == 0:
            return 1.0
        first, second = rng.integers(0, len(pool), (2, PAIRS))
        differ = self.type_Q[pool][first] != self.type_Q[pool][second]
        first, second = first[differ], second[differ]
        if len(first) == 0:
            return 1.0
        encoded_QH = self.encode(pool)
        cosines = [
            np.einsum("qh,qh->q", encoded_QH[first[i : i + 10_000]], encoded_QH[second[i : i + 10_000]])
            for i in range(0, len(first), 10_000)
        ]
        return float(np.quantile(np.concatenate(cosines), 1 - share))

    def consistency(self, gamma: float, max_others: int, rng: np.random.Generator) -> Floats:
        """ρ, (Q,): share of a type's OTHER persistent occurrences in a similar context.

        Zero for an occurrence that is alone. Above `max_others`, others are a sample that all occurrences of the type
        share, each leaving itself out. Types are shared out over the cores; the result does not depend on how many.
        """
        rho_Q = np.zeros(len(self.index_Q), np.float32)
        # One random key a row: a type's sample does not depend on the order of types.
        key_Q = rng.random(len(self.occurrences), dtype=np.float32)[self.index_Q]
        bound_T = np.flatnonzero(np.diff(self.type_Q, prepend=-1, append=-1))
        sampled_Q = np.ones(len(self.index_Q), bool)
        for t in np.flatnonzero(np.diff(bound_T) > max_others + 1):
            start, stop = bound_T[t], bound_T[t + 1]
            sampled_Q[start + np.argpartition(key_Q[start:stop], max_others)[max_others:]] = False
        limit = np.float32(gamma) - COSINE_ROUNDING

        def work(types: slice) -> None:
            """Encode types of few occurrences together, one of many in parts."""
            first, last = int(bound_T[types.start]), int(bound_T[types.stop])
            encoded_QH = self.encode(slice(first, last)) if last - first <= ENCODE_ROWS else None
            for start, stop in itertools.pairwise(bound_T[types.start : types.stop + 1].tolist()):
                if stop - start < 2:
                    continue
                sampled_q = sampled_Q[start:stop]
                if encoded_QH is not None:
                    own_qH = encoded_QH[start - first : stop - first]
                    rho_Q[start:stop] = similar_shares(own_qH, own_qH[sampled_q], sampled_q, limit)
                    continue
                others_OH = self.encode(start + np.flatnonzero(sampled_q))
                for begin in range(start, stop, ENCODE_ROWS):
                    part = slice(begin, min(begin + ENCODE_ROWS, stop))
                    rho_Q[part] = similar_shares(self.encode(part), others_OH, sampled_Q[part], limit)

        blocks, first = [], 0
        while first < len(bound_T) - 1:  # a type with more occurrences than are encoded in one go stands alone
            fitting = int(np.searchsorted(bound_T, bound_T[first] + ENCODE_ROWS, side="right")) - 1
            blocks.append(slice(first, max(fitting, first + 1)))
            first = blocks[-1].stop
        for_each(work, blocks)
        return rho_Q


def similar_shares(own_qH: Floats, others_OH: Floats, sampled_q: Array, limit: np.float32) -> Floats:
    """For each encoding, the share of the others of its type at cosine >= limit; itself, where sampled, is left out."""
    similar_q = np.zeros(len(own_qH), np.int64)
    for begin in range(0, len(own_qH), max(1, BLOCK_CELLS // 255)):
        part = slice(begin, begin + max(1, BLOCK_CELLS // 255))
        for first in range(0, len(others_OH), 255):  # a sum of bytes holds 255 ones
            cosine_Oq = others_OH[first : first + 255] @ own_qH[part].T
            similar_q[part] += (cosine_Oq >= limit).view(np.uint8).sum(0, dtype=np.uint8)
    similar_q -= sampled_q & (np.einsum("qh,qh->q", own_qH, own_qH) >= limit)
    return (np.maximum(similar_q, 0) / (len(others_OH) - sampled_q)).astype(np.float32)
