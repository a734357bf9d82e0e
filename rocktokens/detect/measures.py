"""What is measured of a rock set on the half of the prompts that did not choose it (docs/method.md §3 and §4).

Footprint: what it covers, with its enrichment. Controls: non-rocks that cover as much, in runs of the same lengths.
Persistence: its loss at every checkpoint, beside A/A arms. Concentration: is the cost a matter of token types or of
single positions, and which positions cost most. Clusters: what kind of token it is, by its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rocktokens.detect.certified import NOT_YET, ROCK, SO_FAR
from rocktokens.detect.occurrences import Array, Occurrences, rng_for
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError
from rocktokens.stats import Estimate, Floats, bootstrap_estimate, bootstrap_sums, resample_counts
from rocktokens.values import Row

# Shapes: N occurrences in rollout and position order, V token types, P prompts, U units of prompts, R rollouts,
# S pairs of a prompt and a type, J runs, K slots that a run could take.
MEDIAN_RESAMPLES = 500
TYPES_EXPLAIN_LITTLE = 0.25  # below this share of the variance, the cost is a matter of single positions
FEW_PROMPTS = 50  # measured prompts below which intervals of a concentrated loss are too short
CONCENTRATED = 0.2  # share of positions that carries 80 % of a concentrated loss, at most
BEFORE, AFTER = 16, 8  # tokens of context beside a listed position
NUM_RARE = 100


def starts_of(code_N: Array) -> Array:
    """Where each run of equal codes begins."""
    return np.flatnonzero(np.append(True, code_N[1:] != code_N[:-1]))


# Footprint


def footprints(
    occurrences: Occurrences, sets: Mapping[str, tuple[Array, int]], observed: int, unit_P: Array, config: DetectConfig
) -> list[Row]:
    """Shares of sets of occurrences (mask and number of types) among all, with bootstrap-t intervals over prompts."""
    loss_N, grad_N = occurrences.loss_post_N, occurrences.column("grad_norm")
    start_R, num_units = starts_of(occurrences.rollout_N), int(unit_P.max()) + 1
    unit_R = unit_P[occurrences.prompt_N[start_R]]
    counts_BU = resample_counts(num_units, config.resamples, rng_for(config.seed, "resamples"))

    def by_unit(column_N: Array) -> Floats:
        summed_R = np.add.reduceat(column_N, start_R, dtype=float)
        return np.bincount(unit_R, weights=summed_R, minlength=num_units)

    def share(own_U: Floats, all_U: Floats, *of_U: Floats) -> Estimate:
        """One column's sum ÷ another's; given two more, that share ÷ theirs: an enrichment."""
        found = bootstrap_sums(
            lambda own, all_, *of: own / all_ if not of else own / all_ / (of[0] / of[1]),
            (own_U, all_U, *of_U),
            counts_BU,
        )
        value, low, high = (float(part_V[0]) for part_V in found)
        return Estimate(value, low, high, occurrences.num_prompts)

    n_R = np.diff(start_R, append=len(loss_N)).astype(float)
    all_n, all_loss = np.bincount(unit_R, weights=n_R, minlength=num_units), by_unit(loss_N)
    all_grad = None if grad_N is None else by_unit(grad_N)
    least = 0.0 if loss_N.min() >= 0 else -np.inf  # a sampled log-ratio may be negative
    rows: list[Row] = []
    for name, (chosen_N, num_types) in sets.items():
        own_n, own_loss = by_unit(chosen_N), by_unit(np.where(chosen_N, loss_N, np.float32(0)))
        share_R = np.add.reduceat(chosen_N, start_R, dtype=float) / n_R
        row = {
            "name": name,
            "num_types": num_types,
            "share_types": num_types / max(observed, 1),
            "share_positions": share(own_n, all_n).within(0.0, 1.0),
            "share_positions_median": _median(share_R, unit_R, counts_BU[:MEDIAN_RESAMPLES], occurrences.num_prompts),
            "share_loss": share(own_loss, all_loss).within(least, 1.0 if least == 0 else np.inf),
            "enrichment": share(own_loss, all_loss, own_n, all_n).within(least, np.inf),
        }
        if grad_N is not None and all_grad is not None:
            own_grad = by_unit(np.where(chosen_N, grad_N, np.float32(0)))
            row["share_grad"] = share(own_grad, all_grad).within(0.0, 1.0)
        rows.append(row)
    return rows


def _median(share_R: Floats, unit_R: Array, counts_BU: Floats, num_prompts: int, level: float = 0.95) -> Estimate:
    """Median over rollouts with a percentile interval: a median is no smooth function of sums."""
    order = np.argsort(share_R)
    share_R, unit_R = share_R[order], unit_R[order]
    medians = np.empty(len(counts_BU))
    for b, count_U in enumerate(counts_BU):
        mass_R = np.cumsum(count_U[unit_R])
        medians[b] = share_R[min(np.searchsorted(mass_R, mass_R[-1] / 2), len(share_R) - 1)]
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(np.median(share_R)), float(low), float(high), num_prompts)


# Controls


def matched_control(
    rock_N: Array, rollout_N: Array, loss_N: Array, *, rng: np.random.Generator, match_loss: bool = False
) -> Array:
    """Mask of runs of the rocks' lengths, placed on non-rock occurrences apart from each other, longest first.

    Types cannot be matched on number, for rocks are frequent; occurrences can. There must be a rock, and rows must be
    in rollout and position order; where there is no room, fewer are placed. With `match_loss`, places are drawn with
    weight exp(β · mean loss), β chosen for each length so that the placed runs carry the loss of the rocks' of that
    length: so "it is only the high loss" can be told from "it is these tokens".
    """
    starts, lengths = run_starts_lengths(rock_N, rollout_N)
    mass_N = np.zeros(len(loss_N) + 1) if match_loss else None  # running sum of losses, from which runs' means follow
    mean_J = np.zeros(len(starts))
    if mass_N is not None:
        np.cumsum(loss_N, dtype=float, out=mass_N[1:])
        mean_J = (mass_N[starts + lengths] - mass_N[starts]) / lengths
    wanted = {int(length): mean_J[lengths == length] for length in np.unique(lengths)}
    free_N, chosen_N = ~rock_N, np.zeros(len(rock_N), bool)
    length = max(wanted)
    while length >= 1:
        means = wanted.get(length, mean_J[:0])
        if len(means):
            begin_K = _places(free_N, rollout_N, mass_N, length, means, rng)
            for offset in range(length):
                chosen_N[begin_K + offset] = True
            for offset in range(-1, length + 1):  # neighbours are no longer free, or two runs would grow together
                free_N[np.clip(begin_K + offset, 0, len(free_N) - 1)] = False
            left = means[len(begin_K) :]
            if len(left) and length > 1:  # runs that fit nowhere in one piece are halved
                for half in (length - length // 2, length // 2):
                    wanted[half] = np.concatenate([wanted.get(half, mean_J[:0]), left])
        length = max((n for n in wanted if n < length), default=0)
    return chosen_N


def run_starts_lengths(mask_N: Array, rollout_N: Array) -> tuple[Array, Array]:
    """Maximal runs of set positions; a run ends with its rollout."""
    edge_N = np.append(True, (mask_N[1:] != mask_N[:-1]) | (rollout_N[1:] != rollout_N[:-1]))[: len(mask_N)]
    starts = np.flatnonzero(edge_N).astype(np.int32 if 2 * len(mask_N) < 2**31 else np.int64)
    lengths = np.diff(starts, append=starts.dtype.type(len(mask_N)))
    inside = mask_N[starts]
    return starts[inside], lengths[inside]


def _places(
    free_N: Array, rollout_N: Array, mass_N: Floats | None, length: int, means: Floats, rng: np.random.Generator
) -> Array:
    """Starts of up to len(means) places for runs of one length, one free position apart at least."""
    # Slots: as many as fit into each free stretch, shifted together at random.
    starts, lengths = run_starts_lengths(free_N, rollout_N)
    count = (lengths + 1) // (length + 1)
    fits = count > 0
    starts, lengths, count = starts[fits], lengths[fits], count[fits]
    offset = rng.integers(0, lengths - (count * (length + 1) - 1) + 1)
    earlier = np.cumsum(count, dtype=count.dtype) - count
    begin_K = np.arange(count.sum(), dtype=starts.dtype) * (length + 1)
    begin_K += np.repeat((starts + offset - earlier * (length + 1)).astype(starts.dtype), count)
    num = min(len(means), len(begin_K))
    if num == len(begin_K):
        return begin_K
    key_K = rng.gumbel(size=len(begin_K))
    if mass_N is not None:
        mean_K = (mass_N[begin_K + length] - mass_N[begin_K]) / length
        key_K += _tilt(mean_K, num, float(np.mean(means)), rng) * mean_K
    return begin_K[np.argpartition(-key_K, num)[:num]]


def _tilt(mean_K: Floats, num: int, target: float, rng: np.random.Generator, sample: int = 50_000) -> float:
    """β for which the `num` places drawn with weight exp(β · mean loss) have the target mean, by bisection."""
    some = mean_K if len(mean_K) <= sample else mean_K[rng.choice(len(mean_K), sample, replace=False)]
    picked = max(1, round(num * len(some) / len(mean_K)))
    noise = rng.gumbel(size=len(some))
    scale = 1.0 / max(float(some.std()), 1e-12)
    low, high = -30.0 * scale, 30.0 * scale
    for _ in range(40):
        middle = (low + high) / 2
        drawn = np.argpartition(-(noise + middle * some), min(picked, len(some) - 1))[:picked]
        low, high = (middle, high) if float(some[drawn].mean()) < target else (low, middle)
    return (low + high) / 2


# Persistence


def make_groups(rocks: Array, count_V: Array, mean_V: Array, *, rng: np.random.Generator) -> dict[str, Array]:
    """Rocks; rare high-loss types (top by mean loss, at least 2 occurrences, not rocks); as many random others."""
    other_V = np.ones(len(count_V), bool)
    other_V[rocks] = False
    candidates = np.flatnonzero(other_V & (count_V >= 2))
    rare = candidates[np.argsort(-mean_V[candidates], kind="stable")][: min(NUM_RARE, len(candidates) // 2)]
    rest = np.setdiff1d(candidates, rare)
    others = np.sort(rng.choice(rest, min(max(len(rocks), NUM_RARE), len(rest)), replace=False))
    return {"rocks": np.asarray(rocks), "rare high-loss": rare, "random others": others}


def persistence(
    selection: Occurrences,
    measurement: Occurrences,
    units: Sequence[Array],
    groups: Mapping[str, Array],
    config: DetectConfig,
) -> list[Row]:
    """Every checkpoint against the first on the measured half, and both A/A arms at the last checkpoint.

    Any group chosen for high loss looks better when it is measured again elsewhere, with no learning at all: regression
    to the mean. So groups are chosen on one half and followed on the other. `checkpoint`: same texts, later checkpoint.
    `aa_selected`: same checkpoint, the texts the group was chosen on against the others. `aa_fresh`: same checkpoint,
    two parts of the texts that did not choose.
    """
    rng = rng_for(config.seed, "persistence")
    second_U = rng.permutation(int(units[1].max()) + 1) % 2 == 1
    filled = {name: types for name, types in groups.items() if len(types)}
    types = np.unique(np.concatenate([np.empty(0, int), *filled.values()]))
    steps: Sequence[int] = measurement.steps or (0, 1)
    inside_n, chosen_n = (np.flatnonzero(half.among(types)) for half in (measurement, selection))
    losses, pre_post = {}, (measurement.loss_pre_N, measurement.loss_post_N)
    for step in steps:  # one checkpoint at a time: it may have to be read
        loss_N = measurement.column(step) if measurement.steps else pre_post[step]
        assert loss_N is not None  # every checkpoint was recorded, and persistence takes a loss before
        losses[str(step)] = loss_N[inside_n]
    own = measurement.sums(losses, inside_n)
    then = selection.sums({"loss": selection.loss_post_N[chosen_n]}, chosen_n)
    unit_S, then["unit"] = units[1][own["prompt"]], units[0][then["prompt"]]
    at = {step: {"type": own["type"], "unit": unit_S, "n": own["n"], "loss": own[str(step)]} for step in steps}

    def mean(sums: Mapping[str, Array], draws: np.random.Generator) -> Estimate:
        count_U, total_U = (np.bincount(sums["unit"], weights=sums[name]) for name in ("n", "loss"))
        columns = [total_U[count_U > 0], count_U[count_U > 0]]
        return bootstrap_estimate(lambda loss, n: loss / n, columns, rng=draws, resamples=config.resamples)

    rows: list[Row] = []
    for name, draws in zip(filled, rng.spawn(len(filled))):
        inside_S, apart_S = (np.isin(sums["type"], filled[name]) for sums in (own, then))
        compared: list[Any] = [
            ("checkpoint", step, (at[steps[0]], inside_S), (at[step], inside_S)) for step in steps[1:]
        ]
        post, part_S = at[steps[-1]], second_U[unit_S]
        compared.append(("aa_selected", None, (then, apart_S), (post, inside_S)))
        compared.append(("aa_fresh", None, (post, inside_S & ~part_S), (post, inside_S & part_S)))
        for arm, step, *sides in compared:
            before, after = ({key: column_S[kept_S] for key, column_S in sums.items()} for sums, kept_S in sides)
            if min(len(np.unique(one["unit"])) for one in (before, after)) < 2:
                continue
            row = {"group": name, "arm": arm, "step": step}
            row["num_types"] = len(np.intersect1d(before["type"], after["type"]))
            if step is not None:  # the same occurrences
                row["change"] = mean({**after, "loss": after["loss"] - before["loss"]}, draws)
            else:  # a difference of independent means
                first, second = mean(before, draws), mean(after, draws)
                value = second.value - first.value
                low = value - float(np.hypot(second.value - second.low, first.high - first.value))
                high = value + float(np.hypot(second.high - second.value, first.value - first.low))
                row["change"] = Estimate(value, low, high, min(first.num_prompts, second.num_prompts))
            rows.append(row | {"before": mean(before, draws), "after": mean(after, draws)})
    return rows


def curves(
    measurement: Occurrences, unit_P: Array, class_V: Array, texts: list[str], config: DetectConfig
) -> list[Row]:
    """Loss of each declared or not yet settled type at every checkpoint, with intervals over units of prompts."""
    types = np.flatnonzero(np.isin(class_V, (ROCK, SO_FAR, NOT_YET)))
    inside_n, steps = np.flatnonzero(measurement.among(types)), measurement.steps or (0, 1)
    if not len(inside_n):
        return []
    pre_post, losses = (measurement.loss_pre_N, measurement.loss_post_N), {}
    for step in steps:
        loss_N = measurement.column(step) if measurement.steps else pre_post[step]
        assert loss_N is not None  # without a loss before no type has one of these classes
        losses[str(step)] = loss_N[inside_n]
    own = measurement.sums(losses, inside_n)
    units = int(unit_P.max()) + 1
    key_S = unit_P[own["prompt"]] * len(types) + np.searchsorted(types, own["type"])
    counts_BU = resample_counts(units, config.resamples, rng_for(config.seed, "curves"))

    def by_unit(name: str) -> Floats:
        return np.bincount(key_S, weights=own[name], minlength=units * len(types)).reshape(units, len(types))

    n_UT, rows = by_unit("n"), []
    for step in steps:
        found = bootstrap_sums(lambda loss, n: loss / n, [by_unit(str(step)), n_UT], counts_BU)
        for t, v in enumerate(types):
            if n_UT[:, t].any():
                value, low, high = (float(part_T[t]) for part_T in found)
                least = 0.0 if measurement.loss_post_N.min() >= 0 else -np.inf
                shown = Estimate(value, max(low, least), high, measurement.num_prompts)
                kind = {"token_id": int(measurement.token_ids_V[v]), "token": texts[v], "class": class_V[v]}
                rows.append({**kind, "step": step, "loss": shown})
    return rows


# Types or positions?


def smallest_shares(loss_N: Array, wanted: Sequence[float] = (0.5, 0.8, 0.95)) -> list[float]:
    """Smallest shares of positions that carry the wanted shares of the loss; NaN where there is no loss.

    Negative values of a sampled signal count as no cost.
    """
    falling = np.sort(np.maximum(loss_N, 0))[::-1]
    running = np.cumsum(falling, dtype=float)
    if running[-1] <= 0:
        return [float("nan")] * len(wanted)
    # The tolerance keeps rounding in the running sum from adding a position.
    return [float((np.searchsorted(running, share * running[-1] * (1 - 1e-9)) + 1) / len(falling)) for share in wanted]


def variance_by_type(predicted_V: Floats, measurement: Occurrences, config: DetectConfig) -> Estimate:
    """1 − Σ (loss − predicted)² ÷ Σ (loss − mean)², the prediction being the type's mean on the other half.

    Constant loss: NaN.
    """
    loss_N, start_P = measurement.loss_post_N.astype(float), starts_of(measurement.prompt_N)
    if np.ptp(loss_N) <= 1e-6 * np.abs(loss_N).max():
        return Estimate(float("nan"), float("nan"), float("nan"), len(start_P))
    number_P = np.diff(start_P, append=len(loss_N)).astype(float)
    wrong_P = np.add.reduceat((loss_N - predicted_V[measurement.type_N]) ** 2, start_P)
    columns = [wrong_P, np.add.reduceat(loss_N, start_P), np.add.reduceat(loss_N**2, start_P), number_P]
    rng = rng_for(config.seed, "concentration")
    found = bootstrap_estimate(
        lambda wrong, total, square, number: 1 - wrong / (square - total**2 / number),
        columns,
        rng=rng,
        resamples=config.resamples,
    )
    return found._replace(value=float(np.clip(found.value, 0.0, 1.0))).within(0.0, 1.0)


def costliest_positions(halves: Sequence[Occurrences], texts: list[str], number: int = 100) -> list[Row]:
    """The positions with the largest loss of all, the costliest first, each with the text around it."""
    total = sum(float(np.maximum(half.loss_post_N, 0).sum(dtype=float)) for half in halves)
    rows: list[tuple[tuple[float, int, int], Row]] = []
    for half in halves:
        loss_N = half.loss_post_N
        most = min(number, int((loss_N > 0).sum()))
        if most == 0:
            continue
        index = np.flatnonzero(loss_N >= np.partition(loss_N, len(loss_N) - most)[len(loss_N) - most])
        index = index[np.argsort(-loss_N[index], kind="stable")][:most]
        for i, row in zip(index.tolist(), half.row_N[index].tolist()):
            rollout, position, kind = int(half.rollout_M[row]), int(half.position_M[row]), int(half.type_M[row])
            loss = float(loss_N[i])
            begin, end = np.searchsorted(half.rollout_M, [rollout, rollout + 1])
            columns = {
                "prompt_id": str(half.names_R["prompt_id"][rollout].as_py()),
                "rollout_id": str(half.names_R["rollout_id"][rollout].as_py()),
                "position": position,
                "token_id": int(half.token_ids_V[kind]),
                "token": texts[kind],
                "loss_pre": None if half.loss_pre_N is None else float(half.loss_pre_N[i]),
                "loss_post": loss,
                "share_loss": loss / total,
                "before": "".join(texts[kind] for kind in half.type_M[max(begin, row - BEFORE) : row]),
                "after": "".join(texts[kind] for kind in half.type_M[row + 1 : min(end, row + 1 + AFTER)]),
            }
            rows.append(((-loss, rollout, position), columns))
    rows.sort(key=lambda found: found[0])
    return [columns for _, columns in rows[:number]]


# Clusters

CLUSTERS = {
    "math": "math and LaTeX delimiters",
    "markdown": "markdown and whitespace",
    "discourse": "discourse markers",
    "digits": "digits",
    "punctuation": "other punctuation",
    "content": "content words",
    "unknown": "no tokenizer at hand",
}
_MARKERS = """so then thus therefore hence now next first second third finally lastly wait but however let lets okay ok
well also because since maybe perhaps alternatively actually hmm note recall suppose assume given if when where overall
indeed meanwhile instead although though while again similarly specifically step steps check verify conclusion final"""
DISCOURSE = frozenset(_MARKERS.split())
SPECIAL = re.compile(r"^<[|/]?[A-Za-z_｜|][^<>]*>$|^\[(PAD|EOS|BOS|UNK|SEP|CLS)\]$")
MARKDOWN = re.compile(r"^(#{1,6}|\*{1,3}|_{2,}|-{2,}|`{1,3}|~{2,}|>|\|+[-:|\s]*|[-*+•]|---+|===+)[:.]*$")
MATH = re.compile(
    r"^(\\[A-Za-z]*[{(\[]?|\\[^\w\s].*|\$+.*|.*\$+|[{}^_=+<>×÷±∓≤≥≠≈∑∏√∫∞·/&]+|\\+|[(){}\[\]]*[\^_=$\\{}]+.*)$"
)
DIGITS = re.compile(r"^[\d.,]*\d[\d.,]*%?$")


def cluster_of(text: str) -> str:
    """The cluster of a token by its text; whitespace before it does not matter. English markers only."""
    bare = text.strip()
    if not bare or SPECIAL.match(bare):
        return "markdown"
    if DIGITS.match(bare):
        return "digits"
    if "\n" in text and not any(c.isalnum() for c in bare):
        return "markdown"
    if bare.lower().replace("'", "").replace("’", "") in DISCOURSE:
        return "discourse"
    if any(c.isalpha() for c in bare) and not bare.startswith("\\") and "$" not in bare:
        return "content"
    if MARKDOWN.match(bare):
        return "markdown"
    if MATH.match(bare):
        return "math"
    return "content" if any(c.isalnum() for c in bare) else "punctuation"


def token_texts(token_ids_V: Array, tokenizer: Any | None) -> list[str]:
    """Text of every token id by a Hugging Face tokenizer; `#id` where there is none."""
    if tokenizer is None:
        return [f"#{token_id}" for token_id in token_ids_V]
    size = len(tokenizer)
    if int(np.max(token_ids_V)) >= size:
        raise DataError(
            f"token id {np.max(token_ids_V)} is not in the tokenizer, which has {size}: "
            "were these occurrences made with another tokenizer?"
        )
    return [tokenizer.decode([int(token_id)], skip_special_tokens=False) for token_id in token_ids_V]
