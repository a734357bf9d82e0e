"""The stage `knockout`: ban every candidate in turn; writes baseline.parquet, knockouts.parquet and census.parquet."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.causal.setup import CausalSetup, bar, candidate_types, causal_stage
from rocktokens.errors import ConfigError
from rocktokens.lock import working_on
from rocktokens.progress import console
from rocktokens.ranks import FirstHasFinished, ranks
from rocktokens.run import Run, open_run
from rocktokens.servers.settings import ServersConfig
from rocktokens.shared import served_facts
from rocktokens.stage import Stage
from rocktokens.tables import ROLLOUTS

log = logging.getLogger(__name__)

PIECE_POSITIONS = 2_000_000  # scored positions in memory at a time


def knockout(
    path: Path,
    config: KnockoutConfig,
    baseline: BaselineConfig,
    *,
    servers: ServersConfig | None = None,
    again: bool = False,
) -> Run:
    """Ban every candidate in turn; writes the census and prints it.

    Several processes share the resumptions; each of them follows the looks, and the first one writes.
    """
    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "knockout", {"knockout": config, "baseline": baseline}, baseline)
        if stage.due(again):
            try:
                _knockout(stage, config, baseline, servers, again)
            except FirstHasFinished:
                return open_run(path)
        return run


def _knockout(
    stage: Stage, config: KnockoutConfig, baseline: BaselineConfig, servers: ServersConfig | None, again: bool
) -> None:
    from rocktokens.causal.census import Census, census_facts, census_table
    from rocktokens.causal.knockout import check_sets, knockout_census
    from rocktokens.causal.knockout_terminal import render

    run, parts = stage.run, stage.parts("knockouts")
    stand = CausalSetup.of(run, baseline, servers)
    sets = _sets(run, config, stand)
    check_sets(sets, stand.pair.eos_ids, stand.pair.vocabulary)
    found = knockout_census(
        stand.engine,
        stand.problems,
        sets,
        decode=stand.decode,
        checker=stand.checker,
        eos_ids=stand.pair.eos_ids,
        vocabulary=stand.pair.vocabulary,
        config=config,
        baseline=stand.baseline,
        keep=parts,
        bar=bar,
    )
    if not ranks().is_first:
        return
    census: Census = found.census
    for note in census.notes:
        log.warning("%s", note)
    tables = {"baseline": found.baseline.cast(ROLLOUTS), "knockouts": found.knockouts}
    facts = {**census_facts(census), **served_facts(stand.sampling)}
    stage.publish({**tables, "census": census_table(census)}, facts)
    parts.clear()
    console().print(render(census))


def _sets(run: Run, config: KnockoutConfig, stand: CausalSetup) -> list[Any]:
    """What is banned: candidates named or from types.parquet, with windows, families, controls."""
    from rocktokens.causal.bans import make_sets, named_tokens, texts_of

    texts = texts_of(stand.pair.tokenizer)
    types = run.types().to_pylist() if run.has("types") else []
    if config.candidates:
        candidates = named_tokens(config.candidates, texts, stand.pair.tokenizer)
    else:
        if not types:
            raise ConfigError(
                "the run has no types.parquet to take candidates from; run `rocktokens detect` first, or name them "
                "with --candidates"
            )
        candidates = candidate_types(types, _declared(run, config), config.top)
        ends = [token for token in candidates if token in stand.pair.eos_ids]
        if ends:
            log.info("the end token is among the candidates and is not banned: no rollout could end")
        candidates = [token for token in candidates if token not in ends]
    detected = run.facts("detect") if run.done("detect") else {}
    thresholds = detected.get("thresholds", {})
    return make_sets(
        candidates,
        config,
        texts,
        eos_ids=stand.pair.eos_ids,
        rocks=detected.get("rocks", []),
        count={row["token_id"]: row.get("count_all") or row["count"] or 0 for row in types},
        occurrences=_pieces(run) if "window" in config.kinds and run.steps() else None,
        tau=thresholds.get("tau_post"),
        width=thresholds.get("window", 4),
    )


def _declared(run: Run, config: KnockoutConfig) -> list[int]:
    """Rocks of the definition asked for, else of the one that `detect` chose."""
    if not run.done("detect"):
        return []
    if config.definition is None:
        return [int(token) for token in run.facts("detect")["rocks"]]
    return [int(token) for token in run.rocks(config.definition)["token_id"].to_pylist()]


def _pieces(run: Run) -> Iterator[dict[str, np.ndarray]]:
    """Token, loss and rollout of every position at the last scored checkpoint, in order, some whole rollouts at a time.

    However the rollouts lie in their files: where they lie in order, only the files of a piece are read for it.
    """
    step = run.steps()[-1]
    rollouts = run.query(
        f"select rollout_id, count(*) as positions from occurrences where step = {step} group by all order by all"
    )
    piece_R = np.cumsum(rollouts["positions"].to_numpy()) // PIECE_POSITIONS
    for start, stop in zip(*_bounds(piece_R)):
        first, last = (rollouts["rollout_id"][int(place)].as_py() for place in (start, stop - 1))
        table = run.query(
            "select dense_rank() over (order by rollout_id) as rollout, token_id as token, kl as loss from occurrences "
            f"where step = {step} and rollout_id between ? and ? order by rollout_id, position",
            (first, last),
        )
        yield {name: table[name].to_numpy() for name in ("rollout", "token", "loss")}


def _bounds(piece_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal numbers starts and stops."""
    starts = np.flatnonzero(np.diff(piece_R, prepend=-1))
    return starts, np.append(starts[1:], len(piece_R))
