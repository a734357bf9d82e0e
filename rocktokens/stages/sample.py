"""The stage `sample`: rollouts of one student, or of the teacher; writes rollouts.parquet."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from rocktokens.config import PairConfig, PromptsConfig, RolloutConfig
from rocktokens.config.base import from_mapping, to_mapping
from rocktokens.progress import progress
from rocktokens.runs.schema import ROLLOUTS
from rocktokens.runs.store import MANIFEST, Run, open_run
from rocktokens.stages.stage import resolve, student_source

log = logging.getLogger(__name__)


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
    """Sample rollouts of the student (by default its last kept checkpoint) into rollouts.parquet."""
    pair, prompts = resolve(path, pair, prompts)
    if again and rollouts == RolloutConfig() and (path / MANIFEST).exists():
        known = open_run(path).manifest["config"].get("rollouts")
        rollouts = rollouts if known is None else from_mapping(RolloutConfig, known)
    run = Run.create(path, {"pair": to_mapping(pair), "prompts": to_mapping(prompts), "rollouts": to_mapping(rollouts)})
    if run.done("sample") and not again:
        log.info("%s: rollouts are there; nothing to do", path)
        return run
    from rocktokens.lm.checkers import how_checked, make_checker
    from rocktokens.lm.pair import load_pair
    from rocktokens.lm.sampling.rollouts import check_lengths, make_sampler, sample_rollouts
    from rocktokens.lm.tasks import Part, load_prompts

    run.reopen("sample")
    if again:
        shutil.rmtree(run.path / "rollouts.parts", ignore_errors=True)

    models = load_pair(dataclasses.replace(pair, student=student_source(run, pair, checkpoint)))
    # Rollouts of a distilled student are for detection: on prompts it was not trained on.
    share: Part | None = "detection" if run.done("distill") else None
    asked = load_prompts(dataclasses.replace(prompts, limit=limit or prompts.limit), models.tokenizer, part=share)
    engine = make_sampler(models, rollouts, of_teacher=checkpoint == "teacher")
    check_lengths(asked, engine.context)
    checker = make_checker(prompts)
    per_part = max(1, 4 * rollouts.batch_size // rollouts.num_rollouts)
    parts = [asked[start : start + per_part] for start in range(0, len(asked), per_part)]
    with progress("sampling", len(asked) * rollouts.num_rollouts, "rollouts") as advance:
        for number, part in enumerate(parts):
            name = f"rollouts.parts/{number:05d}"
            if run.has(name):
                advance.resumed(len(part) * rollouts.num_rollouts)
                continue
            table = sample_rollouts(engine, part, rollouts, models.tokenizer, checker, progress=advance)
            run.write(name, table.cast(ROLLOUTS))
    table = pa.concat_tables(run.read(f"rollouts.parts/{number:05d}") for number in range(len(parts)))
    run.write("rollouts", table)
    checked_by = how_checked(checker, table["text"].to_pylist(), table["answer"].to_pylist())
    run.finish("sample", {"checkpoint": checkpoint, **_rollout_facts(table), **checked_by})
    shutil.rmtree(run.path / "rollouts.parts", ignore_errors=True)
    return run


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
