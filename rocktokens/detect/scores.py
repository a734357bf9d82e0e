"""From occurrences to scores per token type and to rock sets by each definition (docs/method.md §3).

Everything here is computed on whichever occurrences it is given: on one half to choose, on the other to measure.
This module knows losses, thresholds and contexts; it does not know halves, files or token texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rocktokens.detect.context import Contexts, Floats
from rocktokens.detect.grouped import blocks, run_bounds, run_sums
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.type_sums import Column, TypeSums
from rocktokens.parallel import for_each
from rocktokens.stats import Intervals, bootstrap_sums, max_t, resample_counts

# Shapes: N occurrences, V token types, U units of prompts, B resamples.
RANKED = ("burden", "context", "excess")
"""Definitions that keep the top K of a ranking."""
DEFINITIONS = ("certified", *RANKED)
TAU_STEP, GAMMA_STEP, ETA_STEP = 0.05, 0.05, 0.05


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
    sums: TypeSums
    count_V: Array
    r_V: Array
    """Burden: total loss."""
    ccr_V: Array
    r_ctx_V: Array
    excess_V: Array
    """Σ (loss − mean loss of all occurrences)."""
    persistent_V: Array
    """Share of the type's occurrences that persist."""
    rho_V: Array
    """Mean ρ of its persistent occurrences."""
    persistent_share: float
    """Share of all occurrences that persist."""

    @property
    def consistent_V(self) -> Array:
        """Types that persist at least as often as tokens do at large, in contexts that recur."""
        return (self.persistent_V >= self.persistent_share) & (self.rho_V >= self.thresholds.eta)


