"""Graft, compare and study under several processes: the run that one process makes, nothing done twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forking import as_workers
from small_runs import DETECT, DISTILL, ROLLOUTS, distilled_run, save_pair, scored_run

from rocktokens.causal.graft_stage import graft
from rocktokens.causal.settings import BaselineConfig, GraftConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import compare
from rocktokens.run import open_run
from rocktokens.study import study
from rocktokens.study_settings import StudyConfig

GRAFT = GraftConfig(rocks=("w5", "w6", "w7"), resamples=100)
BASELINE = BaselineConfig(problems=8, rollouts=2)
COMPARE = CompareConfig(
    regimes=("uniform", "freeze_rocks"),
    rocks=(5, 6, 7),
    seeds=2,
    evaluations=1,
    problems=6,
    rollouts=2,
    contexts=6,
    resamples=100,
)
GRAFT_WORDS = ["--graft.rocks", "w5", "w6", "w7", "--graft.resamples", "100"]
GRAFT_WORDS += ["--baseline.problems", "8", "--baseline.rollouts", "2"]
COMPARE_WORDS = ["--compare.regimes", "uniform", "freeze_rocks", "--compare.rocks", "5", "6", "7"]
COMPARE_WORDS += ["--compare.seeds", "2", "--compare.evaluations", "1", "--compare.problems", "6"]
COMPARE_WORDS += ["--compare.rollouts", "2", "--compare.contexts", "6", "--compare.resamples", "100"]
CLOCKS = ("seconds", "time", "rate", "memory", "flops", "date")
"""Words in the names of columns that hold what the machine did, not what was found."""

COUNTED = """
import os, sys
from rocktokens.score import scoring
from rocktokens.sample import sampler
from rocktokens.train import distill as training
own = os.environ.get("ROCKTOKENS_RANK", os.environ.get("RANK", "0"))
def counted(function, word, size):
    def call(*a, **k):
        with open(os.environ["COUNTS"], "a") as file:
            file.write(f"{word} {own} {size(*a, **k)}\\n")
        return function(*a, **k)
    return call
sampler.Sampler.generate = counted(sampler.Sampler.generate, "sample", lambda self, r, **k: len(r))
scoring.score = counted(scoring.score, "score", lambda r, *a, **k: len(r))
training.distill = counted(training.distill, "train", lambda c, *a, **k: f"{c.seed}-{c.selector.name}")
if __name__ == "__main__":
    from rocktokens.cli import main
    main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A distilled, sampled, scored and detected run, from which every test starts."""
    home = tmp_path_factory.mktemp("base")
    pair, prompts = save_pair(home)
    distilled_run(home / "run", pair, prompts)
    scored_run(home / "run", pair, prompts)
    return home / "run"


@pytest.fixture(scope="module")
def one(base, tmp_path_factory) -> Path:
    """The same with graft and compare by one process."""
    path = tmp_path_factory.mktemp("one") / "run"
    shutil.copytree(base, path)
    graft(path, GRAFT, BASELINE)
    compare(path, COMPARE)
    return path


def together(script: Path, words: list[object], counts: Path, *, torchrun: bool = False) -> list[list[str]]:
    """Run a command in two processes; returns what was counted: word, process, size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTS", str(counts))
        if torchrun:
            start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
            arguments, own = [str(script), *map(str, words)], {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*start, *arguments], env=own, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            as_workers(words, script, counts.with_suffix(""), 2)
    return [line.split() for line in counts.read_text().splitlines()] if counts.exists() else []


def found(table: pa.Table) -> pa.Table:
    """What was found, without clocks and meters."""
    return table.drop_columns([name for name in table.column_names if any(word in name for word in CLOCKS)])


def equal_tables(first: Path, second: Path, pattern: str) -> int:
    names = sorted(str(path.relative_to(first)) for path in first.glob(pattern))
    assert names == sorted(str(path.relative_to(second)) for path in second.glob(pattern))
    for name in names:
        assert found(pq.read_table(first / name)).equals(found(pq.read_table(second / name))), name
    return len(names)


