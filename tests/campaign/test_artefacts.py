"""Every file of a run × damage × the commands that read it: refused with one sentence, or noticed and made again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from attacks import SEED, Account, attempt, chosen, copy_of

DAMAGES = ("cut", "empty", "flipped", "other", "directory", "gone")
READERS = {
    "rollouts.parquet": ("score", "compare"),
    "types.parquet": ("knockout", "graft"),
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
        for damage in DAMAGES:
            for reader in dict.fromkeys((*readers, "report", "detect")):
                found.append({"file": name, "damage": damage, "command": reader})
    return found


def damage_file(path: Path, damage: str) -> None:
    rng = random.Random(f"{SEED}/{path.name}/{damage}")
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
    damage_file(run / case["file"], case["damage"])
    words = [case["command"], str(run), *(["--no-images"] if case["command"] == "report" else [])]
    return attempt(words)[2]


@pytest.mark.campaign
def test_damaged_files(finished, tmp_path):
    account = Account("damaged files")
    run = copy_of(finished, tmp_path / "run")
    for case in chosen(cases(finished), account.kind):
        account.note(case, try_one(case, run))
        mend(run, finished)
    account.close()
