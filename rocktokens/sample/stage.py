"""The stage `sample`: rollouts of one student, or of the teacher; writes rollouts.parquet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rocktokens.jobs import Job, Place, advance, keep
from rocktokens.jobs import run as run_jobs
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, read_parquet, working_on, write_parquet
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.stage import Stage, inputs_of, open_with, resolve, student_source
from rocktokens.tables import ROLLOUTS

if TYPE_CHECKING:
    from rocktokens.prompts.tasks import Part

# Prompts of one job. Independent of batch_size, so a resumed run may change it.
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
    place: Place | None = None,
) -> Run:
    """Sample rollouts of the student (by default its last kept checkpoint) into rollouts.parquet.

    Args:
        path: the run directory.
        pair: the models; empty: those that the run names.
        prompts: where prompts come from; the default: what the run names.
        rollouts: how many, how long and how random.
        checkpoint: which model samples: last, student, teacher or the step of a kept checkpoint.
        limit: how many prompts; unset: all that `prompts` gives.
        servers: where the model is served; unset: in this process.
        again: replace rollouts that are there.
        place: where the work is done.
    """
    with working_on(path):
        pair, prompts = resolve(path, pair, prompts)
        run = open_with(path, pair, prompts)
        source = pair.teacher if checkpoint == "teacher" else student_source(run, pair, checkpoint)
        # Rollouts of a distilled student are for detection: on prompts it was not trained on.
        part: Part | None = "detection" if run.done("distill") else None
        stage = Stage(
            run,
            "sample",
            {"rollouts": rollouts, "sample": {"checkpoint": checkpoint, "limit": limit, "part": part}},
            inputs_of(run, models={f"model {checkpoint}": source}, prompts=prompts),
            guards=("settings",),
        )
        if not stage.due(again):
            return run

        from rocktokens.models.pair import context_of, pair_facts
        from rocktokens.prompts.checkers import how_checked, make_checker
        from rocktokens.prompts.tasks import load_prompts
        from rocktokens.sample.rollouts import check_lengths
        from rocktokens.servers.connect import open_sampling

        of_teacher, servers = checkpoint == "teacher", servers or ServersConfig()
        meant = pair if of_teacher else dataclasses.replace(pair, student=source)
        few = dataclasses.replace(prompts, limit=limit or prompts.limit)
        asked = load_prompts(few, pair_facts(meant).tokenizer, part=part)
        served = None
        if servers.teacher if of_teacher else servers.student:
            sampling = open_sampling(meant, servers, rollouts, of_teacher=of_teacher)
            sampling.require_room(asked, rollouts.max_new_tokens)
            served = sampling.served
        else:
            check_lengths(asked, context_of(meant.teacher if of_teacher else meant.student, meant))
        how = {"pair": meant, "prompts": prompts, "rollouts": rollouts, "servers": servers, "of_teacher": of_teacher}
        jobs = []
        for number, start in enumerate(range(0, len(asked), PART_PROMPTS)):
            group, name = asked[start : start + PART_PROMPTS], f"{number:05d}"
            size = len(group) * rollouts.num_rollouts
            jobs.append(Job(name, stage.parts / f"{name}.parquet", {"group": group, **how}, size=size))
        run_jobs(jobs, sample_part, place, what="sampling", unit="rollouts")
        table = pa.concat_tables([read_parquet(job.part) for job in jobs])
        checked = pc.count(table["correct"]).as_py()
        facts = {
            "checkpoint": checkpoint,
            "rollouts": len(table),
            "tokens": int(pc.sum(pc.list_value_length(table["token_ids"])).as_py() or 0),
            "truncated": int(pc.sum(table["truncated"]).as_py() or 0),
            "checked": checked,
            "accuracy": pc.mean(table["correct"]).as_py() if checked else None,
            **how_checked(make_checker(prompts), table["text"].to_pylist(), table["answer"].to_pylist()),
            **({"served": served} if served is not None else {}),
        }
        stage.publish({"rollouts": table}, facts)
        return run


def sample_part(
    part: Path,
    *,
    group: list[Any],
    pair: PairConfig,
    prompts: PromptsConfig,
    rollouts: RolloutConfig,
    servers: ServersConfig,
    of_teacher: bool,
) -> None:
    """One job: all rollouts of some prompts."""
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.sample.rollouts import sample_rollouts
    from rocktokens.servers.connect import open_sampling

    key = ("sampling", pair, servers, rollouts, of_teacher)
    sampling = keep(key, lambda: open_sampling(pair, servers, rollouts, of_teacher=of_teacher, check=False))
    checker = make_checker(prompts)
    made = sample_rollouts(sampling.engine, group, rollouts, sampling.facts.tokenizer, checker, progress=advance)
    write_parquet(made.cast(ROLLOUTS), part)
