"""Several processes on one run: the same run as one process makes, nothing done twice; --workers and torchrun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from forking import as_workers, together

from rocktokens import ranks as ranks_module
from rocktokens.causal.knockout_stage import knockout
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.cli import main
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.stage import detect
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.ranks import RANK, WORLD, Ranks, alone, ranks, wait_for
from rocktokens.run import open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.workers import number_of, workers

ROLLOUTS = ["--rollouts.num-rollouts", "2", "--rollouts.max-new-tokens", "24"]
CENSUS = [*("--knockout.top", "6"), "--knockout.no-controls", *("--knockout.resamples", "200")]
CENSUS += [*("--baseline.problems", "40"), *("--baseline.rollouts", "2")]


ASKED = ["--prompts.source", "arithmetic", "--prompts.limit", "150", *ROLLOUTS]


def command(*words: object) -> None:
    """A command; its first process is this one, which has loaded the libraries."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code


def torchrun(*words: object) -> None:
    """The same, all of whose processes torchrun starts."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    start += ["--no-python", sys.executable, "-m", "rocktokens.cli"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The run of one process, made in this one."""
    path = tmp_path_factory.mktemp("one") / "run"
    prompts = PromptsConfig(source="arithmetic", limit=150)
    sample(path, PairConfig(), prompts, RolloutConfig(num_rollouts=2, max_new_tokens=24))
    score(path, ScoreConfig())
    detect(path, DetectConfig())
    knockout(path, KnockoutConfig(top=6, controls=False, resamples=200), BaselineConfig(problems=40, rollouts=2))
    return path


def equal_runs(first: Path, second: Path) -> None:
    """Every table, value for value; scores in the order of their parts."""
    for name in ("rollouts", "baseline", "knockouts", "census", "types"):
        ours, theirs = (pq.read_table(path / f"{name}.parquet") for path in (first, second))
        assert ours.equals(theirs), name
    query = "select * from occurrences order by step, rollout_id, position"
    assert open_run(first).query(query).equals(open_run(second).query(query))
    sums = [open_run(path).read_tensors("gradients") for path in (first, second)]
    for name in ("count_V", "norm_V", "total_D"):
        np.testing.assert_allclose(sums[0][name], sums[1][name], rtol=1e-9, atol=1e-9)


def test_two_workers_make_the_run_that_one_process_makes(one, tmp_path):
    """`score` starts its second process itself; those of the other stages are forked with the same environment."""
    two, nothing = tmp_path / "run", tmp_path / "nothing.py"
    nothing.touch()
    as_workers(["sample", two, *ASKED], nothing, tmp_path / "sampling", 2)
    command("--workers", "2", "score", two)
    detect(two, DetectConfig())
    as_workers(["knockout", two, *CENSUS], nothing, tmp_path / "census", 2)
    equal_runs(one, two)
    manifest = json.loads((two / "run.json").read_text())
    assert {"sample", "score", "detect", "knockout"} <= manifest["stages"].keys()
    assert not list(two.glob("*.parts"))


@pytest.mark.slow
@pytest.mark.parametrize("start", [torchrun, lambda *words: command("--workers", "2", *words)], ids=["torchrun", "own"])
def test_processes_of_their_own_make_the_run_that_one_process_makes(one, tmp_path, start):
    path = tmp_path / "run"
    start("sample", path, *ASKED)
    start("score", path)
    detect(path, DetectConfig())
    start("knockout", path, *CENSUS)
    equal_runs(one, path)


