"""Which token types stay expensive: the story of detection, from occurrences to a report (docs/method.md §3).

Types are declared on one half of the prompts, and every number about them is measured on the other half. Read
`detect_rocks` top to bottom; certified.py has the tests, paper.py the paper's definitions, measures.py what is measured
of a set. Nothing here reads a file or loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.detect import certified, measures, paper
from rocktokens.detect.certified import CLASSES, DECLARED, MIN_PROMPTS, TypeTests
from rocktokens.detect.measures import CLUSTERS, CONCENTRATED, FEW_PROMPTS
from rocktokens.detect.occurrences import Array, Occurrences, Pairs, rng_for
from rocktokens.detect.paper import Scores, Thresholds, ordered
from rocktokens.detect.settings import DetectConfig
from rocktokens.show import percent, plural
from rocktokens.stats import Estimate, Floats
from rocktokens.tables import TABLES
from rocktokens.values import Json, Row

__all__ = ["DetectConfig", "Occurrences", "RockReport", "detect_rocks"]

# Shapes: N occurrences, V token types.
DEFINITIONS = ("certified", "burden", "context")
CANNOT = "no rock can be declared"


@dataclass(frozen=True)
class RockReport:
    """Everything detection found. Sets were chosen on one half of the prompts, numbers measured on the other."""

    config: DetectConfig
    sets: dict[str, Array]
    """Token ids of the rocks by each definition, best first."""
    classes: dict[str, Array]
    """Token ids of the costly types by class: rock, or rock so far below three checkpoints; not yet; learning;
    "learning, levelled off"; unclear; or costly, where the loss before OPD is not known."""
    confirmed: Array
    """Token ids of the rocks by `certified` that the other half of the prompts declares as well."""
    thresholds: Thresholds
    tables: dict[str, pa.Table]
    """Every table by its name in a run: types, sensitivity, footprints, clusters, persistence, curves, positions."""
    overlaps: list[tuple[str, str, float]]
    """Jaccard of two rock sets: two definitions, or one definition on the two signals."""
    groups: dict[str, Array]
    """Token ids of rocks, rare high-loss types and random others, for persistence and geometry."""
    concentration: Json
    """positions_50, _80 and _95: smallest share of positions that carries that share of the loss; variance_by_type:
    share of the loss's variance that the token type explains, with its interval. None where there is no loss."""
    enough: Json
    """num_unclear; prompts_needed, both halves, would settle num_in_reach of them (None: nothing is in reach)."""
    counts: dict[str, int]
    """num_occurrences, num_prompts and num_types."""
    notes: tuple[str, ...]
    """What a reader must know to read the numbers."""
    steps: list[int]
    """The checkpoints, where there are several."""
    retest: Json | None = None
    """What became of the rocks of a detection with fewer checkpoints: then, now, num_rocks, num_still, types."""

    @property
    def rocks(self) -> Array:
        """Token ids of the rocks by the chosen definition, best first; may be none."""
        return self.sets[self.config.definition]

    def _repr_html_(self) -> str:
        """The declared tokens as a table, for notebooks; figures.py imports this module, so it is found by its name."""
        return str(import_module("rocktokens.detect.figures").render(self).html(tools=False))

    def facts(self) -> Json:
        """The few numbers a manifest keeps."""
        return {
            "definition": self.config.definition,
            "signal": self.config.signal,
            "rocks": self.rocks.tolist(),
            "confirmed": self.confirmed.tolist(),
            "classes": {name: ids.tolist() for name, ids in self.classes.items() if len(ids)},
            "thresholds": vars(self.thresholds),
            "concentration": self.concentration,
            "enough": self.enough,
            **self.counts,
            "steps": self.steps,
            **({"retest": self.retest} if self.retest else {}),
            "overlaps": [list(row) for row in self.overlaps],
            "groups": {name: ids.tolist() for name, ids in self.groups.items()},
            "notes": list(self.notes),
        }


