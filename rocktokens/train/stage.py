"""The stage `distill`: train the student on its own rollouts; writes checkpoints/step=N and training.parquet."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rocktokens.bypass import list_for
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import MANIFEST, Run, failing, open_run, working_on
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import from_mapping, require, to_mapping
from rocktokens.stage import Stage, inputs_of, open_with, resolve
from rocktokens.train.settings import DistillConfig

log = logging.getLogger(__name__)

# `--again` trains here; the old training is replaced when the new one is complete.
BESIDE, OLD = ".again", ".replaced"
# What a training and the stages after it leave in a run, apart from Parquet tables.
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
    more: int | None = None,
) -> Run:
    """Distil the pair into checkpoints/step=N, with every step in training.parquet.

    `more` continues a complete training by that number of steps; repeated after a kill, it ends where it was to end.

    Under torchrun or `accelerate launch` every process calls this; only the first writes the run's manifest.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    with working_on(path) if is_first else nullcontext():
        pair, prompts = resolve(path, pair, prompts)
        if is_first and (path / BESIDE / MANIFEST).exists() and open_run(path / BESIDE).done("distill"):
            _take_over(open_run(path), open_run(path / BESIDE))  # a killed process had not come to this
            again = False
        asked = Request(pair, prompts, config, problems, servers or ServersConfig())
        if (path / MANIFEST).exists():
            run = open_with(path, pair, prompts)
            if "trainer" in run.manifest["config"] and not run.done("distill"):
                raise RunError(f"{path}: the trainer that made this run has not ended; let its script train to the end")
            require(more is None or not again, "--more continues a training, --again replaces it: give one of them")
            if more is not None and is_first:
                continue_by(run, more)
            if more is None and not asked.stage(run).due(again):
                return run
        elif more is not None:
            raise RunError(f"{path} is no run; --more continues a training that is complete")
        if config.processes > 1 and "RANK" not in os.environ:
            return _launch(path, asked, again)
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

    def identity(self) -> dict[str, object]:
        """The sections of the run's configuration that stay the same for all its stages."""
        return {"pair": to_mapping(self.pair), "prompts": to_mapping(self.prompts)}

    def stage(self, run: Run) -> Stage:
        """The stage in a run, with what it is set to and what it reads."""
        models = {"student": self.pair.student, "teacher": self.pair.teacher}
        return Stage(
            run,
            "distill",
            {"distill": self.config, "evaluation": {"problems": self.problems}},
            inputs_of(run, models=models, prompts=self.prompts),
            guards=("settings", "inputs"),
            checks_outputs=False,  # a deleted telemetry is no reason to train for hours
        )


def continue_by(run: Run, more: int) -> None:
    """Write down that the training is to continue, unless a killed process has: until it has, it is not complete.

    The settings stay those of the first part, so that the command that made the run finds it as it left it.
    """
    from rocktokens.train.checkpoints import last_complete_checkpoint

    ends = run.manifest.get("continued", [])
    if run.done("distill"):
        before = run.facts("distill")["steps"]
        if last_complete_checkpoint(run.path / "checkpoints" / ".resume") is None:
            said = "checkpoints/.resume, with its optimiser's state, is gone"
            if "trainer" in run.manifest["config"]:
                said = "a script trained it; continue there, with a larger max_steps and resume_from_checkpoint=True"
            raise RunError(f"{run.path} cannot be continued: {said}")
        run.manifest["continued"] = [*ends, before + more]
        run.reopen("distill")
        return
    if not ends:
        raise RunError(f"{run.path} has no complete training to continue; run `rocktokens distill {run.path}` first")
    begun = ends[-1] - (ends[-2] if len(ends) > 1 else run.manifest["config"]["distill"]["steps"])
    if begun != more:
        raise RunError(
            f"{run.path} is being continued by {begun} steps; repeat --more {begun} to bring that to its end"
        )


