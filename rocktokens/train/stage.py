"""The stage `distill`: train the student on its own rollouts; writes checkpoints/step=N and training.parquet."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rocktokens.bypass.stage import list_for
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import MANIFEST, Run, failing, open_run, working_on
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping
from rocktokens.stage import Stage, inputs_of, resolve
from rocktokens.train.settings import DistillConfig
from rocktokens.train.terminal import show_account

log = logging.getLogger(__name__)

# `--again` trains here, beside the old training, which is replaced when the new one is complete.
BESIDE, OLD = ".again", ".replaced"
# What a training and the stages after it leave in a run, beside its Parquet tables.
FOLDERS = ("checkpoints", "telemetry", "occurrences", "top_tokens", "compare", "figures")
FILES = ("gradients.safetensors", "report.html", "bypass.json")


def distill(
    path: Path,
    pair: PairConfig,
    prompts: PromptsConfig,
    config: DistillConfig,
    *,
    problems: int = 200,
    servers: ServersConfig | None = None,
    again: bool = False,
) -> Run:
    """Distil the pair into checkpoints/step=N, with every step in training.parquet.

    Under torchrun every process calls this; only the first writes the run's manifest.
    """
    with working_on(path):
        pair, prompts = resolve(path, pair, prompts)
        if _is_first_rank() and (path / BESIDE / MANIFEST).exists() and open_run(path / BESIDE).done("distill"):
            _take_over(open_run(path), open_run(path / BESIDE))  # a killed process had not come to this
            again = False
        asked = Request(pair, prompts, config, problems, servers or ServersConfig())
        if (path / MANIFEST).exists():
            run = Run.create(path, _identity(pair, prompts))
            if not _stage(run, asked).due(again):
                return run
        return _train(path, asked, again)


@dataclass(frozen=True)
class Request:
    """What is asked of a training."""

    pair: PairConfig
    prompts: PromptsConfig
    config: DistillConfig
    problems: int
    servers: ServersConfig
    """Where the teacher is served; the student is in this process while it trains."""


def _train(path: Path, asked: Request, again: bool) -> Run:
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.servers.connect import open_pair, require_room
    from rocktokens.train.distill import distill as train
    from rocktokens.train.trainer import processes

    # Everything that can be refused is refused before anything is written.
    _require_tools(asked.config)
    models = open_pair(asked.pair, asked.servers, trains=True)
    prompts = load_prompts(asked.prompts, models.tokenizer, part="train")
    require_room(models, prompts, asked.config.max_new_tokens)
    checker = make_checker(asked.prompts)
    held_out = []
    if checker is not None:
        few = dataclasses.replace(asked.prompts, limit=asked.problems, seed=asked.prompts.seed + 1)
        held_out = [p for p in load_prompts(few, models.tokenizer, part="detection") if p.answer is not None]
    if not held_out:
        log.info("no answers to check: accuracy is not measured while training")
    ranks = processes()
    with ranks.main_process_first():  # the others open what the first has made
        run, target = _target(path, asked, again)
        rocks = asked.config.selector.rocks or _known_rocks(run)
    found = train(
        asked.config,
        models,
        prompts,
        target,
        rocks=rocks,
        bypass=list_for(run, asked.config.selector, models.tokenizer),
        problems=held_out,
        check=checker if held_out else None,
        on_end=show_account,
    )
    if ranks.is_main_process:
        _stage(target, asked).finish(found.facts)
        if target.path != run.path:
            _take_over(run, target)
    ranks.wait_for_everyone()
    return run if ranks.is_main_process else open_run(path)


def _require_tools(config: DistillConfig) -> None:
    """Trackers and an engine that are asked for must be installed."""
    from importlib.util import find_spec

    if config.generation == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "generation=vllm needs the package vllm, which is not installed; install it, or leave --generation out"
        )

    modules = {"tensorboard": ("tensorboard", "tensorboardX")}
    for name in config.report_to:
        if not any(find_spec(module) for module in modules.get(name, (name,)) if module.isidentifier()):
            raise ConfigError(f"report_to names {name}, which is not installed; install it or leave it out")


def _target(path: Path, asked: Request, again: bool) -> tuple[Run, Run]:
    """The run, and where the training is written: the run itself, or beside it where it replaces an older one."""
    sections = {**_identity(asked.pair, asked.prompts), "distill": to_mapping(asked.config)}
    if not again or not (path / MANIFEST).exists():
        try:
            run = Run.create(path, sections)
        except RunError as error:
            raise RunError(f"{error} Or pass --again to train anew.") from error
        return run, run
    run = Run.create(path, _identity(asked.pair, asked.prompts))
    try:
        return run, Run.create(path / BESIDE, sections)
    except RunError:  # a training with other settings that was stopped
        shutil.rmtree(path / BESIDE, ignore_errors=True)
        return run, Run.create(path / BESIDE, sections)


def _stage(run: Run, asked: Request) -> Stage:
    models = {"student": asked.pair.student, "teacher": asked.pair.teacher}
    return Stage(
        run,
        "distill",
        {"distill": asked.config, "evaluation": {"problems": asked.problems}},
        inputs_of(run, models=models, prompts=asked.prompts),
        guards=("settings", "inputs"),
        checks_outputs=False,  # a deleted telemetry is no reason to train for hours
    )


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _identity(pair: PairConfig, prompts: PromptsConfig) -> dict[str, object]:
    return {"pair": to_mapping(pair), "prompts": to_mapping(prompts)}


def _known_rocks(run: Run) -> tuple[int, ...]:
    return tuple(run.facts("detect")["rocks"]) if run.done("detect") else ()


def _take_over(run: Run, new: Run) -> None:
    """Put a complete training in place of the run's own, and with it remove every stage that rested on the old one.

    Each step can be repeated: a process that is killed in between goes on here the next time.
    """
    run.forget_stages()
    old, moving = run.path / OLD, run.path / f"{OLD}.part"
    with failing(run.path):
        if not old.exists():  # once it has that name, what lies in the run is the new training
            moving.mkdir(exist_ok=True)
            for item in _artefacts(run.path):
                item.replace(moving / item.name)
            moving.replace(old)
        for item in _artefacts(new.path):
            item.replace(run.path / item.name)
    run.adopt(new, "distill")
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(new.path, ignore_errors=True)


def _artefacts(path: Path) -> Iterator[Path]:
    names = {*FOLDERS, *FILES, *(item.name for pattern in ("*.parquet", "*.parts") for item in path.glob(pattern))}
    return iter([path / name for name in sorted(names) if (path / name).exists()])
