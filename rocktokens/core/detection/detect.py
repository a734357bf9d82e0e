"""Which token types stay expensive: the story of detection, from occurrences to a report (METHOD §3).

Types are ranked on one half of the prompts, and every number about them is measured on the other half. Read this
file top to bottom; the verbs live in ranking, context, sweep, footprint, controls and persistence. Nothing here reads
a file or loads a model. A pipeline stage calls it like this:

    by_step = {step: table of occurrences/step=N}           # all kept checkpoints, scored on the same rollouts
    report = detect_rocks(Occurrences.from_checkpoints(by_step, signal=config.signal), tokenizer, config,
                          embedding_VH=student's input embeddings, or None)
    write report.types_table(), .sweep_table(), .sensitivity_table(), .persistence_table()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.config import DetectConfig
from rocktokens.core.detection.clusters import CLUSTERS, clusters_of, token_texts
from rocktokens.core.detection.context import Floats, type_vectors
from rocktokens.core.detection.controls import Control, matched_control
from rocktokens.core.detection.footprint import Footprint, density, footprint
from rocktokens.core.detection.halves import Choice, Halves, choose, measure, split_halves
from rocktokens.core.detection.occurrences import Array, Occurrences
from rocktokens.core.detection.persistence import PersistenceRow, make_groups, persistence, type_means
from rocktokens.core.detection.rock_report import ClusterRow, RockReport
from rocktokens.core.detection.scores import DEFINITIONS, Scores, burden_from_counts, rng_for, type_intervals
from rocktokens.core.detection.sensitivity import overlaps, sensitivity, shares

__all__ = ["DetectConfig", "Occurrences", "RockReport", "burden_from_counts", "detect_rocks"]

# Shapes: N occurrences, V token types.
FEW_PROMPTS = 20


def detect_rocks(
    occurrences: Occurrences | pa.Table | Mapping[str, Any],
    tokenizer: Any | None = None,
    config: DetectConfig | None = None,
    *,
    embedding_VH: Array | None = None,
) -> RockReport:
    """Rock sets by every definition, their footprint, controls, sensitivity and persistence.

    `occurrences`: an `Occurrences`, or a table with rollout_id, position, token_id, loss (and where there are loss_pre,
    prompt_id, grad_norm, entropies). `tokenizer` (Hugging Face) names the tokens; `embedding_VH`, the student's input
    embeddings, encodes contexts, else seeded random vectors do.
    """
    config = config or DetectConfig()
    if not isinstance(occurrences, Occurrences):
        occurrences = Occurrences.from_table(occurrences, signal=config.signal)
    texts = token_texts(occurrences.token_ids_V, tokenizer)
    vector_VH = type_vectors(
        occurrences.token_ids_V,
        dims=config.context_dims,
        rng=rng_for(config.seed, "vectors"),
        embedding_VH=embedding_VH,
    )
    halves = split_halves(occurrences, config)
    choice = choose(halves.selection, config, vector_VH)
    measured = measure(halves.measurement, config, vector_VH, choice.scores)
    return _report(halves, config, tokenizer, texts, vector_VH, choice, measured)


def _report(
    halves: Halves,
    config: DetectConfig,
    tokenizer: Any | None,
    texts: list[str],
    vector_VH: Floats,
    choice: Choice,
    measured: Scores,
) -> RockReport:
    everything, measurement = halves.everything, halves.measurement
    rocks = choice.rocks(config.definition)
    ids_V = everything.token_ids_V
    kinds = np.array(clusters_of(texts, tokenizer))
    controls = _controls(measurement, rocks, config)
    groups = _groups(halves.selection, choice.scores, rocks, config)
    rows, skipped = _persistence(halves, choice, measured, groups, config)
    notes = [*everything.notes, *_notes(everything, choice, measured), *_control_notes(controls), *skipped]
    return RockReport(
        config=config,
        definition=config.definition,
        k=choice.k,
        sets={name: ids_V[choice.rocks(name)] for name in DEFINITIONS},
        thresholds=choice.scores.thresholds,
        types=_types(halves, config, texts, kinds, choice, measured),
        sweep=choice.sweep,
        sensitivity=sensitivity(halves.selection, config, vector_VH, choice, measured),
        footprints=_footprints(measurement, choice, measured, controls, config),
        density=density(measurement, np.isin(measurement.type_N, rocks)),
        clusters=_clusters(kinds, rocks, measured),
        controls=controls,
        overlaps=overlaps(halves.selection, config, vector_VH, choice),
        groups={name: ids_V[types] for name, types in groups.items()},
        persistence=rows,
        num_occurrences=len(everything),
        num_left_out=everything.num_left_out,
        num_prompts=everything.num_prompts,
        num_rollouts=len(np.unique(everything.rollout_N)),
        num_types=int((choice.scores.count_V + measured.count_V > 0).sum()),
        num_prompts_measured=measured.sums.num_prompts,
        notes=tuple(notes),
    )


def _control_notes(controls: dict[str, Control]) -> list[str]:
    notes = []
    for name, control in controls.items():
        if control.num_placed < 0.99 * control.num_wanted:
            notes.append(f"{name}: room for {control.num_placed} of {control.num_wanted} occurrences only")
        if name == "control_loss" and control.loss_placed < 0.95 * control.loss_wanted:
            share = control.loss_placed / control.loss_wanted
            notes.append(
                f"{name}: the costliest non-rocks carry {100 * share:.0f} % of the rocks' loss; that is the match"
            )
    return notes


def _notes(everything: Occurrences, choice: Choice, measured: Scores) -> list[str]:
    notes = []
    if everything.num_prompts < FEW_PROMPTS:
        notes.append(f"only {everything.num_prompts} prompts: intervals from fewer than {FEW_PROMPTS} are rough")
    if choice.note:
        notes.append(choice.note)
    for name in DEFINITIONS:
        if len(choice.rocks(name)) < choice.k:
            notes.append(f"`{name}`: {len(choice.rocks(name))} token types qualify, fewer than K = {choice.k}")
    if everything.loss_pre_N is None:
        notes.append("no loss before OPD: an occurrence persists by its loss after OPD alone")
    if measured.r_V.sum() <= 0:
        notes.append("the total loss is not positive: shares of the loss mean nothing here")
    return notes


def _types(
    halves: Halves, config: DetectConfig, texts: list[str], kinds: Array, choice: Choice, measured: Scores
) -> dict[str, Any]:
    """Columns of the types table: measured on the half that had no say, and ranks from the half that had."""
    occurrences, count_V = halves.measurement, measured.count_V
    intervals = type_intervals(measured, config)
    number = len(count_V)
    columns: dict[str, Any] = {
        "token_id": occurrences.token_ids_V,
        "token": texts,
        "cluster": kinds.tolist(),
        "count": count_V,
        "count_all": count_V + choice.scores.count_V,
        "rock_count": measured.sums.totals["rock"].astype(np.int64),
    }
    losses = {"loss_pre": occurrences.loss_pre_N, "loss_post": occurrences.loss_post_N, **occurrences.entropies}
    for name, loss_N in losses.items():
        values = np.full(number, np.nan) if loss_N is None else type_means(occurrences.type_N, loss_N, number)
        columns[name] = values
    for name, values in (("r", measured.r_V), ("ccr", measured.ccr_V), ("excess", measured.excess_V)):
        columns[name] = values
        columns[f"{name}_low"], columns[f"{name}_high"] = intervals[name].low_V, intervals[name].high_V
    columns["r_ctx"] = measured.r_ctx_V
    columns["excess_p"] = choice.excess.p_V
    columns["persistent_share"], columns["rho"] = measured.persistent_V, measured.rho_V
    grad_V = measured.sums.totals.get("grad")
    columns["grad_share"] = np.full(number, np.nan) if grad_V is None else grad_V / max(grad_V.sum(), 1e-300)
    for name in DEFINITIONS:
        rank_V = np.full(number, np.nan)
        rank_V[choice.ranked[name]] = np.arange(1, len(choice.ranked[name]) + 1)
        columns[f"rank_{name}"] = rank_V
        columns[f"in_{name}"] = np.isin(np.arange(number), choice.rocks(name))
    observed_V = columns["count_all"] > 0
    return {
        name: np.asarray(values)[observed_V].tolist()
        if name in ("token", "cluster")
        else np.asarray(values)[observed_V]
        for name, values in columns.items()
    }


def _controls(measurement: Occurrences, rocks: Array, config: DetectConfig) -> dict[str, Control]:
    """Control occurrences of the measured half: matched on count and run lengths, and on loss mass too."""
    rock_N = np.isin(measurement.type_N, rocks)
    if not rock_N.any():
        return {}
    return {
        name: matched_control(
            rock_N,
            measurement.rollout_N,
            measurement.loss_post_N,
            rng=rng_for(config.seed, name),
            match_loss=name == "control_loss",
        )
        for name in ("control", "control_loss")
    }


def _footprints(
    measurement: Occurrences, choice: Choice, measured: Scores, controls: dict[str, Control], config: DetectConfig
) -> dict[str, Footprint]:
    """Footprint of every rock set and of the controls, where they cover anything."""
    masks = {name: np.isin(measurement.type_N, choice.rocks(name)) for name in DEFINITIONS}
    masks |= {name: control.chosen_N for name, control in controls.items()}
    found = {}
    for name, chosen_N in masks.items():
        if not chosen_N.any():
            continue
        num_types = len(choice.rocks(name)) if name in DEFINITIONS else len(np.unique(measurement.type_N[chosen_N]))
        found[name] = footprint(
            name,
            measurement,
            chosen_N,
            measured.sums.unit_N,
            num_types=num_types,
            observed_types=int((measured.count_V + choice.scores.count_V > 0).sum()),
            rng=rng_for(config.seed, "resamples"),
            resamples=config.resamples,
            level=config.level,
        )
    return found


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
) -> tuple[list[PersistenceRow], list[str]]:
    if halves.measurement.loss_pre_N is None:
        return [], ["persistence is skipped: only one checkpoint was scored"]
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