def detect_rocks(
    occurrences: Occurrences | pa.Table | Mapping[str, object],
    tokenizer: Any | None = None,
    config: DetectConfig | None = None,
    *,
    embedding_VH: Array | None = None,
) -> RockReport:
    """Declare rocks; beside them the sets of the paper's definitions, footprints, controls, sensitivity, persistence.

    Args:
        occurrences: An `Occurrences`, or a table with rollout_id, position, token_id, loss (and where there are
            loss_pre, prompt_id, grad_norm).
        tokenizer: A Hugging Face tokenizer that names the tokens; without one they are named by their ids.
        config: Definition and thresholds.
        embedding_VH: The student's input embeddings, which encode contexts; else seeded random vectors do.

    Returns:
        The report. `rocks` are the token ids declared by the chosen definition, and may be none at all.
    """
    config = config or DetectConfig()
    if not isinstance(occurrences, Occurrences):
        occurrences = Occurrences.from_table(occurrences, signal=config.signal)
    notes = list(occurrences.notes)
    chosen, measured = halves = occurrences.halves(config.seed)
    del occurrences  # its halves hold copies of the losses
    ids_V, has_pre = chosen.token_ids_V, chosen.loss_pre_N is not None
    texts = measures.token_texts(ids_V, tokenizer)
    kinds = np.array(["unknown" if tokenizer is None else measures.cluster_of(text) for text in texts], dtype=object)
    vector_VH = paper.type_vectors(ids_V, rng=rng_for(config.seed, "vectors"), embedding_VH=embedding_VH)

    # Choose on one half of the prompts.
    pairs = chosen.pairs()
    tests = TypeTests.of(pairs, config.kappa)
    class_V = certified.declare(tests, config.q)
    scores = paper.score(chosen, pairs, config, vector_VH)
    in_order, sets = _in_order(np.isin(class_V, DECLARED), scores, config)
    rocks = sets[config.definition]
    overlaps = _overlaps(chosen, config, vector_VH, scores, sets)
    mean_V = pairs.by_type(pairs.loss_S if pairs.pre_S is None else pairs.pre_S) / np.maximum(scores.count_V, 1)
    groups = measures.make_groups(rocks, scores.count_V, mean_V, rng=rng_for(config.seed, "groups"))

    # Measure on the other half, by the thresholds that the first half set.
    other = measured.pairs()
    found = paper.score(measured, other, config, vector_VH, scores.thresholds)
    confirmed_V = certified.confirm(class_V, TypeTests.of(other, config.kappa), config.q)
    enough, needed_V = certified.enough_data(pairs, other, class_V, kappa=config.kappa, q=config.q)
    least = min(float(half.loss_post_N.min()) for half in halves)
    most = max(float(half.loss_post_N.max()) for half in halves)
    fall = certified.falls(other, non_negative=least >= 0)
    quarter_V, quarter_low_V = certified.steps_to_quarter(other, measured.steps, config.kappa, non_negative=least >= 0)
    units = [paper.units_of(sums.num_prompts, len(ids_V), config.seed) for sums in (pairs, other)]
    rock_N, places = measured.among(rocks), (measured.rollout_N, measured.loss_post_N)
    controls = {}
    for name, match_loss in (("control", False), ("control_loss", True)) if rock_N.any() else ():
        rng = rng_for(config.seed, name)
        controls[name] = measures.matched_control(rock_N, *places, rng=rng, match_loss=match_loss)
    observed_V = scores.count_V + found.count_V > 0
    covering = {**sets, "costly": np.flatnonzero(class_V != "")}
    masks = {name: (measured.among(own), len(own)) for name, own in covering.items() if found.count_V[own].any()}
    for name, chosen_N in controls.items():
        if chosen_N.any():
            masks[name] = (chosen_N, len(np.unique(measured.type_N[chosen_N])))
    footprints = measures.footprints(measured, masks, int(observed_V.sum()), units[1], config)
    # Type means of few occurrences are drawn towards the mean of all by one occurrence's weight.
    predicted_V = (scores.r_V + scores.r_V.sum() / scores.count_V.sum()) / (scores.count_V + 1)
    explained = measures.variance_by_type(predicted_V, measured, config)
    shares = [*measures.smallest_shares(measured.loss_post_N), *explained[:3]]
    half, most_of, nearly_all, *variance = (None if np.isnan(share) else share for share in shares)
    spread = {"positions_50": half, "positions_80": most_of, "positions_95": nearly_all, "variance_by_type": variance}
    persistence = measures.persistence(chosen, measured, units, groups, config) if has_pre else []

    costly_V, testable_V = class_V != "", tests.prompts_V >= MIN_PROMPTS
    burden, counted_V = paper.burden_intervals(other, config), np.where(found.count_V, found.count_V, np.nan)
    types = {
        "token_id": ids_V,
        "token": np.array(texts, dtype=object),
        "cluster": kinds,
        "class": np.where(costly_V, class_V, np.array(None)),
        "confirmed": np.where(costly_V, confirmed_V, np.array(None)),
        "p_costly": np.where(testable_V, tests.costly_V, np.nan),
        "p_stagnant": np.where(testable_V & tests.has_pre, tests.stagnant_V, np.nan),
        "p_settled": np.full(len(ids_V), np.nan)
        if tests.settled_V is None
        else np.where(testable_V, tests.settled_V, np.nan),
        "quarter_steps": quarter_V,
        "quarter_steps_low": quarter_low_V,
        "fall": fall.value_V,
        "fall_low": fall.low_V,
        "fall_high": fall.high_V,
        "prompts_needed": needed_V,
        "count": found.count_V,
        "count_all": scores.count_V + found.count_V,
        "num_prompts": pairs.prompts_V + other.prompts_V,
        "loss_pre": other.by_type(other.pre_S) / counted_V if other.pre_S is not None else np.full(len(ids_V), np.nan),
        "loss_post": found.r_V / counted_V,
        "r": found.r_V,
        "r_low": burden.low_V,
        "r_high": burden.high_V,
        "ccr": found.ccr_V,
        "r_ctx": found.r_ctx_V,
        "rho": found.rho_V,
    }
    grad_N = measured.column("grad_norm")
    if grad_N is not None:
        summed = measured.sums({"grad": grad_N})
        grad_V = np.bincount(summed["type"], weights=summed["grad"], minlength=len(ids_V))
        types["grad_share"] = grad_V / max(grad_V.sum(), 1e-300)
    for name in DEFINITIONS:
        at_V = np.full(len(ids_V), np.nan)
        at_V[in_order[name]] = np.arange(1, len(in_order[name]) + 1)
        types |= {f"place_{name}": at_V, f"in_{name}": np.isin(np.arange(len(ids_V)), sets[name])}
    # Rocks of the chosen definition first, then other costly types, by burden.
    rock_V: Array = types[f"in_{config.definition}"]
    place_V = np.where(rock_V, types[f"place_{config.definition}"], np.inf)
    order = np.lexsort((-found.r_V, place_V, ~costly_V, ~rock_V))
    order = order[observed_V[order]]
    of_kind = {name: rocks[kinds[rocks] == name] for name in CLUSTERS}
    clusters = [{"cluster": n, "num_types": len(own), **_shares(own, found)} for n, own in of_kind.items() if len(own)]
    rows = {
        "sensitivity": _sensitivity(tests, pairs, scores, found, config),
        "footprints": footprints,
        "clusters": clusters,
        "persistence": persistence,
        "curves": measures.curves(measured, units[1], class_V, texts, config) if has_pre else [],
        "positions": measures.costliest_positions(halves, texts),
    }
    equal = most - least <= 1e-6 * max(abs(least), abs(most))
    notes += _notes(tests, other, most_of, equal=equal)
    notes += _mismatches(rock_N, controls, measured.loss_post_N)
    return RockReport(
        config=config,
        sets={name: ids_V[own] for name, own in sets.items()},
        classes={name: ids_V[class_V == name] for name in CLASSES},
        confirmed=ids_V[sets["certified"][confirmed_V[sets["certified"]]]],
        thresholds=scores.thresholds,
        tables={
            "types": _table("types", {name: column[order] for name, column in types.items()}),
            **{
                name: _table(name, {key: [row[key] for row in own] for key in own[0]} if own else {})
                for name, own in rows.items()
            },
        },
        overlaps=overlaps,
        groups={name: ids_V[own] for name, own in groups.items()},
        concentration=spread,
        enough=enough,
        counts={
            "num_occurrences": sum(map(len, halves)),
            "num_prompts": pairs.num_prompts + other.num_prompts,
            "num_types": int(observed_V.sum()),
        },
        notes=tuple(dict.fromkeys(notes)),
        steps=chosen.steps,
    )


