"""The stage `detect`: which token types stay expensive. It reads Parquet and loads no model.

Names of tokens come from the tokenizer that lies beside the student, encodings of contexts from its embedding matrix,
read as one tensor from its safetensors file; where either cannot be had, detection goes on without it and says so.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.detect.halves import Halves
from rocktokens.detect.occurrences import ENTROPIES, KEYS, SIGNALS
from rocktokens.detect.read_halves import read_halves
from rocktokens.detect.rock_report import RockReport
from rocktokens.detect.rocks import Occurrences, detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.terminal import render
from rocktokens.errors import DataError, RunError
from rocktokens.files import digest, reading
from rocktokens.lock import working_on
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.run import MANIFEST, Run, open_run
from rocktokens.stage import Stage, inputs_of
from rocktokens.tables import TOP_TOKENS
from rocktokens.tokens import run_tokenizer
from rocktokens.values import Json

log = logging.getLogger(__name__)


READ = ("prompt_id", *KEYS, *SIGNALS, "grad_norm", "teacher_entropy", "student_entropy")
"""Columns of a checkpoint that detection reads."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")


def detect(path: Path, config: DetectConfig, *, again: bool = False) -> Run:
    """Which token types are rocks, by every definition; writes the tables and prints one."""
    with working_on(path):
        run = open_run(path)
        folder = "occurrences" if run.steps() else "telemetry"
        source = _source(run)
        inputs = inputs_of(run, files=(folder, "monitor.parquet"), models={"embeddings": str(source or "")})
        stage = Stage(run, "detect", {"detect": config}, inputs)
        if stage.due(again):
            occurrences = _fixed_contexts(run, config) if run.steps() else _telemetry(run, config)
            report = detect_rocks(occurrences, run_tokenizer(run), config, embedding_VH=_embedding(run))
            imported = "import" in run.manifest["config"]  # no pair, nothing to sample
            command = more_prompts(path, None if imported else report.enough.prompts_needed)
            _write(stage, report, {**_monitor_overlap(run, report), "command": command})
        return run


def _fixed_contexts(run: Run, config: DetectConfig) -> Occurrences | Halves:
    found = read_halves(run, config)
    if found is not None:
        return found
    by_step = {step: _step_table(run, step) for step in run.steps()}
    return Occurrences.from_checkpoints(by_step, signal=config.signal)


def more_prompts(path: Path, prompts_needed: int | None) -> str | None:
    """The command that adds the prompts which would settle what is unclear."""
    if prompts_needed is None:
        return None
    again = " && ".join(f"rocktokens {stage} {path} --again" for stage in ("score", "detect"))
    return f"rocktokens sample {path} --detection-prompts {prompts_needed} --again && {again}"


def _monitor_overlap(run: Run, report: RockReport) -> Json:
    """How far the rocks that training saw on its own (`TokenMonitor.rocks`) are those of detection."""
    if not run.done("distill") or "monitor_rocks" not in run.facts("distill"):
        return {}
    online = run.facts("distill")["monitor_rocks"][: len(report.rocks)]
    both, either = set(online) & set(report.rocks.tolist()), set(online) | set(report.rocks.tolist())
    return {"monitor": {"rocks": online, "jaccard": len(both) / len(either) if either else 1.0}}


