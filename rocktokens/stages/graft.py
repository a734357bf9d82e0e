"""The stage `graft`: the teacher draws the rocks in the student's place; writes grafts.parquet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rocktokens.config import BaselineConfig, GraftConfig
from rocktokens.config.base import to_mapping
from rocktokens.progress import console
from rocktokens.runs.lock import working_on
from rocktokens.runs.store import Run, open_run
from rocktokens.stages.causal_setup import CausalSetup, bar, causal_stage
from rocktokens.stages.stage import Stage

log = logging.getLogger(__name__)


def graft(path: Path, config: GraftConfig, baseline: BaselineConfig, *, again: bool = False) -> Run:
    """Let the teacher draw the rocks, and other sets; writes grafts.parquet, one row an arm, and prints it."""
    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "graft", {"graft": config, "graft_baseline": baseline}, baseline)
        if stage.due(again):
            _graft(stage, config, baseline)
        return run


def _graft(stage: Stage, config: GraftConfig, baseline: BaselineConfig) -> None:
    from rocktokens.core.census.graft_report import graft_table
    from rocktokens.lm.causal.graft import graft as graft_sets
    from rocktokens.lm.sampling.graft_sampler import GraftSampler
    from rocktokens.lm.sampling.rollouts import make_sampler
    from rocktokens.report.terminal.graft import render

    run, parts = stage.run, stage.parts("grafts")
    stand = CausalSetup.of(run, baseline)
    teacher = make_sampler(stand.pair, stand.rollouts, of_teacher=True)
    rocks, clusters = _rocks(run, config, stand), _clusters(run) if config.clusters else {}
    found = graft_sets(
        stand.engine,
        lambda rules, own: GraftSampler(stand.engine, teacher, rules, own),  # type: ignore[arg-type, return-value]
        stand.problems,
        rocks,
        vocabulary=stand.pair.vocabulary,
        decode=stand.decode,
        checker=stand.checker,
        clusters=clusters,
        config=config,
        baseline=stand.baseline,
        known=_known_rollouts(run, baseline),
        keep=parts.keep,
        bar=bar,
    )
    types = run.types().to_pylist() if run.has("types") else []
    table = graft_table(found.rows, types, rocks, clusters)
    gains = {row["arm"]: [row["gain"], row["gain_low"], row["gain_high"]] for row in table.to_pylist()}
    stage.publish({"grafts": table, "graft_rollouts": found.grafts}, {"accuracy": found.accuracy, "gains": gains})
    parts.clear()
    console().print(render(table, found.accuracy))


def _rocks(run: Run, config: GraftConfig, stand: CausalSetup) -> list[int]:
    from rocktokens.lm.causal.banned_sets import named_tokens, texts_of

    if config.rocks:
        return named_tokens(config.rocks, texts_of(stand.pair.tokenizer), stand.pair.tokenizer)
    return [int(token) for token in run.rocks(config.definition)["token_id"].to_pylist()]


def _clusters(run: Run) -> dict[str, list[int]]:
    """Observed token types by cluster."""
    if not run.has("types"):
        return {}
    found: dict[str, list[int]] = {}
    for row in run.types().to_pylist():
        if row["cluster"] != "unknown":
            found.setdefault(row["cluster"], []).append(row["token_id"])
    return dict(sorted(found.items()))


def _known_rollouts(run: Run, baseline: BaselineConfig) -> dict[str, list[dict[str, Any]]]:
    """Baseline rollouts that the knock-out stage sampled, if it did so with the same settings."""
    if not run.done("knockout") or run.manifest["config"].get("baseline") != to_mapping(baseline):
        return {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in run.read("baseline").to_pylist():
        rows.setdefault(row["prompt_id"], []).append(row)
    return rows
