"""The stage `graft`: the teacher draws the rocks in the student's place; writes grafts.parquet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.bypass.rules import skippable
from rocktokens.bypass.stage import evidence_of
from rocktokens.causal.settings import BaselineConfig, GraftConfig
from rocktokens.causal.setup import CausalSetup, bar, candidate_types, causal_stage
from rocktokens.files import digest_of_value
from rocktokens.lock import working_on
from rocktokens.progress import console
from rocktokens.ranks import FirstHasFinished, ranks
from rocktokens.run import Run, open_run
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping
from rocktokens.shared import served_facts
from rocktokens.stage import Stage, pair_of
from rocktokens.values import Row

if TYPE_CHECKING:
    from rocktokens.causal.graft import GraftSets

log = logging.getLogger(__name__)


def graft(
    path: Path,
    config: GraftConfig,
    baseline: BaselineConfig,
    *,
    servers: ServersConfig | None = None,
    again: bool = False,
) -> Run:
    """Let the teacher draw the rocks, and other sets; writes grafts.parquet, one row per arm, and prints it.

    Several processes share the resumptions; the first one writes.
    """
    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "graft", {"graft": config, "graft_baseline": baseline}, baseline)
        stage.inputs["what the census would let be skipped"] = digest_of_value(list(_skippable(run, config)))
        if stage.due(again):
            try:
                _graft(stage, config, baseline, servers or ServersConfig(), again)
            except FirstHasFinished:
                return open_run(path)
        return run


def _graft(stage: Stage, config: GraftConfig, baseline: BaselineConfig, servers: ServersConfig, again: bool) -> None:
    from rocktokens.causal.graft import graft as graft_sets
    from rocktokens.causal.graft_report import graft_table
    from rocktokens.causal.graft_terminal import render
    from rocktokens.causal.served_graft import open_grafter, open_teacher

    run, parts = stage.run, stage.parts("grafts")
    remote = bool(servers.student)
    if servers.teacher and not remote:
        log.info(
            "graft draws from both models at every position and loads both here: the teacher's servers are not asked. "
            "Where the teacher does not fit, name the student's servers too (--servers.student)"
        )
    stand = CausalSetup.of(run, baseline, servers, with_teacher=not remote)
    teacher = None
    if remote:
        teacher = open_teacher(pair_of(run), servers, stand.rollouts)
    make_grafter = open_grafter(stand.sampling, teacher, stand.rollouts)
    clusters = _clusters(run) if config.clusters else {}
    sets = _sets(run, config, stand, clusters)
    found = graft_sets(
        stand.engine,
        make_grafter,
        stand.problems,
        sets,
        vocabulary=stand.pair.vocabulary,
        decode=stand.decode,
        checker=stand.checker,
        config=config,
        baseline=stand.baseline,
        known=_known_rollouts(run, baseline),
        keep=parts,
        bar=bar,
    )
    if not ranks().is_first:
        return
    types = run.types().to_pylist() if run.has("types") else []
    table = graft_table(found.rows, types, sets.target, clusters)
    gains = {row["arm"]: [row["gain"], row["gain_low"], row["gain_high"]] for row in table.to_pylist()}
    facts = {"accuracy": found.accuracy, "gains": gains, **served_facts(stand.sampling)}
    if teacher is not None:
        facts["teacher_served"] = served_facts(teacher)["served"]
    stage.publish({"grafts": table, "graft_rollouts": found.grafts}, facts)
    parts.clear()
    console().print(render(table, found.accuracy))


def _sets(run: Run, config: GraftConfig, stand: CausalSetup, clusters: dict[str, list[int]]) -> GraftSets:
    """The declared rocks, or the candidates where there are none; and what the tests so far would let be skipped."""
    from rocktokens.causal.bans import named_tokens, texts_of
    from rocktokens.causal.graft import GraftSets

    if config.rocks:
        named = named_tokens(config.rocks, texts_of(stand.pair.tokenizer), stand.pair.tokenizer)
        return GraftSets(tuple(named), clusters=clusters)
    rocks = tuple(int(token) for token in run.rocks(config.definition)["token_id"].to_pylist())
    if rocks:
        return GraftSets(rocks, skippable=_skippable(run, config), clusters=clusters)
    ends = set(stand.pair.eos_ids)
    candidates = [token for token in candidate_types(run.types().to_pylist(), (), config.top) if token not in ends]
    log.info("no rocks are declared: the %d token types of largest burden are grafted in their place", len(candidates))
    return GraftSets(tuple(candidates), name="candidates", clusters=clusters)


def _skippable(run: Run, config: GraftConfig) -> tuple[int, ...]:
    """Confirmed rocks that the census would let be skipped, where there is a census and no set was named."""
    known = not config.rocks and run.has("census") and run.has("types") and "class" in run.types().column_names
    return skippable(evidence_of(run)) if known else ()


def _clusters(run: Run) -> dict[str, list[int]]:
    """Observed token types by cluster."""
    if not run.has("types"):
        return {}
    found: dict[str, list[int]] = {}
    for row in run.types().to_pylist():
        if row["cluster"] != "unknown":
            found.setdefault(row["cluster"], []).append(row["token_id"])
    return dict(sorted(found.items()))


def _known_rollouts(run: Run, baseline: BaselineConfig) -> dict[str, list[Row]]:
    """Baseline rollouts that the knock-out stage sampled, if it did so with the same settings."""
    if not run.done("knockout") or run.manifest["config"].get("baseline") != to_mapping(baseline):
        return {}
    rows: dict[str, list[Row]] = {}
    for row in run.read("baseline").to_pylist():
        rows.setdefault(row["prompt_id"], []).append(row)
    return rows
