"""The stage `detect`: which token types stay expensive. It reads Parquet and loads no model.

Names of tokens come from the tokenizer that lies beside the student, encodings of contexts from its embedding matrix,
read as one tensor from its safetensors file; where either cannot be had, detection goes on without it and says so.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.config import DetectConfig, PairConfig
from rocktokens.config.base import to_mapping
from rocktokens.core.detection.detect import Occurrences, detect_rocks
from rocktokens.core.detection.rock_report import RockReport
from rocktokens.errors import DataError
from rocktokens.progress import console
from rocktokens.report.terminal.detect import render
from rocktokens.runs.schema import TOP_TOKENS
from rocktokens.runs.store import Run, open_run
from rocktokens.stages.tokens import run_tokenizer

log = logging.getLogger(__name__)


EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")


def detect(path: Path, config: DetectConfig, *, again: bool = False) -> Run:
    """Which token types are rocks, by every definition; writes the tables and prints one."""
    run = open_run(path)
    if run.done("detect") and not again and run.manifest["config"].get("detect") == to_mapping(config):
        log.info("%s: rocks are there; nothing to do", path)
        return run
    steps = run.steps()
    if not steps:
        raise DataError(f"{path} has no scored occurrences; run `rocktokens score {path}` first")
    by_step = {step: _step_table(run, step) for step in steps}
    occurrences = Occurrences.from_checkpoints(by_step, signal=config.signal)
    report = detect_rocks(occurrences, run_tokenizer(run), config, embedding_VH=_embedding(run))
    needed = None if "import" in run.manifest["config"] else report.enough.prompts_needed  # no pair, nothing to sample
    more = {**_monitor_overlap(run, report), "command": more_prompts(path, needed)}
    _write(run, report, config, more)
    return run


def more_prompts(path: Path, prompts_needed: int | None) -> str | None:
    """The command that adds the prompts which would settle what is unclear."""
    if prompts_needed is None:
        return None
    again = " && ".join(f"rocktokens {stage} {path} --again" for stage in ("score", "detect"))
    return f"rocktokens sample {path} --detection-prompts {prompts_needed} --again && {again}"


def _monitor_overlap(run: Run, report: RockReport) -> dict[str, Any]:
    """How far the rocks that training saw on its own (`TokenMonitor.rocks`) are those of detection."""
    if not run.done("distill") or "monitor_rocks" not in run.facts("distill"):
        return {}
    online = run.facts("distill")["monitor_rocks"][: len(report.rocks)]
    both, either = set(online) & set(report.rocks.tolist()), set(online) | set(report.rocks.tolist())
    return {"monitor": {"rocks": online, "jaccard": len(both) / len(either) if either else 1.0}}


def detect_table(occurrences: Path, out: Path, config: DetectConfig, *, tokenizer: str | None = None) -> Run:
    """The same for anybody's Parquet file with rollout_id, position, token_id and loss; results go to `out`."""
    if not occurrences.exists():
        raise DataError(f"there is no file {occurrences}")
    try:
        table = pq.read_table(occurrences)
    except (OSError, ValueError) as error:
        raise DataError(f"{occurrences} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    run = Run.create(out, {"occurrences": {"source": str(occurrences), "tokenizer": tokenizer}})
    named = None
    if tokenizer is not None:
        from rocktokens.lm.pair import load_tokenizer

        named = load_tokenizer(tokenizer, PairConfig())
    report = detect_rocks(Occurrences.from_table(table, signal=config.signal), named, config)
    _write(run, report, config, {})
    return run


def _write(run: Run, report: RockReport, config: DetectConfig, more: dict[str, Any]) -> None:
    run.reopen("detect")
    for name, table in report.tables().items():
        run.write(name, with_top_tokens(run, table) if name == "positions" else table)
    run.manifest["config"]["detect"] = to_mapping(config)
    groups = {name: [int(token_id) for token_id in ids] for name, ids in report.groups.items()}
    run.finish("detect", {**report.facts(), "groups": groups, **more})
    out = console()
    out.print(render(report, more.get("command")))
    if "monitor" in more:
        online = more["monitor"]
        out.print(
            f"TokenMonitor, while training and without a scoring pass: {len(online['rocks'])} rocks, "
            f"Jaccard {online['jaccard']:.2f} with these."
        )


def with_top_tokens(run: Run, positions: pa.Table) -> pa.Table:
    """The costliest positions with both models' most probable tokens, where the scoring pass kept them; else empty."""
    wanted = [field for field in TOP_TOKENS if field.name not in ("prompt_id", "rollout_id", "position")]
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    if run.steps() and any((run.path / "top_tokens").glob(f"step={run.steps()[-1]}/*.parquet")):
        kept = run.query(f"select * from top_tokens where step = {int(run.steps()[-1])}").to_pylist()
        found = {(row["prompt_id"], row["rollout_id"], row["position"]): row for row in kept}
    keys = list(zip(*(positions[name].to_pylist() for name in ("prompt_id", "rollout_id", "position"))))
    for field in wanted:
        values = [found.get(key, {}).get(field.name) for key in keys]
        positions = positions.append_column(field, pa.array(values, field.type))
    return positions


def _step_table(run: Run, step: int) -> Any:
    return run.query(f"select * exclude (step) from occurrences where step = {int(step)}")


def _source(run: Run) -> Path | None:
    """The directory of the model whose occurrences were scored last, if it is on this disk."""
    kept = run.checkpoints()
    if kept:
        return run.checkpoint(kept[-1])
    student = run.manifest["config"].get("pair", {}).get("student", "")
    return Path(student) if student and Path(student).is_dir() else None


def _embedding(run: Run) -> np.ndarray | None:
    """The student's input embeddings, read alone from its safetensors file; None where there is no such file."""
    from safetensors import safe_open

    directory = _source(run)
    if directory is None:
        return None
    index = directory / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    for name in files:
        if not (directory / name).exists():
            continue
        with safe_open(directory / name, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                if key.endswith(EMBEDDINGS):
                    return tensors.get_tensor(key).float().numpy()
    return None