def _in_order(rock_V: Array, scores: Scores, config: DetectConfig) -> tuple[dict[str, Array], dict[str, Array]]:
    """Types in order, best first, by each definition, and those of them that are rocks."""
    declared = ordered(scores.r_V, rock_V & scores.consistent_V if config.consistent else rock_V)
    burden, context = ordered(scores.r_V, scores.r_V > 0), ordered(scores.r_ctx_V, scores.r_ctx_V > 0)
    in_order = {"certified": declared, "burden": burden, "context": context}
    return in_order, {"certified": declared, "burden": burden[: config.k], "context": context[: config.k]}


def jaccard(first: Array, second: Array) -> float:
    """Overlap of two sets; two empty sets agree."""
    union = len(np.union1d(first, second))
    return 1.0 if union == 0 else len(np.intersect1d(first, second)) / union


def _overlaps(
    chosen: Occurrences, config: DetectConfig, vector_VH: Floats, scores: Scores, sets: dict[str, Array]
) -> list[tuple[str, str, float]]:
    """Jaccard of every two definitions, and of each definition on the two signals where both were recorded."""
    found = [(a, b, jaccard(sets[a], sets[b])) for a, b in combinations(DEFINITIONS, 2)]
    other = chosen.on_other_signal()
    if other is not None:
        pairs = other.pairs()
        taus = paper.loss_thresholds(other, config)
        at = Thresholds(*taus, scores.thresholds.gamma, paper.ETA, config.window)
        theirs = paper.score(other, pairs, config, vector_VH, at)
        rock_V = np.isin(certified.declare(TypeTests.of(pairs, config.kappa), config.q), DECLARED)
        name = "log_ratio" if config.signal == "kl" else "kl"
        for definition, own in _in_order(rock_V, theirs, config)[1].items():
            same = jaccard(sets[definition], own)
            found.append((f"{definition} on {config.signal}", f"{definition} on {name}", same))
    return found


