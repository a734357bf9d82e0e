"""The stage `score`: what every sampled token cost under each checkpoint; writes occurrences/step=N.

A job is some rollouts under every checkpoint of a group, with one pass of the teacher. Its part is a folder:
STEP.parquet and top-STEP.parquet for each checkpoint, and gradients.safetensors for the last one.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rocktokens.errors import ConfigError, RunError
from rocktokens.jobs import Job, Place, advance, keep
from rocktokens.jobs import run as run_jobs
from rocktokens.models.settings import PairConfig
from rocktokens.run import Run, digest_of_value, open_run, working_on, write_draft, writing
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.shown import shown_rollouts
from rocktokens.servers.settings import ServersConfig
from rocktokens.stage import Stage, inputs_of, pair_of
from rocktokens.tables import OCCURRENCES, TOP_TOKENS
from rocktokens.values import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rocktokens.models.pair import Pair
    from rocktokens.sample.rollouts import RolloutRows

log = logging.getLogger(__name__)

PART_ROLLOUTS = 256  # of one job; independent of token_budget, so a resumed run may change it
STUDENTS_MEMORY_SHARE = 0.25  # several students share one pass of the teacher while their weights fit into this


def score(
    path: Path,
    config: ScoreConfig,
    *,
    servers: ServersConfig | None = None,
    again: bool = False,
    place: Place | None = None,
) -> Run:
    """Score the run's rollouts under the chosen checkpoints and the teacher into occurrences/step=N.

    Every checkpoint is a stage of its own (score/step=N): another one can be added without scoring the others again.
    """
    from rocktokens.models.devices import choose_device, memory

    with working_on(path):
        run, servers, place = open_run(path), servers or ServersConfig(), place or Place()
        if not run.done("sample"):
            raise RunError(f"{path} has no rollouts yet; run `rocktokens sample {path}` first")
        pair = pair_of(run)
        kept, asked = run.checkpoints() or [0], {word.strip() for word in config.checkpoints.split(",")}
        if asked != {"all"} and not asked <= set(map(str, kept)):
            known = ", ".join(map(str, kept))
            raise ConfigError(f"checkpoints must be all, or some of {known}; got {config.checkpoints!r}")
        steps = [step for step in kept if asked == {"all"} or str(step) in asked]
        scored = [step for step in run.steps() if run.done(f"score/step={step}")]
        if not again and run.done("score") and set(steps) < set(scored):
            raise RunError(
                f"{path}: checkpoints {', '.join(map(str, scored))} are scored, and only "
                f"{', '.join(map(str, steps))} asked for. Pass --again to keep only these."
            )
        stages = {step: _stage(run, pair, config, step, servers) for step in {*steps, *scored}}
        whole = Stage(run, "score", {"score": config}, inputs_of(run, files=("rollouts.parquet",)))
        missing = [step for step in steps if again or not stages[step].is_complete()]
        if not missing and run.done("score"):
            log.info("%s: score is complete; nothing to do", path)
            whole.remove_parts()
            return run
        for step in missing:
            stages[step].due(again)  # says why, or refuses
        folders = [run.checkpoint(step) for step in missing]
        size = max((sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders), default=0)
        room = STUDENTS_MEMORY_SHARE * memory(choose_device("auto"))[1] / place.workers
        at_once = max(1, int(room // max(size, 1)))
        for start in range(0, len(missing), at_once):
            group = {step: stages[step] for step in missing[start : start + at_once]}
            _score(run, pair, group, config, servers, place)
        for step in scored:  # of other rollouts, or not asked for any more
            if step not in steps and (again or not stages[step].is_complete()):
                run.reopen(f"score/step={step}")
                run.clear_occurrences(step)
        whole.finish({"steps": run.steps()})
        whole.remove_parts()
        return run


def _source(run: Run, pair: PairConfig, step: int) -> str:
    return str(run.checkpoint(step)) if step in run.checkpoints() else pair.student


def _stage(run: Run, pair: PairConfig, config: ScoreConfig, step: int, servers: ServersConfig) -> Stage:
    # Of a served teacher only rounded states change scores; None as in records of older versions.
    rounds = bool(servers.teacher) and servers.wire != "float32"
    settings: dict[str, object] = {"top": config.top, "teacher_wire": servers.wire if rounds else None}
    if step == max([0, *run.checkpoints()]):
        settings["gradients"] = config.gradients
    models = {"teacher": pair.teacher, f"checkpoint {step}": _source(run, pair, step)}
    inputs = inputs_of(run, files=("rollouts.parquet",), models=models)
    return Stage(run, f"score/step={step}", {"scoring": settings}, inputs, guards=("settings",))


def _score(
    run: Run, pair: PairConfig, stages: dict[int, Stage], config: ScoreConfig, servers: ServersConfig, place: Place
) -> None:
    """Score a group of checkpoints, with one pass of the teacher, and record each."""
    from rocktokens.models.pair import pair_facts
    from rocktokens.models.states import Sequences
    from rocktokens.sample.rollouts import RolloutRows
    from rocktokens.servers.connect import open_states

    table = run.read("rollouts", ["rollout_id", "correct", "prompt_id", "prompt_ids", "token_ids"])
    rollouts, served = RolloutRows(table), dict[str, object]()
    if servers.teacher:  # what they serve, and whether they take every rollout, is asked before any work
        source, _ = open_states(pair, servers, pair_facts(pair))
        for rollout in rollouts:
            text = (rollout.prompt_ids + rollout.token_ids,)
            source.check(Sequences(text, (len(rollout.prompt_ids),), (rollout.rollout_id,)))
        served = {"teacher_served": source.served, "wire": source.wire}
    ids, lengths = table["rollout_id"].to_pylist(), [len(tokens) for tokens in table["token_ids"]]
    how: Row = {"path": run.path, "pair": pair, "config": config, "servers": servers}
    how["sources"] = {step: _source(run, pair, step) for step in stages}
    how["shown"] = [ids[at] for at in shown_rollouts(table["correct"].to_pylist(), lengths)]
    parts = run.path / "score.parts" / digest_of_value([stage.key for stage in stages.values()])
    jobs = []
    for number, start in enumerate(range(0, len(rollouts), PART_ROLLOUTS)):
        name, stop = f"{number:05d}", min(start + PART_ROLLOUTS, len(rollouts))
        jobs.append(Job(name, parts / name, {"start": start, "stop": stop, **how}, size=stop - start))
    what = f"scoring checkpoint {', '.join(map(str, stages))}"
    run_jobs(jobs, score_part, place, what=what, unit="rollouts")
    for step, stage in stages.items():
        _finish(run, stage, step, config, served, [job.part for job in jobs])


def score_part(
    part: Path,
    *,
    path: Path,
    pair: PairConfig,
    sources: dict[int, str],
    config: ScoreConfig,
    servers: ServersConfig,
    shown: list[str],
    start: int,
    stop: int,
) -> None:
    """One job: some rollouts under the checkpoints in `sources` (step → model)."""
    from safetensors.torch import save_file

    from rocktokens.geometry.gradients import GradientGeometry
    from rocktokens.score.scoring import TopTokenRecorder
    from rocktokens.score.scoring import score as score_rollouts

    models, students, rollouts = keep(
        ("scoring", path, pair, sources, servers), lambda: _load(path, pair, sources, servers)
    )
    last = max([0, *open_run(path).checkpoints()])
    gradients = GradientGeometry(models.vocabulary) if config.gradients and last in sources else None
    tables = {step: [OCCURRENCES.empty_table()] for step in sources}
    tops = {step: [TOP_TOKENS.empty_table()] for step in sources}

    def keep_top(step: int, table: pa.Table) -> None:
        tops[step].append(table.select(TOP_TOKENS.names).cast(TOP_TOKENS))

    score_rollouts(
        rollouts[start:stop],
        students,
        models.teacher_source(),
        eos_ids=models.eos_ids,
        vocabulary=models.vocabulary,
        write=lambda step, table: tables[step].append(table.select(OCCURRENCES.names).cast(OCCURRENCES)),
        token_budget=config.token_budget,
        observers=None if gradients is None else {last: gradients.update},
        top=TopTokenRecorder(shown, config.top, models.vocabulary, keep_top, costly_step=last) if config.top else None,
        progress=advance,
    )
    with writing(part) as draft:
        draft.mkdir()
        for step in sources:
            write_draft(pa.concat_tables(tables[step]), draft / f"{step}.parquet")
            if config.top:
                write_draft(pa.concat_tables(tops[step]), draft / f"top-{step}.parquet")
        if gradients is not None:
            save_file(gradients.state(), draft / "gradients.safetensors")


def _load(
    path: Path, pair: PairConfig, sources: dict[int, str], servers: ServersConfig
) -> tuple[Pair, dict[int, PreTrainedModel], RolloutRows]:
    """The teacher, all students, and the rollouts."""
    from rocktokens.models.pair import load_model
    from rocktokens.sample.rollouts import RolloutRows
    from rocktokens.servers.connect import open_pair

    rollouts = RolloutRows(open_run(path).read("rollouts", ["prompt_id", "rollout_id", "prompt_ids", "token_ids"]))
    first, *_ = sources.values()
    models = open_pair(dataclasses.replace(pair, student=first), servers, check=False)
    students = {step: models.student if name == first else load_model(name, pair) for step, name in sources.items()}
    return models, students, rollouts


def _finish(
    run: Run, stage: Stage, step: int, config: ScoreConfig, served: dict[str, object], parts: list[Path]
) -> None:
    """Put a checkpoint's parts in place of its old occurrences and record it."""
    files = {"occurrences": [part / f"{step}.parquet" for part in parts]}
    if config.top:
        files["top_tokens"] = [part / f"top-{step}.parquet" for part in parts]
    run.replace_occurrences(step, files, stage=stage.name)
    if "gradients" in stage.settings["scoring"] and config.gradients and parts:
        from rocktokens.geometry.gradients import gathered

        run.write_tensors("gradients", gathered([part / "gradients.safetensors" for part in parts]).state())
    counts = run.query(
        "select rollout_id, count(*) as n, count(*) filter (not isfinite(kl)) as bad from occurrences "
        f"where step = {step} group by rollout_id order by rollout_id"
    ).to_pylist()
    rollouts = [row["rollout_id"] for row in counts if row["bad"]]
    bad = sum(row["bad"] for row in counts)
    if rollouts:
        log.warning(
            "checkpoint %d gave NaN or infinite logits at %d occurrences of %d rollouts, first in rollout %s; "
            "their rows are kept, marked by NaN",
            *(step, bad, len(rollouts), rollouts[0]),
        )
    number = sum(row["n"] for row in counts)
    stage.finish({"occurrences": number, "invalid": bad, "invalid_rollouts": rollouts[:20], **served})
