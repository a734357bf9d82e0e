"""A mistyped command on a finished run: refused with one sentence, and not a byte of the run is another one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from attacks import attempt

MADE: dict[str, Path] = {}


def state(run: Path) -> dict[str, bytes]:
    """Every file but hidden ones: drafts do not count."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".")}


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory) -> Path:
    MADE["pair"] = finished.parent / "pair"
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("typos") / "run"))


# Each of these once threw a complete stage away, or wrote over it.
TYPOS = {
    "knockout RUN --candidates nosuchtoken": "nosuchtoken",
    "knockout RUN --baseline.source nosuch.jsonl": "nosuch.jsonl",
    "knockout RUN --baseline.checkpoint 99": "99",
    "graft RUN --rocks typo": "typo",
    "sample RUN --again --checkpoint 99": "99",
    "detect RUN --resamples -5": "resamples",
    "compare RUN --regimes uniform": "nothing to compare",
    "knockout RUN --again --baseline.split nosuch": "nosuch",
    "compare RUN --again --rocks 999999999": "rocks",
    "compare RUN --again --rocks 99999": "99999",
    "distill RUN --again --prompts.source nosuch.jsonl --prompts.checker exact": "nosuch.jsonl",
    "distill RUN --again --pair.student HOME/none --pair.teacher HOME/none": "none",
    "sample RUN --num-rollouts 3": "--again",
    "score RUN --checkpoints 99": "99",
    "study --path RUN --problems 7": "distill is complete",
    "study --path RUN --detection-prompts 3": "distill is complete",
}
# Values that no setting takes, flags that a command would pass over, and sizes that are absurd.
NONSENSE = {
    "detect RUN --out OUT": "--out",
    "view RUN --port 65536": "65,535",
    "report HOME/LONG": "too long",
    "sample HOME/LONG --prompts.source arithmetic": "too long",
    "sample NEW --prompts.source LONG": "give both",
    "sample NEW --prompts.source LONG MODELS": "too long",
    "distill NEW --prompts.source arithmetic --keep 1000000000": "keep",
    "distill NEW --prompts.source arithmetic --steps 1 --generation vllm": "vllm",
    "export RUN --format nosuch": "nosuch",
}


def words(command: str, run: Path) -> list[str]:
    """The words of a command, its capitals replaced by what they stand for."""
    home, pair = run.parent, MADE["pair"]
    models = f"--pair.student {pair}/student --pair.teacher {pair}/teacher"
    known = {"RUN": run, "HOME": home, "OUT": home / "out", "NEW": home / "new"}
    known |= {"LONG": "a" * 300, "MODELS": models}
    return re.sub(rf"\b({'|'.join(known)})\b", lambda found: str(known[found[0]]), command).split()


@pytest.mark.parametrize(("command", "expected"), [*TYPOS.items(), *NONSENSE.items()])
def test_a_refused_command_changes_nothing(run, command, expected):
    before = state(run)
    status, said, problem = attempt(words(command, run))
    assert problem is None
    assert status in (1, 2), said
    assert expected in " ".join(said.replace("│", " ").split())
    assert state(run) == before
    assert not (run.parent / "new").exists()
    assert not (run.parent / "out").exists()