def test_a_second_launch_with_the_same_port_gives_a_result_too(one, tmp_path):
    """What the first launch said to its processes means nothing to those of the second."""
    path = Path(shutil.copytree(one, tmp_path / "run"))
    plain = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in ("knockout", path, *CENSUS, "--again")]
    for launch in ("first", "second"):
        (path / "census.parquet").unlink()
        places = [{**plain, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        together([lambda: main(words)] * 2, tmp_path / launch, places)
        equal_runs(one, path)
        assert not list(path.glob("*.parts"))


def test_nothing_is_done_twice(tmp_path):
    """Counted: every rollout and every scored part is made by exactly one of three processes."""
    counter = tmp_path / "count.txt"
    script = tmp_path / "counted.py"
    script.write_text(
        f"""
import os
from rocktokens.score import scoring
from rocktokens.sample import sampler
own = os.environ["ROCKTOKENS_RANK"]
def counted(function, word, size):
    def call(*a, **k):
        with open({str(counter)!r}, "a") as file:
            file.write(f"{{word}} {{own}} {{size(*a, **k)}}\\n")
        return function(*a, **k)
    return call
sampler.Sampler.generate = counted(sampler.Sampler.generate, "sample", lambda self, r, **k: len(r))
scoring.score = counted(scoring.score, "score", lambda r, *a, **k: len(r))
"""
    )
    path = tmp_path / "run"
    asked = ["--prompts.source", "arithmetic", "--prompts.limit", "400", *ROLLOUTS]
    for words in (["sample", path, *asked], ["score", path]):
        as_workers(words, script, tmp_path / f"count-{words[0]}", 3)
    rows = [line.split() for line in counter.read_text().splitlines()]
    for word in ("sample", "score"):
        own = [(rank, int(size)) for kind, rank, size in rows if kind == word]
        assert sum(size for _, size in own) == 800
        assert {rank for rank, _ in own} == {"0", "1", "2"}


def test_a_worker_that_fails_ends_the_command_with_its_words(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--workers", "2", "score", str(tmp_path / "none")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "is no run" in said
    assert "Traceback" not in said


def test_workers_has_a_bound():
    for text in ("257", "1000000", "9" * 5000):
        with pytest.raises(ConfigError, match="at most 256"):
            number_of(text)
    assert number_of("256") == 256


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_workers_is_a_number(text):
    with pytest.raises(ConfigError, match="--workers takes a whole number"):
        number_of(text)


def test_one_worker_or_a_command_that_is_not_shared_starts_nothing():
    with workers("sample", [], 1), workers("detect", [], 4):
        assert ranks() == Ranks()


def test_parts_belong_to_ranks_by_number(monkeypatch):
    monkeypatch.setenv(WORLD, "3")
    monkeypatch.setenv(RANK, "2")
    assert [number for number in range(7) if ranks().owns(number)] == [2, 5]
    assert not ranks().is_first
    with alone():
        assert ranks() == Ranks(0, 1)
    monkeypatch.delenv(WORLD)
    monkeypatch.delenv(RANK)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks() == Ranks(1, 2)


def test_waiting_ends_when_a_worker_has_failed(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    child.wait()
    monkeypatch.setattr(ranks_module, "_workers", [child])
    with pytest.raises(RunError, match="worker 1 failed"):
        wait_for(lambda: False, "a part")


def test_a_study_of_a_built_in_pair_uses_every_core_and_no_other_study_does(monkeypatch):
    from dataclasses import replace

    from rocktokens import workers as module
    from rocktokens.recipes import quick, recipes
    from rocktokens.workers import MOST, fitting

    monkeypatch.setattr(module, "_gpus", list)
    built_in = quick(recipes()["arithmetic"]())
    assert fitting(built_in) == min(len(os.sched_getaffinity(0)), MOST)
    assert fitting(replace(built_in, pair=PairConfig(student="a", teacher="b"))) == 1
    monkeypatch.setattr(module, "_gpus", lambda: [Path("/gpu")])
    assert fitting(built_in) == 1
    monkeypatch.setattr(module, "_gpus", list)
    monkeypatch.setenv("ROCKTOKENS_WORLD", "2")  # a worker starts no workers
    assert fitting(built_in) == 1


def test_workers_leave_the_environment_and_the_run_as_they_were(tmp_path):
    before = dict(os.environ)
    with workers("score", ["--help"], 2):
        from rocktokens.ranks import sign

        sign(tmp_path, "here")
        assert (tmp_path / ".ranks").is_dir()
    assert dict(os.environ) == before
    assert not (tmp_path / ".ranks").exists()
