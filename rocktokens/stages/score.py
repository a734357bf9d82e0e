"""The stage `score`: what every sampled token cost under each checkpoint; writes occurrences/step=N."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rocktokens.config import PairConfig, ScoreConfig
from rocktokens.errors import ConfigError, RunError
from rocktokens.progress import progress
from rocktokens.runs.lock import working_on
from rocktokens.runs.store import Run, open_run
from rocktokens.stages.stage import Stage, inputs_of, pair_of

log = logging.getLogger(__name__)


# Several students are scored beside one pass of the teacher while their weights stay below this share of memory.
STUDENTS_MEMORY_SHARE = 0.25


def score(path: Path, config: ScoreConfig, *, again: bool = False) -> Run:
    """Score the run's rollouts under the chosen checkpoints and the teacher into occurrences/step=N.

    Every checkpoint is a stage of its own (score/step=N): another one can be added without scoring the others again.
    """
    with working_on(path):
        run = open_run(path)
        if not run.done("sample"):
            raise RunError(f"{path} has no rollouts yet; run `rocktokens sample {path}` first")
        pair = pair_of(run)
        steps = _steps_to_score(run, config.checkpoints)
        stages = {step: _stage(run, pair, config, step) for step in {*steps, *_scored(run)}}
        whole = Stage(run, "score", {"score": config}, inputs_of(run, files=("rollouts.parquet",)))
        _refuse_fewer(run, steps, again)
        missing = [step for step in steps if again or not stages[step].is_complete()]
        if not missing and run.done("score"):
            log.info("%s: score is complete; nothing to do", path)
            return run
        for step in missing:
            stages[step].due(again)  # says why, or refuses
        if missing:
            _score_steps(run, pair, {step: stages[step] for step in missing}, config)
        dropped = [step for step in _scored(run) if step not in steps and (again or not stages[step].is_complete())]
        for step in dropped:  # of other rollouts, or not asked for any more
            run.reopen(f"score/step={step}")
            run.clear_occurrences(step)
        whole.finish({"steps": run.steps()})
        return run


def _stage(run: Run, pair: PairConfig, config: ScoreConfig, step: int) -> Stage:
    settings: dict[str, Any] = {"top": config.top}
    if step == max([0, *run.checkpoints()]):
        settings["gradients"] = config.gradients
    models = {"teacher": pair.teacher, f"checkpoint {step}": _source(run, pair, step)}
    inputs = inputs_of(run, files=("rollouts.parquet",), models=models)
    return Stage(run, f"score/step={step}", {"scoring": settings}, inputs, guards=("settings",))


def _scored(run: Run) -> list[int]:
    return [step for step in run.steps() if run.done(f"score/step={step}")]


def _refuse_fewer(run: Run, steps: list[int], again: bool) -> None:
    """Fewer checkpoints than are scored, and none that is new: nothing would happen."""
    scored = _scored(run)
    if not again and run.done("score") and set(steps) < set(scored):
        raise RunError(
            f"{run.path}: checkpoints {', '.join(map(str, scored))} are scored, and only "
            f"{', '.join(map(str, steps))} asked for. Pass --again to keep only these."
        )


def _source(run: Run, pair: PairConfig, step: int) -> str:
    return str(run.checkpoint(step)) if step in run.checkpoints() else pair.student


def _score_steps(run: Run, pair: PairConfig, stages: dict[int, Stage], config: ScoreConfig) -> None:
    from rocktokens.lm.pair import load_model, load_pair
    from rocktokens.lm.sampling.rollouts import rollouts_of

    rollouts = rollouts_of(run.read("rollouts"))
    missing = list(stages)
    first = _source(run, pair, missing[0])
    models = load_pair(dataclasses.replace(pair, student=first))
    students = {missing[0]: models.student}
    for group in _groups(missing, models.student):
        for step in group:
            source = _source(run, pair, step)
            students.setdefault(step, models.student if source == first else load_model(source, pair))
        own = {step: students.pop(step) for step in group}
        _score_group({step: stages[step] for step in group}, rollouts, own, models, config)


def _score_group(stages: dict[int, Stage], rollouts: list, students: dict, models: Any, config: ScoreConfig) -> None:
    from rocktokens.core.geometry import GradientGeometry
    from rocktokens.lm.scoring import score as score_rollouts

    run = next(iter(stages.values())).run
    for step in students:
        run.clear_new_occurrences(step)
    writers = {step: run.part_writer(step, beside=True) for step in students}
    last = max([0, *run.checkpoints()])
    gradients = GradientGeometry(models.vocabulary) if config.gradients and last in students else None
    tops = {step: run.top_token_writer(step, beside=True) for step in students}
    names = ", ".join(map(str, students))
    with progress(f"scoring checkpoint {names}", len(rollouts), "rollouts") as advance:
        facts = score_rollouts(
            rollouts,
            students,
            models.teacher,
            eos_ids=models.eos_ids,
            vocabulary=models.vocabulary,
            write=lambda step, table: writers[step].write(table),
            token_budget=config.token_budget,
            chunk=config.chunk,
            observers={last: gradients.update} if gradients is not None else None,
            top=_top_tokens(run, config, models, lambda step, table: tops[step].write(table)),
            progress=advance,
        )
    for step, writer in writers.items():
        writer.flush()
        tops[step].flush()
        run.reopen(f"score/step={step}")
        run.replace_occurrences(step)
        if gradients is not None and step == last:
            run.write_tensors("gradients", gradients.state())
        done = facts[step]
        if done.invalid:
            first, count = next(iter(done.invalid.items()))
            log.warning(
                "checkpoint %d gave NaN or infinite logits at %d occurrences of %d rollouts, first in rollout %s (%d); "
                "their rows are kept, marked by NaN",
                step,
                sum(done.invalid.values()),
                len(done.invalid),
                first,
                count,
            )
        stages[step].finish(
            {
                "occurrences": done.occurrences,
                "invalid": sum(done.invalid.values()),
                "invalid_rollouts": sorted(done.invalid)[:20],
                "padding_share": round(done.padding_share, 4),
            }
        )


def _top_tokens(run: Run, config: ScoreConfig, models: Any, write: Callable[[int, Any], None]) -> Any:
    """Keeps both models' most probable tokens for the rollouts that the report shows and the costliest positions."""
    from rocktokens.core.shown import shown_rollouts
    from rocktokens.lm.top_tokens import TopTokenRecorder

    if not config.top:
        return None
    table = run.read("rollouts", ["rollout_id", "correct", "token_ids"])
    ids = table["rollout_id"].to_pylist()
    lengths = [len(tokens) for tokens in table["token_ids"]]
    shown = shown_rollouts(table["correct"].to_pylist(), lengths)
    last = max([0, *run.checkpoints()])
    return TopTokenRecorder([ids[place] for place in shown], config.top, models.vocabulary, write, costly_step=last)


def _groups(steps: list[int], model: Any) -> Iterable[list[int]]:
    """As many students at once as memory allows, so that the teacher runs as seldom as possible."""
    import psutil

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    at_once = max(1, int(STUDENTS_MEMORY_SHARE * psutil.virtual_memory().available // max(size, 1)))
    return [steps[start : start + at_once] for start in range(0, len(steps), at_once)]


def _steps_to_score(run: Run, wanted: str) -> list[int]:
    kept = run.checkpoints() or [0]
    if wanted == "all":
        return kept
    try:
        steps = sorted({int(part) for part in wanted.split(",")})
    except ValueError:
        raise ConfigError(f"checkpoints must be all or steps such as 0,100; got {wanted!r}") from None
    unknown = [step for step in steps if step not in kept]
    if unknown:
        raise ConfigError(f"the run keeps no checkpoint {unknown[0]}; it has {', '.join(map(str, kept))}")
    return steps