def rng_for(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for every purpose: using one leaves the others as they are."""
    return np.random.default_rng([seed, *purpose.encode()])


def loss_thresholds(occurrences: Occurrences, config: DetectConfig, step: float = 0.0) -> tuple[float | None, float]:
    """(τ_pre, τ_post): each stage's quantile over occurrences or its mean, whichever is larger, or the number set.

    A quantile alone would call nearly everything persistent where most losses are nearly 0. `step` moves the quantile
    by so much, and the mean or the number set by the same proportion.
    """
    post = _threshold(occurrences.loss_post_N, config.tau_quantile, config.tau_post, step)
    if occurrences.loss_pre_N is None:
        return None, post
    return _threshold(occurrences.loss_pre_N, config.tau_quantile, config.tau_pre, step), post


def _threshold(loss_N: Array, quantile: float, number: float | None, step: float) -> float:
    if number is not None:
        return number * (1 + step)
    moved = float(np.clip(quantile + step, 0.01, 0.99))
    return max(float(np.quantile(loss_N, moved)), float(loss_N.mean(dtype=float)) * (1 + step))


def persistent(occurrences: Occurrences, tau_pre: float | None, tau_post: float) -> Array:
    """Which occurrences cost much both before and after OPD."""
    high_N = occurrences.loss_post_N >= np.float32(tau_post)
    if tau_pre is not None and occurrences.loss_pre_N is not None:
        high_N = high_N & (occurrences.loss_pre_N >= np.float32(tau_pre))
    return high_N


def base_sums(occurrences: Occurrences, config: DetectConfig, *, ranks: bool = False) -> TypeSums:
    """Per type and prompt: occurrences, loss, loss (and rank) above the mean of the prompt, gradient norm."""
    loss_N, prompt_N = occurrences.loss_post_N, occurrences.prompt_N
    bound_P = run_bounds(prompt_N)
    mean_of = np.zeros(int(prompt_N[-1]) + 1)
    mean_of[prompt_N[bound_P[:-1]]] = run_sums(bound_P, loss_N) / np.diff(bound_P)
    columns: dict[str, Column] = {
        "loss": loss_N,
        "within": lambda rows: loss_N[rows] - mean_of[prompt_N[rows]],
    }
    columns |= {"rank": ranks_within(prompt_N, loss_N)} if ranks else {}
    columns |= {} if occurrences.loss_pre_N is None else {"loss_pre": occurrences.loss_pre_N}
    grad_N = occurrences.grad_norm_N
    columns |= {} if grad_N is None else {"grad": grad_N}
    return TypeSums(occurrences, columns, rng_for(config.seed, "units"))


def ranks_within(prompt_N: Array, loss_N: Array) -> Array:
    """Rank of each loss among those of its prompt, from −0.5 to 0.5; equal losses share their mean rank."""
    ranks_N = np.empty(len(loss_N), np.float32)
    bound_P = run_bounds(prompt_N)
    apart = bool((prompt_N[1:] < prompt_N[:-1]).any())  # a prompt's occurrences do not lie together
    pieces = [slice(0, len(bound_P) - 1)] if apart else blocks(bound_P)

    def work(piece: slice) -> None:
        rows = slice(int(bound_P[piece.start]), int(bound_P[piece.stop]))
        ranks_N[rows] = _ranks(prompt_N[rows], loss_N[rows])

    for_each(work, pieces)
    return ranks_N


def _ranks(prompt_N: Array, loss_N: Array) -> Array:
    # Prompt and loss as one number, in whose order they are sorted at once; adding 0 makes −0 and 0 equal.
    bits_N = (loss_N.astype(np.float32) + np.float32(0)).view(np.uint32)
    bits_N = np.where(bits_N >> 31, ~bits_N, bits_N | np.uint32(2**31))
    order = np.argsort(prompt_N.astype(np.uint64) << np.uint64(32) | bits_N)
    prompt, loss = prompt_N[order], loss_N[order]
    starts = run_bounds(prompt)
    new = np.concatenate([[True], (prompt[1:] != prompt[:-1]) | (loss[1:] != loss[:-1])])
    ties = np.append(np.flatnonzero(new), len(loss))
    place = np.repeat((ties[:-1] + ties[1:] - 1) / 2, np.diff(ties))
    sizes = np.diff(starts)
    ranks_N = np.empty(len(loss_N), np.float32)
    ranks_N[order] = (place - np.repeat(starts[:-1] + (sizes - 1) / 2, sizes)) / np.repeat(sizes, sizes)
    return ranks_N


def score(
    occurrences: Occurrences,
    config: DetectConfig,
    vector_VH: Floats,
    *,
    gamma: float | None = None,
    stepped: bool = False,
    sums: TypeSums | None = None,
) -> list[Scores]:
    """Scores at the given or calibrated γ; `stepped`: also one step either way of γ, then of η, from the same pass.

    The steps: γ at half and at twice the share of pairs (a set γ: ± 0.05), η ± 0.05.
    """
    tau_pre, tau_post = loss_thresholds(occurrences, config)
    persistent_N = persistent(occurrences, tau_pre, tau_post)
    contexts = Contexts(occurrences, persistent_N, vector_VH, config.window)
    middle, fewer, more = [gamma] * 3 if gamma is not None else gamma_steps(contexts, config)
    points = [(middle, config.eta)]
    if stepped:
        etas = (max(config.eta - ETA_STEP, 1e-9), min(config.eta + ETA_STEP, 1.0))
        points += [(more, config.eta), (fewer, config.eta), *((middle, eta) for eta in etas)]
    gammas = sorted({point[0] for point in points})
    rho_GQ = contexts.persistent_consistency(gammas, config.max_others, rng_for(config.seed, "others"))
    sums = base_sums(occurrences, config) if sums is None else sums
    return [
        _scores(sums, contexts, rho_GQ[gammas.index(g)], Thresholds(tau_pre, tau_post, g, eta, config.window))
        for g, eta in points
    ]


def gamma_steps(contexts: Contexts, config: DetectConfig) -> list[float]:
    """γ, and one step either way: as set, or calibrated on pairs of different types."""
    if config.gamma is not None:
        return [config.gamma, min(config.gamma + GAMMA_STEP, 1.0), max(config.gamma - GAMMA_STEP, -1.0)]
    share = config.gamma_share
    return contexts.similarity_thresholds([share, share / 2, min(share * 2, 0.99)], rng_for(config.seed, "pairs"))


def _scores(sums: TypeSums, contexts: Contexts, rho_Q: Floats, thresholds: Thresholds) -> Scores:
    own = sums.fork()
    own.add_count("rock", contexts.index_Q[rho_Q >= np.float32(thresholds.eta)])
    num_persistent_V = np.bincount(contexts.type_Q, minlength=own.num_types)
    rho_V = np.bincount(contexts.type_Q, weights=rho_Q, minlength=own.num_types) / np.maximum(num_persistent_V, 1)
    count_V, r_V = own.totals["n"], own.totals["loss"]
    ccr_V = own.totals["rock"] / np.maximum(count_V, 1)
    return Scores(
        thresholds=thresholds,
        sums=own,
        count_V=count_V.astype(np.int64),
        r_V=r_V,
        ccr_V=ccr_V,
        r_ctx_V=r_V * ccr_V,
        excess_V=r_V - count_V * (r_V.sum() / count_V.sum()),
        persistent_V=num_persistent_V / np.maximum(count_V, 1),
        rho_V=rho_V,
        persistent_share=float(num_persistent_V.sum() / count_V.sum()),
    )


def excess_statistic(loss: Array, n: Array, all_loss: Array, all_n: Array) -> Array:
    """Σ (loss − mean loss of all occurrences) as a function of sums."""
    return loss - n * all_loss / all_n


EXCESS_COLUMNS = ["loss", "n", "loss*", "n*"]


@dataclass(frozen=True)
class ExcessTest:
    """Per type: lower bound of the excess, and p of "no excess within its prompts" adjusted for all types tested."""

    low_V: Array
    p_V: Array
    rank_p_V: Array
    """The same test on ranks within prompts: shown beside the other, never decisive, for a type with another shape of
    losses and the same mean has other ranks."""
    level: float

    @property
    def declared_V(self) -> Array:
        """Types whose excess is beyond doubt: the chance that any one of them has none is 1 − level."""
        return (self.p_V <= 1 - self.level) & (self.low_V > 0)


def excess_test(scores: Scores, config: DetectConfig) -> ExcessTest:
    """Which types cost more than the mean token, beyond doubt?

    A type that merely lives in hard prompts has an excess over the mean of all. So a type must also cost more than the
    other tokens of its own prompts: flipping the sign of whole prompts gives the law of the largest t over all types
    when none does. Lower bounds are computed for types that pass; the others' are −inf.
    """
    sums = scores.sums
    p_V, rank_p_V = (
        max_t(sums.cells[name].T, rng=rng_for(config.seed, "flips"), resamples=config.resamples, side="greater")
        if name in sums.cells
        else np.full(sums.num_types, np.nan)
        for name in ("within", "rank")
    )
    low_V = np.full(sums.num_types, -np.inf)
    passed = np.flatnonzero(p_V <= 1 - config.level)
    if len(passed):
        counts_BU = resample_counts(sums.num_units, config.resamples, rng_for(config.seed, "resamples"))
        for start in range(0, len(passed), 256):
            some = passed[start : start + 256]
            columns = [sums.cells["loss"][some].T, sums.cells["n"][some].T]
            columns += [sums.by_unit("loss")[:, None], sums.by_unit("n")[:, None]]
            low_V[some] = bootstrap_sums(excess_statistic, columns, counts_BU, level=config.level).low_V
    return ExcessTest(low_V, p_V, rank_p_V, config.level)


def rankings(scores: Scores, excess: ExcessTest) -> dict[str, Array]:
    """Types in order, best first, by each definition; types that cannot be rocks are not in it. Ties go by token id."""
    return {
        "burden": ordered(scores.r_V, scores.r_V > 0),
        "context": ordered(scores.r_ctx_V, scores.r_ctx_V > 0),
        "excess": ordered(excess.low_V, excess.declared_V & scores.consistent_V),
    }


def ordered(score_V: Array, eligible_V: Array) -> Array:
    """Indices of eligible types, highest score first."""
    index = np.flatnonzero(eligible_V)
    return index[np.argsort(-score_V[index], kind="stable")]


def type_intervals(scores: Scores, config: DetectConfig) -> dict[str, Intervals]:
    """Bootstrap-t intervals of burden, context-consistency rate and excess for every type, within what is possible."""
    sums = scores.sums
    counts_BU = resample_counts(sums.num_units, config.resamples, rng_for(config.seed, "resamples"))
    least = 0.0 if (sums.cells["loss"] >= 0).all() else -np.inf
    return {
        "r": sums.intervals(lambda loss: loss, ["loss"], counts_BU, config.level).within(least, np.inf),
        "ccr": sums.intervals(lambda rock, n: rock / n, ["rock", "n"], counts_BU, config.level).within(0.0, 1.0),
        "excess": sums.intervals(excess_statistic, EXCESS_COLUMNS, counts_BU, config.level),
    }


def burden_from_counts(token_id_V: Array, count_V: Array, mean_V: Array) -> tuple[Array, Array]:
    """(token ids, burdens) ranked by count × mean, from per-type counts and mean losses that others published."""
    burden_V = np.asarray(count_V, float) * np.asarray(mean_V, float)
    order = ordered(burden_V, np.ones(len(burden_V), bool))
    return np.asarray(token_id_V)[order], burden_V[order]
