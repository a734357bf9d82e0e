"""Every file of a run × damage × the commands that read it: refused with one sentence, or noticed and made again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from attacks import SEED, Account, attempt, chosen, copy_of
from safetensors.torch import load_file, save_file

DAMAGES = ("cut", "empty", "flipped", "other", "directory", "gone")
# Whole files with the wrong content, and the files that can have it.
CONTENTS = {
    ".parquet": ("retyped", "column retyped", "column lacking", "no rows"),
    ".json": ("another shape", "value of another type", "value of another type, again", "key lacking"),
    ".safetensors": ("retyped", "tensor lacking"),
}
WRONG: tuple[Any, ...] = ("x", "\ud800", -1, None, [], {}, 1e300, True)
MANIFESTS = 250
"""Values of run.json tried in one campaign; it holds several hundred."""
READERS = {
    "rollouts.parquet": ("score", "compare"),
    "types.parquet": ("knockout", "graft", "bypass"),
    "census.parquet": ("bypass",),
    "grafts.parquet": ("bypass",),
    "baseline.parquet": ("graft", "knockout"),
    "gradients.safetensors": ("geometry",),
    "occurrences": ("detect",),
    "checkpoints": ("score", "sample"),
    "training.parquet": ("report",),
    "compare": ("compare",),
    "run.json": ("score", "detect", "report"),
}


def files_of(run: Path) -> list[str]:
    kinds = {".parquet", ".safetensors", ".json", ".html", ".csv", ".pt", ".pth"}
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.suffix in kinds)


def cases(run: Path) -> list[dict[str, str]]:
    found = []
    for name in files_of(run):
        top = name.split("/")[0]
        readers = READERS.get(name, READERS.get(top, ()))
        for damage in (*DAMAGES, *CONTENTS.get(Path(name).suffix, ())):
            for reader in dict.fromkeys((*readers, "report", "detect")):
                found.append({"file": name, "damage": damage, "command": reader})
    return found


def damage_file(path: Path, damage: str, salt: str = "") -> None:
    rng = random.Random(f"{SEED}/{path.name}/{damage}/{salt}")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: rng.randrange(len(content) or 1)])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif damage == "other":
        path.write_bytes(rng.randbytes(300))
    elif damage in ("directory", "gone"):
        path.unlink()
        if damage == "directory":
            path.mkdir()
    elif path.suffix == ".parquet":
        write_wrong_table(path, damage, rng)
    elif path.suffix == ".json":
        path.write_text(json.dumps(wrong_json(json.loads(content), damage, rng)))
    elif path.suffix == ".safetensors":
        tensors = load_file(path)
        name = rng.choice(sorted(tensors))
        tensors[name] = torch.zeros(3, dtype=torch.int16)
        save_file({key: own for key, own in tensors.items() if key != name or damage == "retyped"}, path)


def write_wrong_table(path: Path, damage: str, rng: random.Random) -> None:
    """A table that can be read, with columns of another type, without one, or without rows."""
    table = pq.ParquetFile(path).read()
    some = rng.choice(table.column_names)
    if damage == "no rows":
        table = table.slice(0, 0)
    elif damage == "column lacking":
        table = table.drop_columns([some])
    else:
        for name in table.column_names if damage == "retyped" else [some]:
            value = 5 if pa.types.is_string(table[name].type) else "x"
            table = table.set_column(table.column_names.index(name), name, pa.array([value] * len(table)))
    pq.write_table(table, path)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a JSON document stand."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in inside for place in ((*at, key), *places(inner, (*at, key)))]


def wrong_json(value: Any, damage: str, rng: random.Random) -> Any:
    """Valid JSON that is not what stood there."""
    found = places(value)
    if damage == "another shape" or not found:
        return [value]
    return put_wrong(value, rng.choice(found), rng, damage)


def put_wrong(value: Any, place: Sequence[Any], rng: random.Random, damage: str = "") -> Any:
    """The document with a value of another type at one place, or without it."""
    *way, last = place
    holder = reduce(getitem, way, value)
    if damage == "key lacking":
        del holder[last]
    else:
        holder[last] = rng.choice([item for item in WRONG if type(item) is not type(holder[last])])
    return value


def mend(run: Path, finished: Path) -> None:
    """The run as it was, at the cost of what differs only."""
    for path in sorted(run.rglob("*"), reverse=True):
        original = finished / path.relative_to(run)
        if not original.exists() or original.is_dir() != path.is_dir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for original in finished.rglob("*"):
        path = run / original.relative_to(finished)
        if original.is_dir():
            path.mkdir(exist_ok=True)
        elif not path.exists() or path.read_bytes() != original.read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, path)


def try_one(case: dict[str, str], run: Path) -> str | None:
    damage_file(run / case["file"], case["damage"], case["command"])
    words = [case["command"], str(run)]
    return attempt(words)[2]


def manifest_cases(run: Path) -> list[dict[str, Any]]:
    """Every value of run.json, of another type, and a command that reads it."""
    found = places(json.loads((run / "run.json").read_text()))
    commands = ("report", "detect", "geometry", "bypass", "knockout", "score")
    return [{"place": list(place), "command": commands[at % len(commands)]} for at, place in enumerate(found)]


def try_manifest(case: dict[str, Any], run: Path) -> str | None:
    manifest = json.loads((run / "run.json").read_text())
    wrong = put_wrong(manifest, case["place"], random.Random(f"{SEED}/{case['place']}"))
    (run / "run.json").write_text(json.dumps(wrong))
    return attempt([case["command"], str(run)])[2]


@pytest.mark.campaign
def test_wrong_manifests(finished, tmp_path):
    account = Account("wrong values in run.json")
    run = copy_of(finished, tmp_path / "run")
    for case in chosen(manifest_cases(finished), account.kind)[:MANIFESTS]:
        account.note(case, try_manifest(case, run))
        mend(run, finished)
    account.close()


@pytest.mark.campaign
def test_damaged_files(finished, tmp_path):
    account = Account("damaged files")
    run = copy_of(finished, tmp_path / "run")
    for case in chosen(cases(finished), account.kind):
        account.note(case, try_one(case, run))
        mend(run, finished)
    account.close()
