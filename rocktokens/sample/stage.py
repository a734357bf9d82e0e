"""The stage `sample`: rollouts of one student, or of the teacher; writes rollouts.parquet."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rocktokens.lock import working_on
from rocktokens.models.settings import PairConfig
from rocktokens.progress import progress
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.ranks import FirstHasFinished, ranks
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import from_manifest, to_mapping
from rocktokens.shared import served_facts, wait_for_run
from rocktokens.stage import Stage, inputs_of, resolve, student_source
from rocktokens.tables import ROLLOUTS

if TYPE_CHECKING:
    from rocktokens.prompts.tasks import Part

log = logging.getLogger(__name__)

# Prompts of one part on disk. It does not depend on the batch size, with another of which a killed run may go on.
PART_PROMPTS = 64


def sample(
    path: Path,
    pair: PairConfig,
    prompts: PromptsConfig,
    rollouts: RolloutConfig,
    *,
    checkpoint: str = "last",
    limit: int | None = None,
    servers: ServersConfig | None = None,
    again: bool = False,
) -> Run:
    """Sample rollouts of the student (by default its last kept checkpoint) into rollouts.parquet.

    Args:
        path: the run directory.
        pair: the models; empty: those that the run names.
        prompts: where prompts come from; the default: what the run names.
        rollouts: how many, how long and how random.
        checkpoint: which model samples: last, student, teacher or the step of a kept checkpoint.
        limit: how many prompts; unset: as before, or all that `prompts` gives.
        servers: where the model is served; unset: in this process.
        again: replace rollouts that are there.

    Several processes share the prompts; the first one writes the table.
    """
    with working_on(path):
        wait_for_run(path)
        pair, prompts = resolve(path, pair, prompts)
        run = Run.create(path, {"pair": to_mapping(pair), "prompts": to_mapping(prompts)})
        source = pair.teacher if checkpoint == "teacher" else student_source(run, pair, checkpoint)
        # Rollouts of a distilled student are for detection: on prompts it was not trained on.
        part: Part | None = "detection" if run.done("distill") else None
        if limit is None:
            limit = _known_limit(run)
        if again and rollouts == RolloutConfig() and run.manifest["config"].get("rollouts") is not None:
            rollouts = from_manifest(RolloutConfig, run.manifest["config"]["rollouts"], "rollouts")
        stage = Stage(
            run,
            "sample",
            {"rollouts": rollouts, "sample": {"checkpoint": checkpoint, "limit": limit, "part": part}},
            inputs_of(run, models={f"model {checkpoint}": source}, prompts=prompts),
            guards=("settings",),
        )
        if stage.due(again):
            try:
                _sample(stage, pair, prompts, rollouts, servers or ServersConfig(), again)
            except FirstHasFinished:
                return open_run(path)
        return run


def _known_limit(run: Run) -> int | None:
    known = run.manifest["config"].get("sample", {})
    return known.get("limit") if run.done("sample") and isinstance(known, dict) else None


def _sample(
    stage: Stage,
    pair: PairConfig,
    prompts: PromptsConfig,
    rollouts: RolloutConfig,
    servers: ServersConfig,
    again: bool,
) -> None:
    from rocktokens.prompts.checkers import how_checked, make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.sample.rollouts import sample_rollouts
    from rocktokens.servers.connect import open_sampling

    run, asked_for = stage.run, stage.settings["sample"]
    checkpoint, limit = asked_for["checkpoint"], asked_for["limit"]
    meant = dataclasses.replace(pair, student=student_source(run, pair, checkpoint))
    parts = stage.parts("rollouts")
    of_teacher = checkpoint == "teacher"
    sampling = open_sampling(meant, servers, rollouts, of_teacher=of_teacher)
    tokenizer = sampling.facts.tokenizer
    few = dataclasses.replace(prompts, limit=limit or prompts.limit)
    asked = load_prompts(few, tokenizer, part=asked_for["part"])
    sampling.require_room(asked, rollouts.max_new_tokens)
    checker = make_checker(prompts)
    groups = [asked[start : start + PART_PROMPTS] for start in range(0, len(asked), PART_PROMPTS)]
    with progress("sampling", len(asked) * rollouts.num_rollouts, "rollouts") as advance:

        def make(group: list[Any]) -> pa.Table:
            made = sample_rollouts(sampling.engine, group, rollouts, tokenizer, checker, progress=advance)
            return made.cast(ROLLOUTS)

        makers = {f"{number:05d}": lambda group=group: make(group) for number, group in enumerate(groups)}
        there = sum(len(group) for name, group in zip(makers, groups) if parts.has(name))
        advance.resumed(there * rollouts.num_rollouts)
        parts.make_own(makers)  # type: ignore[arg-type]
        if not ranks().is_first:
            for name in makers:  # one at a time: only the first process needs them all
                parts.wait(name)
            return
        table = pa.concat_tables([parts.wait(name) for name in makers])
    checked_by = how_checked(checker, table["text"].to_pylist(), table["answer"].to_pylist())
    facts = {"checkpoint": checkpoint, **_rollout_facts(table), **checked_by, **served_facts(sampling)}
    stage.publish({"rollouts": table}, facts)
    parts.clear()


def _rollout_facts(table: pa.Table) -> dict[str, object]:
    import pyarrow.compute as pc

    checked = pc.count(table["correct"]).as_py()
    return {
        "rollouts": len(table),
        "tokens": int(pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0),
        "truncated": int(pc.sum(table["truncated"]).as_py() or 0),
        "checked": checked,
        "accuracy": pc.mean(table["correct"]).as_py() if checked else None,
    }
