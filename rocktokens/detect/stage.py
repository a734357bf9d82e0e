"""The stage `detect`: which token types stay expensive. It reads Parquet and loads no model, and needs no torch.

Names of tokens come from the tokenizer that lies beside the student, encodings of contexts from its embedding matrix,
read as one tensor from its safetensors file; where either cannot be had, detection does without it and says so.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.detect.certified import DECLARED
from rocktokens.detect.figures import render
from rocktokens.detect.occurrences import Occurrences, parquet
from rocktokens.detect.rocks import RockReport, detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError, RunError
from rocktokens.models.tokens import open_tokenizer, run_tokenizer
from rocktokens.progress import console
from rocktokens.run import MANIFEST, Run, digest, open_run, reading, require_room, working_on
from rocktokens.stage import Stage, inputs_of
from rocktokens.tables import TOP_TOKENS
from rocktokens.values import Json

log = logging.getLogger(__name__)

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")


def detect(path: Path, config: DetectConfig, *, again: bool = False) -> Run:
    """Which token types are rocks, by every definition; writes the tables and prints one."""
    with working_on(path):
        run = open_run(path)
        folder = "occurrences" if run.steps() else "telemetry"
        source = _student(run)
        inputs = inputs_of(run, files=(folder,), models={"embeddings": str(source or "")})
        stage = Stage(run, "detect", {"detect": config}, inputs)
        if stage.due(again):
            by_step = {step: parquet(_files(run, f"occurrences/step={step}")) for step in run.steps()}
            tables, named, vectors = by_step or {0: _telemetry(run)}, run_tokenizer(run), embeddings(source)
            # No name for the occurrences here: detection lets them go once it has halved them.
            groups = run.groups() if run.has("rollouts") else None
            read = Occurrences.read(tables, signal=config.signal, groups=groups)
            report = detect_rocks(read, named, config, embedding_VH=vectors)
            scored = [run.facts(f"score/step={step}") for step in run.steps() if run.done(f"score/step={step}")]
            how = dict.fromkeys(f"scores are {facts['approximate']}" for facts in scored if facts.get("approximate"))
            before = run.facts("detect") if run.done("detect") else {}
            report = dataclasses.replace(report, notes=(*how, *report.notes), retest=_retest(report, before))
            command, needed = None, report.enough["prompts_needed"]
            if needed is not None and "import" not in run.manifest["config"]:  # an import has no pair to sample from
                repeat = " && ".join(f"rocktokens {name} {path} --again" for name in ("score", "detect"))
                command = f"rocktokens sample {path} --detection-prompts {needed} --again && {repeat}"
            _write(stage, report, command)
        return run


def detect_table(
    occurrences: Path, out: Path, config: DetectConfig, *, tokenizer: str | None = None, again: bool = False
) -> Run:
    """The same for a Parquet file with rollout_id, position, token_id and loss; results go to `out`."""
    with reading(occurrences, "write it again"):
        require_room(pq.read_metadata(occurrences), occurrences.stat().st_size)
    found = Occurrences.read({0: parquet([occurrences])}, signal=config.signal)
    named = None if tokenizer is None else open_tokenizer(tokenizer)
    with working_on(out):
        made = open_run(out).manifest if (out / MANIFEST).exists() else {"config": {}, "stages": {}}
        if "occurrences" not in made["config"] and (made["config"] or made["stages"]):
            raise RunError(
                f"{out} is a run that something else made; its detection would be overwritten. "
                "Choose another directory with --out."
            )
        run = Run.create(out, {"occurrences": {"source": str(occurrences), "tokenizer": tokenizer}})
        stage = Stage(run, "detect", {"detect": config}, {"occurrences": digest(occurrences)})
        if stage.due(again):
            _write(stage, detect_rocks(found, named, config))
        return run


def _retest(report: RockReport, before: Json) -> Json | None:
    """What became of the rocks of the last detection, if the run has gone further since; else what was said then."""
    then, now = before.get("steps") or [], report.steps
    if not then or not now or now[-1] <= then[-1]:
        return before.get("retest")
    kinds = {row["token_id"]: row for row in report.tables["types"].to_pylist()}
    types = [
        {
            "token_id": token_id,
            "token": kinds.get(token_id, {}).get("token", f"#{token_id}"),
            "now": kinds.get(token_id, {}).get("class"),
            "still": bool(kinds.get(token_id, {}).get("in_certified")),
        }
        for name in DECLARED
        for token_id in before.get("classes", {}).get(name, [])
    ]
    still = sum(row["still"] for row in types)
    return {"then": then[-1], "now": now[-1], "num_rocks": len(types), "num_still": still, "types": types}


def _files(run: Run, folder: str) -> list[Path]:
    """The Parquet parts below a folder of the run, none of them damaged."""
    files = sorted((run.path / folder).glob("**/*.parquet"))
    for file in files:
        run.verify(file)
        with reading(file, "run `rocktokens score --again`"):
            pq.read_schema(file)
    return files


def _telemetry(run: Run) -> str:
    """What a trainer recorded of its own rollouts in the last third of the recorded steps, as one unpaired sample."""
    if not (run.path / "telemetry").is_dir():
        raise DataError(
            f"{run.path} has no scored occurrences; run `rocktokens score {run.path}` first, or train with telemetry"
        )
    steps = sorted(int(folder.name.removeprefix("step=")) for folder in (run.path / "telemetry").glob("step=*"))
    last = steps[-max(1, len(steps) // 3) :]
    log.warning(
        "%s has no fixed contexts: detection reads the trainer's telemetry of steps %d to %d. Each step has other "
        "rollouts: costly types can be found, stagnation cannot be tested; for that, run `rocktokens sample` and "
        "`rocktokens score`.",
        *(run.path, last[0], last[-1]),
    )
    tables = {step: parquet(_files(run, f"telemetry/step={step}")) for step in last}
    named = "select * replace ('{}/' || rollout_id as rollout_id) from ({})"
    return " union all by name ".join(named.format(step, table) for step, table in tables.items())


def _student(run: Run) -> Path | None:
    """The directory of the model whose occurrences were scored last, if it is on this disk."""
    kept = run.checkpoints()
    if kept:
        return run.checkpoint(kept[-1])
    student = run.manifest["config"].get("pair", {}).get("student", "")
    return Path(student) if student and Path(student).is_dir() else None


def embeddings(directory: Path | None) -> np.ndarray | None:
    """A model's input embeddings as float32, read alone from its safetensors files; None where there are none."""
    for path in sorted(directory.glob("*.safetensors")) if directory is not None else ():
        with reading(path, f"restore {directory}, or distil again"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            key = next((key for key in header if key.endswith(EMBEDDINGS)), None)
            if key is None:
                continue
            start, stop = header[key]["data_offsets"]
            file.seek(8 + size + start)
            data, kind = file.read(stop - start), header[key]["dtype"]
            if kind == "BF16":  # which numpy does not know: the upper half of a float32
                value = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                value = np.frombuffer(data, {"F32": np.float32, "F16": np.float16, "F64": np.float64}[kind])
            return value.astype(np.float32, copy=False).reshape(header[key]["shape"])
    return None


def _write(stage: Stage, report: RockReport, command: str | None = None) -> None:
    """Publish the tables, the costliest positions with both models' most probable tokens where `score` kept them."""
    run, positions, keys = stage.run, report.tables["positions"], ("prompt_id", "rollout_id", "position")
    if run.steps() and any((run.path / "top_tokens").glob(f"step={run.steps()[-1]}/*.parquet")):
        kept = run.query("select * from top_tokens where step = ?", [run.steps()[-1]]).to_pylist()
        found = {tuple(row[name] for name in keys): row for row in kept}
        places = list(zip(*(positions[name].to_pylist() for name in keys)))
        for field in TOP_TOKENS:
            if field.name not in keys:
                values = pa.array([found.get(place, {}).get(field.name) for place in places], field.type)
                positions = positions.set_column(positions.column_names.index(field.name), field, values)
    stage.publish({**report.tables, "positions": positions}, report.facts())
    console().print(render(report, command))