def _launch(path: Path, asked: Request, again: bool) -> Run:
    """Start `config.processes` processes of torchrun for this stage alone, and continue when they have trained."""
    import torch

    given = {name: to_mapping(getattr(asked, name)) for name in ("pair", "prompts", "config", "servers")}
    words = json.dumps({**given, "path": str(path), "problems": asked.problems, "again": again})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(asked.config.processes), "-m", "rocktokens.train.stage", words]
    own = {"PYTHONSAFEPATH": "1"}  # no module of the current directory, which may be a downloaded run
    own |= {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(command, check=False, env={**os.environ, **own})
    if ended.returncode:
        raise RunError(f"the {asked.config.processes} training processes ended with status {ended.returncode}")
    return open_run(path)


def _train(path: Path, asked: Request, again: bool) -> Run:
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.servers.connect import open_pair, require_room
    from rocktokens.train.distill import distill as train
    from rocktokens.train.trainer import processes

    # Everything that can be refused is refused before anything is written.
    if asked.config.generation == "vllm" and find_spec("vllm") is None:
        raise ConfigError("generation=vllm needs the package vllm; install it, or leave --generation out")
    modules = {"tensorboard": ("tensorboard", "tensorboardX")}
    for name in asked.config.report_to:
        if not any(find_spec(module) for module in modules.get(name, (name,)) if module.isidentifier()):
            raise ConfigError(f"report_to names {name}, which is not installed; install it or leave it out")
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
        chosen = asked.config.selector
    found = train(
        asked.config,
        models,
        prompts,
        target,
        rocks=chosen.rocks or (tuple(run.facts("detect")["rocks"]) if run.done("detect") else ()),
        bypass=list_for(run, chosen.bypass, models.tokenizer, freezes=chosen.name == "freeze" and not chosen.rocks),
        problems=held_out,
        check=checker if held_out else None,
        ends=[] if target.path != run.path else run.manifest.get("continued", []),
    )
    if ranks.is_main_process:
        asked.stage(target).finish(found.facts)
        if target.path != run.path:
            _take_over(run, target)
    ranks.wait_for_everyone()
    return run if ranks.is_main_process else open_run(path)


def _target(path: Path, asked: Request, again: bool) -> tuple[Run, Run]:
    """The run, and where the training is written: the run itself, or a folder of it where it replaces an older one."""
    sections = {**asked.identity(), "distill": to_mapping(asked.config)}
    if not again or not (path / MANIFEST).exists():
        try:
            run = Run.create(path, sections)
        except RunError as error:
            raise RunError(f"{error} Or pass --again to train anew.") from error
        return run, run
    run = Run.create(path, asked.identity())
    try:
        return run, Run.create(path / BESIDE, sections)
    except RunError:  # a training with other settings that was stopped
        shutil.rmtree(path / BESIDE, ignore_errors=True)
        return run, Run.create(path / BESIDE, sections)


def _take_over(run: Run, new: Run) -> None:
    """Put a complete training in place of the run's own, and with it remove every stage that rested on the old one.

    Each step can be repeated: a process that is killed in between continues here the next time.
    """
    run.manifest |= {"stages": {}, "records": {}, "files": {}, "continued": []}
    run.save()
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


def _artefacts(path: Path) -> list[Path]:
    names = {*FOLDERS, *FILES, *(item.name for pattern in ("*.parquet", "*.parts") for item in path.glob(pattern))}
    return [path / name for name in sorted(names) if (path / name).exists()]


if __name__ == "__main__":  # one of the processes that `_launch` started
    asked = json.loads(sys.argv[1])
    kinds = {"pair": PairConfig, "prompts": PromptsConfig, "config": DistillConfig, "servers": ServersConfig}
    settings: dict[str, Any] = {name: from_mapping(kind, asked.pop(name)) for name, kind in kinds.items()}
    distill(Path(asked.pop("path")), **settings, **asked)