def check_two(base: Path, one: Path, home: Path, *, torchrun: bool) -> None:
    path, script = home / "run", home / "counted.py"
    shutil.copytree(base, path)
    script.write_text(COUNTED)
    together(script, ["graft", path, *GRAFT_WORDS], home / "graft.txt", torchrun=torchrun)
    equal_tables(one, path, "graft*.parquet")
    assert open_run(path).facts("graft") == open_run(one).facts("graft")
    rows = together(script, ["compare", path, *COMPARE_WORDS], home / "compare.txt", torchrun=torchrun)
    trained = [size for word, _, size in rows if word == "train"]
    if not torchrun:  # there a training is a child, which does not know the counter
        assert len(trained) == len(set(trained)) == 4
        assert {rank for word, rank, _ in rows if word == "train"} == {"0", "1"}
    assert equal_tables(one, path, "compare/*/seed=*/problems/*.parquet") == 8
    assert equal_tables(one, path, "compare/*/seed=*/training.parquet") == 4
    ours, theirs = (open_run(run).facts("compare") for run in (path, one))
    assert ours["frozen_by"] == theirs["frozen_by"]
    assert not list(path.glob("*.parts"))


def test_two_processes_graft_and_compare_as_one_does(base, one, tmp_path):
    check_two(base, one, tmp_path, torchrun=False)


@pytest.mark.slow
def test_torchrun_grafts_and_compares_as_one_process_does(base, one, tmp_path):
    check_two(base, one, tmp_path, torchrun=True)


def study_of(home: Path) -> StudyConfig:
    pair, prompts = save_pair(home, prompts=120)
    return StudyConfig(
        path=home / "run",
        stages=("distill", "sample", "score", "detect", "graft"),
        pair=pair,
        prompts=prompts,
        distill=DISTILL,
        rollouts=ROLLOUTS,
        detection_prompts=8,
        problems=4,
        detect=DETECT,
        graft=GRAFT,
        baseline=BASELINE,
    )


def study_words(config: StudyConfig) -> list[object]:
    words: list[object] = ["--path", config.path, "--stages", *config.stages, "--pair.student", config.pair.student]
    words += ["--pair.teacher", config.pair.teacher, "--pair.threads", 1, "--prompts.source", config.prompts.source]
    words += ["--prompts.checker", "exact", "--distill.steps", 2, "--distill.prompts-per-step", 4]
    words += ["--distill.rollouts-per-prompt", 2, "--distill.max-new-tokens", 8, "--distill.keep", 1]
    words += ["--distill.telemetry-every", 1, "--rollouts.num-rollouts", 2, "--rollouts.max-new-tokens", 12]
    words += ["--detection-prompts", 8, "--problems", 4]
    return ["study", *words, "--detect.resamples", 100, *GRAFT_WORDS]


@pytest.fixture(scope="module")
def studied(tmp_path_factory) -> tuple[Path, StudyConfig]:
    """A study of one process."""
    home = tmp_path_factory.mktemp("studied")
    config = study_of(home)
    study(config)
    return config.path, config


def check_study(studied: tuple[Path, StudyConfig], home: Path, *, torchrun: bool) -> None:
    one, config = studied
    path, script = home / "run", home / "counted.py"
    script.write_text(COUNTED)
    words = study_words(config)
    words[2] = path
    rows = together(script, words, home / "study.txt", torchrun=torchrun)
    assert open_run(path).facts("detect")["num_prompts"] == open_run(one).facts("detect")["num_prompts"] == 8
    if not torchrun:  # where both processes train, their gradients are added up in another order
        for name in ("rollouts", "types", "grafts"):
            equal_tables(one, path, f"{name}.parquet")
    scored = [int(size) for word, _, size in rows if word == "score"]
    assert sum(scored) == 8 * 2  # two checkpoints in one pass
    assert set(json.loads((path / "run.json").read_text())["stages"]) >= {"sample", "score", "detect", "graft"}


def test_two_processes_study_as_one_does_and_share_every_look(studied, tmp_path, monkeypatch):
    check_study(studied, tmp_path, torchrun=False)


@pytest.mark.slow
def test_torchrun_studies_and_shares_every_look(studied, tmp_path):
    check_study(studied, tmp_path, torchrun=True)
