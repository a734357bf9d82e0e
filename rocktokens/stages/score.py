"""The stage `score`: what every sampled token cost under each checkpoint; writes occurrences/step=N."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rocktokens.config import PairConfig, ScoreConfig
from rocktokens.config.base import from_mapping
from rocktokens.errors import ConfigError, RunError
from rocktokens.progress import progress
from rocktokens.runs.store import Run, open_run

log = logging.getLogger(__name__)


# Several students are scored beside one pass of the teacher while their weights stay below this share of memory.
STUDENTS_MEMORY_SHARE = 0.25


def score(path: Path, config: ScoreConfig, *, again: bool = False) -> Run:
    """Score the run's rollouts under the chosen checkpoints and the teacher into occurrences/step=N."""
    run = open_run(path)
    if not run.done("sample"):
        raise RunError(f"{path} has no rollouts yet; run `rocktokens sample {path}` first")
    pair = from_mapping(PairConfig, run.manifest["config"]["pair"])
    steps = _steps_to_score(run, config.checkpoints)
    missing = [step for step in steps if again or not run.done(f"score/step={step}")]
    if not missing and run.done("score"):
        log.info("%s: all checkpoints are scored; nothing to do", path)
        return run
    if missing:
        _score_steps(run, pair, missing, config)
    run.finish("score", {"steps": sorted({*steps, *run.steps()})})
    return run


def _score_steps(run: Run, pair: PairConfig, missing: list[int], config: ScoreConfig) -> None:
    from rocktokens.lm.pair import load_model, load_pair
    from rocktokens.lm.sampling.rollouts import rollouts_of

    rollouts = rollouts_of(run.read("rollouts"))

    def source(step: int) -> str:
        return str(run.checkpoint(step)) if step in run.checkpoints() else pair.student

    models = load_pair(dataclasses.replace(pair, student=source(missing[0])))
    students = {missing[0]: models.student}
    for group in _groups(missing, models.student):
        for step in group:
            run.reopen(f"score/step={step}")
            run.clear_occurrences(step)
            students.setdefault(
                step, models.student if source(step) == source(missing[0]) else load_model(source(step), pair)
            )
        _score_group(run, rollouts, {step: students.pop(step) for step in group}, models, config)


def _score_group(run: Run, rollouts: list, students: dict, models: Any, config: ScoreConfig) -> None:
    from rocktokens.core.geometry import GradientGeometry
    from rocktokens.lm.scoring import score as score_rollouts

    writers = {step: run.part_writer(step) for step in students}
    last = max([0, *run.checkpoints()])
    gradients = GradientGeometry(models.vocabulary) if config.gradients and last in students else None
    tops = {step: run.top_token_writer(step) for step in students}
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
    if gradients is not None:
        run.write_tensors("gradients", gradients.state())
    for step, writer in writers.items():
        writer.flush()
        tops[step].flush()
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
        run.finish(
            f"score/step={step}",
            {
                "occurrences": done.occurrences,
                "invalid": sum(done.invalid.values()),
                "invalid_rollouts": sorted(done.invalid)[:20],
                "padding_share": round(done.padding_share, 4),
            },
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
