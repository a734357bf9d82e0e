"""The stage `distill`: train the student on its own rollouts; writes checkpoints/step=N and training.parquet."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

from rocktokens.config import DistillConfig, PairConfig, PromptsConfig
from rocktokens.config.base import to_mapping
from rocktokens.runs.store import Run, open_run
from rocktokens.stages.stage import is_complete, resolve

log = logging.getLogger(__name__)


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
    if not again and is_complete(path, "distill"):  # said before anything heavy is loaded
        pair, prompts = resolve(path, pair, prompts)
        run = Run.create(path, _sections(pair, prompts, config))
        log.info("%s: the student is distilled; nothing to do", path)
        return run
    from rocktokens.lm.checkers import make_checker
    from rocktokens.lm.pair import load_pair
    from rocktokens.lm.tasks import load_prompts
    from rocktokens.lm.training.distill import distill as train
    from rocktokens.lm.training.trainer import processes

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