def _shares(types: Array, found: Scores) -> dict[str, float]:
    """Shares of a set of types on the measured half; NaN where there is nothing to share."""
    with np.errstate(divide="ignore", invalid="ignore"):
        positions = found.count_V[types].sum() / np.float64(found.count_V.sum())
        loss = found.r_V[types].sum() / np.float64(found.r_V.sum())
        return {"share_positions": positions, "share_loss": loss, "enrichment": loss / positions}


def _sensitivity(tests: TypeTests, pairs: Pairs, scores: Scores, found: Scores, config: DetectConfig) -> list[Row]:
    """The declared set, and with κ moved by 0.1 or q halved and doubled; footprints on the measured half."""
    moved = [("base", 0, float("nan"), tests, config.q)]
    for step in (-1, 1):
        kappa, q = float(np.clip(config.kappa + 0.1 * step, 0.01, 0.99)), min(config.q * 2.0**step, 0.99)
        moved += [("kappa", step, kappa, TypeTests.of(pairs, kappa), config.q), ("q", step, q, tests, q)]
    sets = [
        _in_order(np.isin(certified.declare(own, q), DECLARED), scores, config)[1]["certified"] for *_, own, q in moved
    ]
    return [
        {
            "parameter": parameter,
            "step": step,
            "value": value,
            "num_rocks": len(own),
            "jaccard": jaccard(own, sets[0]),
            **_shares(own, found),
        }
        for (parameter, step, value, *_), own in zip(moved, sets)
    ]


def _notes(tests: TypeTests, measured: Pairs, positions_80: float | None, *, equal: bool) -> list[str]:
    """What limits the numbers, and why rocks cannot be declared where they cannot."""
    notes, prompts = [], plural(measured.num_prompts, "prompt")
    if measured.num_prompts < FEW_PROMPTS and positions_80 is not None and positions_80 <= CONCENTRATED:
        notes.append(
            f"only {prompts} were measured and {percent(positions_80)} of the positions carry 80 % of the loss: "
            f"below {FEW_PROMPTS} such prompts intervals are too short"
        )
    elif measured.num_prompts < FEW_PROMPTS:
        notes.append(f"only {prompts} were measured: intervals are rough")
    if measured.loss_S.sum() <= 0:
        notes.append(f"{CANNOT}: the total loss is not positive, and shares of the loss mean nothing here")
    elif equal:
        notes.append(f"{CANNOT}: all losses are equal, so no type costs more than another")
    if not tests.has_pre:
        notes.append(
            f"{CANNOT}: without the loss before OPD (loss_pre, or a second scored checkpoint) types are called costly "
            "at most, and an occurrence persists by its loss after OPD alone; persistence is skipped"
        )
    if tests.prompts_V.max() < MIN_PROMPTS:
        notes.append(f"{CANNOT}: no token type occurs in {MIN_PROMPTS} prompts of the half that chooses; score more")
    if tests.has_pre and tests.settled_V is None:
        notes.append(
            "fewer than three checkpoints: whether a type has settled cannot be tested, so a rock is a rock so far, "
            "and whether a learning type has levelled off cannot be said"
        )
    return notes


def _mismatches(rock_N: Array, controls: Mapping[str, Array], loss_N: Array) -> list[str]:
    """Where a control covers less than the rocks do."""
    notes, (wanted, loss) = [], (rock_N.sum(), loss_N[rock_N].sum(dtype=float))
    for name, chosen_N in controls.items():
        if chosen_N.sum() < 0.99 * wanted:
            notes.append(f"{name}: only {chosen_N.sum()} of {wanted} occurrences could be matched")
        placed = loss_N[chosen_N].sum(dtype=float)
        if name == "control_loss" and placed < 0.95 * loss:
            share = percent(float(placed / loss), 0)
            notes.append(
                f"{name}: the costliest non-rocks carry only {share} of the rocks' loss; it is matched to that"
            )
    return notes


def _table(name: str, columns: Row) -> pa.Table:
    """Columns in the order and the types of a run's table: an Estimate is three; what is not finite is empty."""
    found = {}
    for key, values in columns.items():
        parts = {key: values}
        if any(isinstance(value, Estimate) for value in values):
            ends = enumerate(("", "_low", "_high"))
            parts = {key + end: [np.nan if value is None else value[at] for value in values] for at, end in ends}
        for part, column in parts.items():
            array = np.asarray(column)
            array = np.where(np.isfinite(array), array, np.nan) if array.dtype.kind == "f" else array
            found[part] = pa.array(array, from_pandas=True)  # NaN is empty
    return TABLES[name].conform(pa.table(found))
