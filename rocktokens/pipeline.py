"""One function per stage: read what the run has, call the rooms, write what the stage makes, record it as complete.

A stage that the manifest lists is complete and does nothing when called again. This room decides the order of work and
the names of files; it computes nothing itself.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from rocktokens.config import DistillConfig, PairConfig, PromptsConfig, RolloutConfig, ScoreConfig
from rocktokens.errors import ConfigError, RunError
from rocktokens.progress import progress
from rocktokens.runs.schema import ROLLOUTS
from rocktokens.runs.store import MANIFEST, Run, open_run
from rocktokens.settings import from_mapping, to_mapping

log = logging.getLogger(__name__)

# Several students are scored beside one pass of the teacher while their weights stay below this share of memory.
STUDENTS_MEMORY_SHARE = 0.25


def resolve(path: Path, pair: PairConfig, prompts: PromptsConfig) -> tuple[PairConfig, PromptsConfig]:
    """Fill in the pair: from the run that is there, or the built-in world's own."""
    from rocktokens.world import get_world, world_names

    known: dict[str, Any] = open_run(path).manifest["config"] if (path / MANIFEST).exists() else {}
    if not pair.student and not pair.teacher and "pair" in known:
        pair = dataclasses.replace(from_mapping(PairConfig, known["pair"]), threads=pair.threads)
    if prompts == PromptsConfig() and "prompts" in known:
        prompts = from_mapping(PromptsConfig, known["prompts"])
    if prompts.source in world_names() and not pair.student and not pair.teacher:
        world = get_world(prompts.source)
        pair = dataclasses.replace(pair, student=str(world.student_path), teacher=str(world.teacher_path))
    return pair, prompts


def distill(
    path: Path,
    pair: PairConfig,
    prompts: PromptsConfig,
    config: DistillConfig,
    *,
    problems: int = 200,
    again: bool = False,
) -> Run:
    """Distil the pair into checkpoints/step=N, with every step in training.parquet.

    Under torchrun every process calls this; only the first writes the run's manifest.
    """
    if not again and _complete(path, "distill"):  # said before anything heavy is loaded
        pair, prompts = resolve(path, pair, prompts)
        run = Run.create(path, _sections(pair, prompts, config))
        log.info("%s: the student is distilled; nothing to do", path)
        return run
    from rocktokens.lm.distill import distill as train
    from rocktokens.lm.pair import load_pair
    from rocktokens.lm.tasks import load_prompts, make_checker
    from rocktokens.lm.trainer import processes

    ranks = processes()
    with ranks.main_process_first():  # the others open what the first has made
        pair, prompts = resolve(path, pair, prompts)
        run = Run.create(path, _sections(pair, prompts, config))
        if again and ranks.is_main_process:
            _forget_training(run)
    models = load_pair(pair)
    checker = make_checker(prompts)
    held_out = []
    if checker is not None:
        asked = dataclasses.replace(prompts, limit=problems, seed=prompts.seed + 1)
        held_out = [p for p in load_prompts(asked, models.tokenizer, part="detection") if p.answer is not None]
    if not held_out:
        log.info("no answers to check: accuracy is not measured while training")
    found = train(
        config,
        models,
        load_prompts(prompts, models.tokenizer, part="train"),
        run,
        rocks=config.selector.rocks or _known_rocks(run),
        problems=held_out,
        check=checker if held_out else None,
    )
    if ranks.is_main_process:
        run.finish("distill", found.facts)
    ranks.wait_for_everyone()
    return run if ranks.is_main_process else open_run(path)


def _complete(path: Path, stage: str) -> bool:
    return (path / MANIFEST).exists() and open_run(path).done(stage)


def _sections(pair: PairConfig, prompts: PromptsConfig, config: DistillConfig) -> dict[str, Any]:
    return {"pair": to_mapping(pair), "prompts": to_mapping(prompts), "distill": to_mapping(config)}


def _known_rocks(run: Run) -> tuple[int, ...]:
    return tuple(run.facts("detect")["rocks"]) if run.done("detect") else ()


def _forget_training(run: Run) -> None:
    """Remove what a training left, and with it every stage that rested on it."""
    for stage in list(run.manifest["stages"]):
        run.reopen(stage)
    for name in ("checkpoints", "telemetry", "occurrences", "compare"):
        shutil.rmtree(run.path / name, ignore_errors=True)
    for table in run.path.glob("*.parquet"):
        table.unlink()


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
    run = Run.create(path, {"pair": to_mapping(pair), "prompts": to_mapping(prompts), "rollouts": to_mapping(rollouts)})
    if run.done("sample") and not again:
        log.info("%s: rollouts are there; nothing to do", path)
        return run
    from rocktokens.lm.pair import load_pair
    from rocktokens.lm.rollouts import check_lengths, make_sampler, sample_rollouts
    from rocktokens.lm.tasks import Part, how_checked, load_prompts, make_checker

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


def student_source(run: Run, pair: PairConfig, checkpoint: str) -> str:
    """Where the asked-for student lies: a kept checkpoint, or the pair's own."""
    kept = run.checkpoints()
    if checkpoint in ("student", "teacher") or (checkpoint == "last" and not kept):
        return pair.student
    step = kept[-1] if checkpoint == "last" else int(checkpoint) if checkpoint.isdigit() else None
    if step not in kept:
        raise ConfigError(
            f"checkpoint must be last, student, teacher or one of {kept or 'none kept yet'}, got {checkpoint!r}"
        )
    return str(run.checkpoint(step))


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
    from rocktokens.lm.rollouts import rollouts_of

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
            progress=advance,
        )
    if gradients is not None:
        run.write_tensors("gradients", gradients.state())
    for step, writer in writers.items():
        writer.flush()
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
