"""The stage `score`: what every sampled token cost under each checkpoint; writes occurrences/step=N."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.errors import ConfigError, RunError
from rocktokens.lock import working_on
from rocktokens.models.settings import PairConfig
from rocktokens.ranks import ranks
from rocktokens.run import Run, open_run
from rocktokens.score.parts import ScoreParts
from rocktokens.score.settings import ScoreConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.stage import Stage, inputs_of, pair_of, remove_parts
from rocktokens.values import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rocktokens.models.states import Sequences
    from rocktokens.score.scoring import Rollout

log = logging.getLogger(__name__)


# Several students are scored beside one pass of the teacher while their weights stay below this share of memory.
STUDENTS_MEMORY_SHARE = 0.25


def score(path: Path, config: ScoreConfig, *, servers: ServersConfig | None = None, again: bool = False) -> Run:
    """Score the run's rollouts under the chosen checkpoints and the teacher into occurrences/step=N.

    Every checkpoint is a stage of its own (score/step=N): another one can be added without scoring the others again.
    It is scored in numbered parts, which several processes share; the first one puts them together.

    Args:
        path: the run directory.
        config: which checkpoints, and how.
        servers: where the teacher is served; unset: in this process.
        again: score again although it is done.
    """
    with working_on(path):
        run = open_run(path)
        if not run.done("sample"):
            raise RunError(f"{path} has no rollouts yet; run `rocktokens sample {path}` first")
        pair = pair_of(run)
        steps = _steps_to_score(run, config.checkpoints)
        teacher = _teacher(servers or ServersConfig())
        stages = {step: _stage(run, pair, config, step, teacher) for step in {*steps, *_scored(run)}}
        whole = Stage(run, "score", {"score": config}, inputs_of(run, files=("rollouts.parquet",)))
        _refuse_fewer(run, steps, again)
        missing = [step for step in steps if again or not stages[step].is_complete()]
        if not missing and run.done("score"):
            log.info("%s: score is complete; nothing to do", path)
            remove_parts(run, "score")
            return run
        for step in missing:
            stages[step].due(again)  # says why, or refuses
        if missing:
            asked = {step: stages[step] for step in missing}
            _score_steps(run, pair, asked, config, servers or ServersConfig(), again)
        if not ranks().is_first:
            return run
        dropped = [step for step in _scored(run) if step not in steps and (again or not stages[step].is_complete())]
        for step in dropped:  # of other rollouts, or not asked for any more
            run.reopen(f"score/step={step}")
            run.clear_occurrences(step)
        whole.finish({"steps": run.steps()})
        remove_parts(run, "score")
        return run


def _teacher(servers: ServersConfig) -> Json:
    """Settings of a served teacher that change scores: the precision of its states where they are rounded."""
    rounds = bool(servers.teacher) and servers.wire != "float32"
    return {"teacher_wire": servers.wire if rounds else None}


def _stage(run: Run, pair: PairConfig, config: ScoreConfig, step: int, teacher: Json) -> Stage:
    settings: Json = {"top": config.top, **teacher}
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


def _score_steps(
    run: Run, pair: PairConfig, stages: dict[int, Stage], config: ScoreConfig, servers: ServersConfig, again: bool
) -> None:
    from rocktokens.models.pair import load_model
    from rocktokens.sample.rollouts import rollouts_of
    from rocktokens.servers.connect import open_pair
    from rocktokens.servers.states import ServedStates

    rollouts = rollouts_of(run.read("rollouts", ["prompt_id", "rollout_id", "prompt_ids", "token_ids"]))
    missing = list(stages)
    first = _source(run, pair, missing[0])
    meant = dataclasses.replace(pair, student=first)
    models = open_pair(meant, servers)
    source = models.teacher_source()
    if isinstance(source, ServedStates):
        for rollout in rollouts:
            source.check(_sequence(rollout))
    facts = _served_facts(source)
    students = {missing[0]: models.student}
    for group in _groups(missing, models.student):
        for step in group:
            name = _source(run, pair, step)
            students.setdefault(step, models.student if name == first else load_model(name, pair))
        own = {step: students.pop(step) for step in group}
        ScoreParts(run, {step: stages[step] for step in group}, models, config, facts).score(rollouts, own)
    if ranks().is_first:
        stages[missing[0]].parts("scores").clear()


def _sequence(rollout: Rollout) -> Sequences:
    from rocktokens.models.states import Sequences

    ids = (rollout.prompt_ids + rollout.token_ids,)
    return Sequences(ids, (len(rollout.prompt_ids),), (rollout.rollout_id,))


def _served_facts(source: object) -> Json:
    """For the manifest: which teacher was served, and the precision of its states; nothing where it was loaded here."""
    from rocktokens.servers.states import ServedStates

    return {"teacher_served": source.served, "wire": source.wire} if isinstance(source, ServedStates) else {}


def _groups(steps: list[int], model: PreTrainedModel) -> Iterable[list[int]]:
    """As many students at once as the memory of their device allows, so that the teacher runs as seldom as possible."""
    from rocktokens.models.requirements import free_memory

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    device = next(model.parameters()).device
    at_once = max(1, int(STUDENTS_MEMORY_SHARE * free_memory(device) // max(size, 1)))
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
