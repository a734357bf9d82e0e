"""Which token types stay expensive: the story of detection, from occurrences to a report (docs/method.md §3).

Types are declared on one half of the prompts, and every number about them is measured on the other half. Read this
file top to bottom; the verbs live in certified, scores, context, sweep, verdicts, footprint, controls, persistence,
positions and enough. Nothing here reads a file or loads a model. A pipeline stage calls it like this:

    by_step = {step: table of occurrences/step=N}           # all kept checkpoints, scored on the same rollouts
    report = detect_rocks(Occurrences.from_checkpoints(by_step, signal=config.signal), tokenizer, config,
                          embedding_VH=student's input embeddings, or None)
    write report.tables()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.detect.certified import CLASSES, LEARNING, MIN_PROMPTS
from rocktokens.detect.clusters import CLUSTERS, clusters_of, token_texts
from rocktokens.detect.context import Floats, type_vectors
from rocktokens.detect.controls import Control, matched_control
from rocktokens.detect.footprint import Footprint, density, footprint
from rocktokens.detect.grouped import run_bounds, threads_for
from rocktokens.detect.halves import Choice, Halves, choose, measure, split_halves
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.detect.persistence import PersistenceRow, make_groups, persistence, type_means
from rocktokens.detect.positions import FEW_PROMPTS, costliest_positions
from rocktokens.detect.rock_report import ClusterRow, RockReport
from rocktokens.detect.scores import (
    DEFINITIONS,
    RANKED,
    Scores,
    burden_from_counts,
    rng_for,
    type_intervals,
)
from rocktokens.detect.sensitivity import SensitivityRow, overlaps, sensitivity, shares
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.verdicts import Verdicts, reach_verdicts
from rocktokens.parallel import for_each, together
from rocktokens.remarks import Remark
from rocktokens.values import Row

__all__ = ["DetectConfig", "Occurrences", "RockReport", "burden_from_counts", "detect_rocks"]

# Shapes: N occurrences, V token types.


@dataclass
class _Parts:
    """The parts of a report that are computed side by side."""

    types: Row = field(default_factory=dict)
    sensitivity: list[SensitivityRow] = field(default_factory=list)
    controls: dict[str, Control] = field(default_factory=dict)
    footprints: dict[str, Footprint] = field(default_factory=dict)
    persistence: list[PersistenceRow] = field(default_factory=list)
    skipped: list[Remark] = field(default_factory=list)


def detect_rocks(
    occurrences: Occurrences | Halves | pa.Table | Mapping[str, object],
    tokenizer: Any | None = None,
    config: DetectConfig | None = None,
    *,
    embedding_VH: Array | None = None,
) -> RockReport:
    """Declare rocks; beside them the sets of every other definition, footprints, controls, sensitivity, persistence.

    Args:
        occurrences: An `Occurrences`, its `Halves`, or a table with rollout_id, position, token_id, loss (and where
            there are loss_pre, prompt_id, grad_norm, entropies).
        tokenizer: A Hugging Face tokenizer that names the tokens; without one they are named by their ids.
        config: Definition and thresholds.
        embedding_VH: The student's input embeddings, which encode contexts; else seeded random vectors do.

    Returns:
        The report. `rocks` are the token ids declared by the chosen definition, and may be none at all.
    """
    config = config or DetectConfig()
    if not isinstance(occurrences, Occurrences | Halves):
        occurrences = Occurrences.from_table(occurrences, signal=config.signal)
    halves = occurrences if isinstance(occurrences, Halves) else split_halves(occurrences, config)
    del occurrences  # its halves hold copies
    token_ids_V = halves.selection.token_ids_V
    texts = token_texts(token_ids_V, tokenizer)
    vector_VH = type_vectors(
        token_ids_V,
        dims=config.context_dims,
        rng=rng_for(config.seed, "vectors"),
        embedding_VH=embedding_VH,
    )
    choice = choose(halves.selection, config, vector_VH)
    measured, verdicts = together(
        lambda: measure(halves.measurement, config, vector_VH, choice.scores),
        lambda: reach_verdicts(halves, choice, config),
        threads=threads_for(len(halves)),
    )
    kinds = np.array(clusters_of(texts, tokenizer))
    return _report(halves, config, texts, kinds, vector_VH, choice, measured, verdicts)


def _report(
    halves: Halves,
    config: DetectConfig,
    texts: list[str],
    kinds: Array,
    vector_VH: Floats,
    choice: Choice,
    measured: Scores,
    verdicts: Verdicts,
) -> RockReport:
    measurement = halves.measurement
    rocks = choice.rocks(config.definition)
    ids_V, certified = measurement.token_ids_V, verdicts.certified
    groups = _groups(halves.selection, choice.scores, rocks, config)
    parts = _Parts()

    def sensitive() -> None:
        parts.sensitivity = sensitivity(halves.selection, config, vector_VH, choice, measured)

    def covered() -> None:
        parts.controls = _controls(measurement, rocks, config)
        parts.footprints = _footprints(measurement, choice, measured, parts.controls, config)

    def persisting() -> None:
        parts.persistence, parts.skipped = _persistence(halves, choice, measured, groups, config)

    def described() -> None:
        parts.types = _types(halves, config, texts, kinds, choice, measured, verdicts)

    for_each(lambda part: part(), (sensitive, described, covered, persisting), threads=threads_for(len(halves)))
    remarks = [
        *measurement.remarks,
        *_remarks(halves, choice, measured, verdicts),
        *_control_remarks(parts.controls),
        *parts.skipped,
    ]
    return RockReport(
        config=config,
        definition=config.definition,
        ks=choice.ks,
        sets={name: ids_V[choice.rocks(name)] for name in DEFINITIONS},
        classes={name: ids_V[certified.class_V == name] for name in CLASSES},
        confirmed=_confirmed(choice, verdicts, ids_V),
        has_pre=measurement.loss_pre_N is not None,
        thresholds=choice.scores.thresholds,
        types=parts.types,
        sweep=choice.sweep,
        sensitivity=parts.sensitivity,
        footprints=parts.footprints,
        density=density(measurement, measurement.among(rocks)),
        clusters=_clusters(kinds, rocks, measured),
        controls=parts.controls,
        overlaps=overlaps(halves.selection, config, vector_VH, choice),
        groups={name: ids_V[types] for name, types in groups.items()},
        persistence=parts.persistence,
        concentration=verdicts.concentration,
        positions=costliest_positions(halves.both, texts, config.positions),
        enough=verdicts.enough,
        num_occurrences=len(halves),
        num_left_out=sum(half.num_left_out for half in halves.both),
        num_prompts=choice.scores.sums.num_prompts + measured.sums.num_prompts,
        num_rollouts=sum(len(run_bounds(half.rollout_N)) - 1 for half in halves.both),
        num_types=int((choice.scores.count_V + measured.count_V > 0).sum()),
        num_prompts_measured=measured.sums.num_prompts,
        remarks=tuple(remarks),
    )


def _confirmed(choice: Choice, verdicts: Verdicts, ids_V: Array) -> Array:
    """Token ids of the declared rocks that the other half of the prompts declares as well."""
    rocks, confirmed_V = choice.rocks("certified"), verdicts.certified.confirmed_V
    return ids_V[rocks[confirmed_V[rocks]]] if confirmed_V is not None else ids_V[:0]


def _control_remarks(controls: dict[str, Control]) -> list[Remark]:
    remarks = []
    for name, control in controls.items():
        if control.num_placed < 0.99 * control.num_wanted:
            counts = {"placed": control.num_placed, "wanted": control.num_wanted}
            remarks.append(Remark("control_short", {"control": name, **counts}))
        if name == "control_loss" and control.loss_placed < 0.95 * control.loss_wanted:
            share = control.loss_placed / control.loss_wanted
            remarks.append(Remark("control_loss_short", {"control": name, "share": float(share)}))
    return remarks


def _remarks(halves: Halves, choice: Choice, measured: Scores, verdicts: Verdicts) -> list[Remark]:
    remarks = []
    spread = verdicts.concentration
    prompts = {"prompts": spread.num_prompts_measured}
    if spread.intervals_too_short:
        few = {"positions_80": float(spread.positions_80), "enough": FEW_PROMPTS}
        remarks.append(Remark("intervals_too_short", {**prompts, **few}))
    elif spread.num_prompts_measured < FEW_PROMPTS:
        remarks.append(Remark("few_prompts", prompts))
    remarks += _cannot_declare(halves, choice, measured)
    remarks += choice.remarks
    for name in RANKED:
        if (found := len(choice.rocks(name))) < choice.ks[name]:
            remarks.append(Remark("fewer_than_k", {"definition": name, "found": found, "k": choice.ks[name]}))
    if not verdicts.has_late and (verdicts.certified.class_V == LEARNING).any():
        remarks.append(Remark("two_checkpoints"))
    return remarks


def _cannot_declare(halves: Halves, choice: Choice, measured: Scores) -> list[Remark]:
    """Why rocks cannot be declared on these occurrences, where they cannot."""
    remarks = []
    least, greatest = halves.loss_range
    if measured.r_V.sum() <= 0:
        remarks.append(Remark("loss_not_positive"))
    elif greatest - least <= 1e-6 * max(abs(least), abs(greatest)):
        remarks.append(Remark("losses_equal"))
    if halves.measurement.loss_pre_N is None:
        remarks.append(Remark("no_loss_before"))
    if not choice.certified.tests.testable_V.any():
        remarks.append(Remark("no_testable_type", {"least": MIN_PROMPTS, "prompts": choice.pairs.num_prompts}))
    return remarks


def _types(
    halves: Halves,
    config: DetectConfig,
    texts: list[str],
    kinds: Array,
    choice: Choice,
    measured: Scores,
    verdicts: Verdicts,
) -> Row:
    """Columns of the types table: measured on the half that had no say, and ranks from the half that had."""
    occurrences, count_V = halves.measurement, measured.count_V
    number = len(count_V)
    columns: Row = {
        "token_id": occurrences.token_ids_V,
        "token": np.array(texts, dtype=object),
        "cluster": kinds.astype(object),
        **_class_columns(choice, verdicts),
        "count": count_V,
        "count_all": count_V + choice.scores.count_V,
        "num_prompts": choice.pairs.prompts_V + verdicts.prompts_V,
        "rock_count": measured.sums.totals["rock"].astype(np.int64),
    }
    losses = {"loss_pre": occurrences.loss_pre_N, "loss_post": occurrences.loss_post_N}
    for name in (*losses, *occurrences.entropies):
        loss_N = losses[name] if name in losses else occurrences.entropies[name]
        columns[name] = np.full(number, np.nan) if loss_N is None else type_means(occurrences.type_N, loss_N, number)
    intervals = type_intervals(measured, config)
    for name, values in (("r", measured.r_V), ("ccr", measured.ccr_V), ("excess", measured.excess_V)):
        columns[name] = values
        columns[f"{name}_low"], columns[f"{name}_high"] = intervals[name].low_V, intervals[name].high_V
    columns["r_ctx"] = measured.r_ctx_V
    columns["excess_p"], columns["excess_rank_p"] = choice.excess.p_V, choice.excess.rank_p_V
    columns["persistent_share"], columns["rho"] = measured.persistent_V, measured.rho_V
    grad_V = measured.sums.totals.get("grad")
    columns["grad_share"] = np.full(number, np.nan) if grad_V is None else grad_V / max(grad_V.sum(), 1e-300)
    for name in DEFINITIONS:
        rank_V = np.full(number, np.nan)
        rank_V[choice.ranked[name]] = np.arange(1, len(choice.ranked[name]) + 1)
        columns[f"rank_{name}"] = rank_V
        columns[f"in_{name}"] = np.isin(np.arange(number), choice.rocks(name))
    observed_V = columns["count_all"] > 0
    return {name: values[observed_V] for name, values in columns.items()}


def _class_columns(choice: Choice, verdicts: Verdicts) -> Row:
    """Class, confirmation, p values (of the choosing half) and fall (on the other half) of every type."""
    tests, class_V = choice.certified.tests, verdicts.certified.class_V.copy()
    costly_V = class_V != ""
    confirmed_V = np.asarray(verdicts.certified.confirmed_V, dtype=object)
    class_V[~costly_V] = confirmed_V[~costly_V] = None
    fall = verdicts.fall
    stagnant_V = tests.stagnant_V if tests.has_pre else np.full(len(class_V), np.nan)
    return {
        "class": class_V,
        "confirmed": confirmed_V,
        "p_costly": np.where(tests.testable_V, tests.costly_V, np.nan),
        "p_stagnant": np.where(tests.testable_V, stagnant_V, np.nan),
        "fall": fall.value_V,
        "fall_low": fall.low_V,
        "fall_high": fall.high_V,
        "prompts_needed": verdicts.enough.needed_V,
    }


def _controls(measurement: Occurrences, rocks: Array, config: DetectConfig) -> dict[str, Control]:
    """Control occurrences of the measured half: matched on count and run lengths, and on loss mass too."""
    rock_N = measurement.among(rocks)
    if not rock_N.any():
        return {}
    found: dict[str, Control] = {}

    def place(name: str) -> None:
        found[name] = matched_control(
            rock_N,
            measurement.rollout_N,
            measurement.loss_post_N,
            rng=rng_for(config.seed, name),
            match_loss=name == "control_loss",
        )

    names = ("control", "control_loss")
    for_each(place, names, threads=threads_for(2 * len(measurement)))
    return {name: found[name] for name in names}


def _footprints(
    measurement: Occurrences, choice: Choice, measured: Scores, controls: dict[str, Control], config: DetectConfig
) -> dict[str, Footprint]:
    """Footprint of every rock set, of all costly types and of the controls, where they cover anything."""
    types = {name: choice.rocks(name) for name in DEFINITIONS} | {"costly": choice.certified.costly}
    found: dict[str, Footprint] = {}
    grad_N = measurement.grad_norm_N  # read once for all sets
    held = replace(measurement, extras={} if grad_N is None else {"grad_norm": grad_N})
    observed = int((measured.count_V + choice.scores.count_V > 0).sum())

    def work(name: str) -> None:
        chosen_N = measurement.among(types[name]) if name in types else controls[name].chosen_N
        found[name] = footprint(
            name,
            held,
            chosen_N,
            measured.sums.unit_N,
            num_types=len(types[name]) if name in types else len(np.unique(measurement.type_N[chosen_N])),
            observed_types=observed,
            rng=rng_for(config.seed, "resamples"),
            resamples=config.resamples,
            level=config.level,
        )

    covering = [name for name, own in types.items() if measured.count_V[own].any()]
    covering += [name for name, control in controls.items() if control.num_placed]
    for_each(work, covering, threads=threads_for(2 * len(measurement)))
    return {name: found[name] for name in covering}


def _clusters(kinds: Array, rocks: Array, measured: Scores) -> list[ClusterRow]:
    rows = []
    for cluster in CLUSTERS:
        own = rocks[kinds[rocks] == cluster]
        if len(own):
            rows.append(ClusterRow(cluster, len(own), *shares(own, measured)))
    return rows


def _groups(selection: Occurrences, scores: Scores, rocks: Array, config: DetectConfig) -> dict[str, Array]:
    """Groups that persistence and geometry compare; high loss means before OPD where that is known."""
    loss_N = selection.loss_post_N if selection.loss_pre_N is None else selection.loss_pre_N
    mean_V = np.nan_to_num(type_means(selection.type_N, loss_N, len(scores.count_V)), nan=-np.inf)
    return make_groups(rocks, scores.count_V, mean_V, num_rare=config.num_rare, rng=rng_for(config.seed, "groups"))


def _persistence(
    halves: Halves, choice: Choice, measured: Scores, groups: dict[str, Array], config: DetectConfig
) -> tuple[list[PersistenceRow], list[Remark]]:
    if halves.measurement.loss_pre_N is None:
        return [], [Remark("one_checkpoint")]
    rows = persistence(
        halves.selection,
        halves.measurement,
        choice.scores.sums.unit_N,
        measured.sums.unit_N,
        groups,
        rng=rng_for(config.seed, "persistence"),
        resamples=config.resamples,
        level=config.level,
    )
    return rows, []
