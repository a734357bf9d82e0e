"""The stage `sample`: rollouts of one student, or of the teacher; writes rollouts.parquet."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rocktokens.config import PairConfig, PromptsConfig, RolloutConfig
from rocktokens.config.base import from_manifest, to_mapping
from rocktokens.progress import progress
from rocktokens.runs.lock import working_on
from rocktokens.runs.schema import ROLLOUTS
from rocktokens.runs.store import Run
from rocktokens.stages.stage import Stage, inputs_of, resolve, student_source

if TYPE_CHECKING:
    from rocktokens.lm.tasks import Part

log = logging.getLogger(__name__)

# Prompts of one part on disk. It does not depend on the batch size, with another of which a killed run may go on.
PART_PROMPTS = 128


def sample(
    path: Path,
    pair: PairConfig,
    prompts: PromptsConfig,
    rollouts: RolloutConfig,
    *,
    checkpoint: str = "last",
    limit: int | None = None,
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
        again: replace rollouts that are there.
    """
    with working_on(path):
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
            _sample(stage, pair, prompts, rollouts)
        return run


def _known_limit(run: Run) -> int | None:
    known = run.manifest["config"].get("sample", {})
    return known.get("limit") if run.done("sample") and isinstance(known, dict) else None


def _sample(stage: Stage, pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig) -> None:
    from rocktokens.lm.checkers import how_checked, make_checker
    from rocktokens.lm.pair import load_pair
    from rocktokens.lm.sampling.rollouts import check_lengths, make_sampler, sample_rollouts
    from rocktokens.lm.tasks import load_prompts

    run, asked_for = stage.run, stage.settings["sample"]
    checkpoint, limit = asked_for["checkpoint"], asked_for["limit"]
    models = load_pair(dataclasses.replace(pair, student=student_source(run, pair, checkpoint)))
    few = dataclasses.replace(prompts, limit=limit or prompts.limit)
    asked = load_prompts(few, models.tokenizer, part=asked_for["part"])
    engine = make_sampler(models, rollouts, of_teacher=checkpoint == "teacher")
    check_lengths(asked, engine.context)
    checker = make_checker(prompts)
    parts = stage.parts("rollouts")
    groups = [asked[start : start + PART_PROMPTS] for start in range(0, len(asked), PART_PROMPTS)]
    tables = []
    with progress("sampling", len(asked) * rollouts.num_rollouts, "rollouts") as advance:
        for number, group in enumerate(groups):
            name = f"{number:05d}"
            if parts.has(name):
                advance.resumed(len(group) * rollouts.num_rollouts)
            tables.append(
                parts.keep(
                    name,
                    lambda group=group: sample_rollouts(  # type: ignore[misc]
                        engine, group, rollouts, models.tokenizer, checker, progress=advance
                    ).cast(ROLLOUTS),
                )
            )
    table = pa.concat_tables(tables)
    checked_by = how_checked(checker, table["text"].to_pylist(), table["answer"].to_pylist())
    stage.publish({"rollouts": table}, {"checkpoint": checkpoint, **_rollout_facts(table), **checked_by})
    parts.clear()


def _rollout_facts(table: pa.Table) -> dict[str, Any]:
    import pyarrow.compute as pc

    checked = pc.count(table["correct"]).as_py()
    return {
        "rollouts": len(table),
        "tokens": int(pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0),
        "truncated": int(pc.sum(table["truncated"]).as_py() or 0),
        "checked": checked,
        "accuracy": pc.mean(table["correct"]).as_py() if checked else None,
    }