def _telemetry(run: Run, config: DetectConfig) -> Occurrences:
    """What a trainer recorded of its own rollouts in the last third of the recorded steps, as one unpaired sample."""
    if not (run.path / "telemetry").is_dir():
        raise DataError(
            f"{run.path} has no scored occurrences; run `rocktokens score {run.path}` first, or train with telemetry"
        )
    steps = run.query("select distinct step from telemetry order by step")["step"].to_pylist()
    last = steps[-max(1, len(steps) // 3) :]
    log.warning(
        "%s has no fixed contexts: detection reads the trainer's telemetry of steps %d to %d. Each step has other "
        "rollouts, of the student as it was then, so no loss before training is paired with one after it: what is "
        "costly can be told, what does not learn cannot. For that, run `rocktokens sample` and `rocktokens score`.",
        run.path,
        last[0],
        last[-1],
    )
    schema = run.query("select * exclude (step, rollout_id) from telemetry limit 0").column_names
    names = ", ".join(name for name in schema if name in READ)
    table = run.query(
        f"select {names}, step || '/' || rollout_id as rollout_id from telemetry where step >= ?",
        [last[0]],
    )
    return Occurrences.from_table(table, signal=config.signal)


def detect_table(
    occurrences: Path, out: Path, config: DetectConfig, *, tokenizer: str | None = None, again: bool = False
) -> Run:
    """The same for anybody's Parquet file with rollout_id, position, token_id and loss; results go to `out`."""
    if not occurrences.exists():
        raise DataError(f"there is no file {occurrences}")
    wanted = {"prompt_id", *KEYS, *SIGNALS, "loss", "loss_pre", "loss_post", "grad_norm", *ENTROPIES}
    try:
        names = [name for name in pq.read_schema(occurrences).names if name in wanted]
        table = pq.read_table(occurrences, columns=names)
    except (OSError, ValueError) as error:
        raise DataError(f"{occurrences} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    table = _whole_numbers(occurrences, table)
    named = None
    if tokenizer is not None:
        from rocktokens.models.pair import load_tokenizer

        named = load_tokenizer(tokenizer, PairConfig())
    with working_on(out):
        _refuse_other_runs(out)
        run = Run.create(out, {"occurrences": {"source": str(occurrences), "tokenizer": tokenizer}})
        stage = Stage(run, "detect", {"detect": config}, {"occurrences": digest(occurrences)})
        if stage.due(again):
            _write(stage, detect_rocks(Occurrences.from_table(table, signal=config.signal), named, config), {})
        return run


def _whole_numbers(path: Path, table: pa.Table) -> pa.Table:
    """The table with positions and token ids as whole numbers and losses as numbers; DataError where they are not."""
    for name in ("position", "token_id"):
        if name in table.column_names and not pa.types.is_integer(table.schema.field(name).type):
            try:
                whole = table[name].cast(pa.int64())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"{path}: column {name} must hold whole numbers ({error}).") from error
            table = table.set_column(table.column_names.index(name), name, whole)
    for name in ("loss", "loss_pre", "loss_post", "kl", "log_ratio"):
        if name in table.column_names:
            kind = table.schema.field(name).type
            if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
                raise DataError(f"{path}: column {name} must hold numbers, it holds {kind}.")
    return table


def _refuse_other_runs(out: Path) -> None:
    """Results for a table of one's own never go into a run that something else made."""
    if not (out / MANIFEST).exists():
        return
    run = open_run(out)
    others = sorted({stage.split("/")[0] for stage in run.manifest["stages"]} - {"detect", "report"})
    if "occurrences" not in run.manifest["config"] and (others or run.manifest["config"] or run.done("detect")):
        raise RunError(
            f"{out} is a run of its own ({', '.join(others) or 'made by something else'}); its detection would be "
            "overwritten. Choose another directory with --out."
        )


def _write(stage: Stage, report: RockReport, more: Json) -> None:
    run, tables = stage.run, report.tables()
    if "positions" in tables:
        tables["positions"] = with_top_tokens(run, tables["positions"])
    groups = {name: [int(token_id) for token_id in ids] for name, ids in report.groups.items()}
    stage.publish(tables, {**report.facts(), "groups": groups, **more})
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
    found: dict[tuple[str, str, int], dict[str, object]] = {}
    if run.steps() and any((run.path / "top_tokens").glob(f"step={run.steps()[-1]}/*.parquet")):
        kept = run.query(f"select * from top_tokens where step = {int(run.steps()[-1])}").to_pylist()
        found = {(row["prompt_id"], row["rollout_id"], row["position"]): row for row in kept}
    keys = list(zip(*(positions[name].to_pylist() for name in ("prompt_id", "rollout_id", "position"))))
    for field in wanted:
        values = [found.get(key, {}).get(field.name) for key in keys]
        positions = positions.append_column(field, pa.array(values, field.type))
    return positions


def _step_table(run: Run, step: int) -> pa.Table:
    schema = run.query(f"select * exclude (step) from occurrences where step = {int(step)} limit 0").column_names
    names = ", ".join(name for name in schema if name in READ)
    return run.query(f"select {names} from occurrences where step = {int(step)}")


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
    index, remedy = directory / "model.safetensors.index.json", f"restore {directory}, or distil again"
    files = ["model.safetensors"]
    if index.exists():
        with reading(index, remedy):
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in files:
        if not (directory / name).exists():
            continue
        with reading(directory / name, remedy), safe_open(directory / name, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                if key.endswith(EMBEDDINGS):
                    return tensors.get_tensor(key).float().numpy()
    return None
