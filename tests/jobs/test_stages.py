"""Stages whose work is shared out make the same run in every place, bit for bit, and do nothing twice."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_runs import DETECT, distilled_run, save_pair

from rocktokens import jobs
from rocktokens.causal import baseline as pieces
from rocktokens.causal.graft import run_graft
from rocktokens.causal.knockout import knockout
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import compare
from rocktokens.detect.stage import detect
from rocktokens.errors import DataError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.run import open_run
from rocktokens.sample import stage as sampling
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score import stage as scoring
from rocktokens.score.settings import ScoreConfig

ROLLOUTS = RolloutConfig(num_rollouts=2, max_new_tokens=8)


def digests(path: Path) -> dict[str, str]:
    """Every table and tensor of a run; of tables with seconds, the other columns."""
    found = {}
    for file in [*path.glob("*.parquet"), *path.glob("occurrences/*/*"), *path.glob("*.safetensors")]:
        content = file.read_bytes()
        if file.parent == path and file.name.startswith("compare"):
            table = open_run(path).read(file.stem)
            timed = [name for name in table.column_names if "second" in name]
            content = str(table.drop_columns(timed).to_pylist()).encode()
        found[str(file.relative_to(path))] = hashlib.sha256(content).hexdigest()
    return found


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A pair with many small jobs; workers read the constants from their module, the driver lists the jobs."""
    monkeypatch.setattr(sampling, "PART_PROMPTS", 8)
    monkeypatch.setattr(scoring, "PART_ROLLOUTS", 16)
    return tmp_path, save_pair(tmp_path, prompts=40)


def both(path: Path, given: Any, place: Place) -> dict[str, str]:
    sampling.sample(path, *given, ROLLOUTS, place=place)
    scoring.score(path, ScoreConfig(), place=place)
    assert not list(path.glob("*.parts"))
    return digests(path)


def test_two_workers_make_the_run_that_one_process_makes(shared) -> None:
    home, given = shared
    with keeping_workers():
        assert both(home / "one", given, Place()) == both(home / "two", given, Place(workers=2))


def test_a_stopped_stage_continues_with_the_missing_parts(shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stops: every job is done once over both commands, and the run is the uninterrupted one's."""
    home, given = shared
    expected = both(home / "whole", given, Place())
    for module, name in ((sampling, "sample_part"), (scoring, "score_part")):
        for stop in range(1, 5):
            done: list[str] = []
            with monkeypatch.context() as patch:
                patch.setattr(module, name, partial(stopping, getattr(module, name), done, [stop]))
                with pytest.raises(DataError, match="stopped"):
                    both(home / "stopped", given, Place())
                assert both(home / "stopped", given, Place()) == expected
            assert len(done) == len(set(done)) == 5
            shutil.rmtree(home / "stopped")


def stopping(work: Callable[..., None], done: list[str], at: list[int], part: Path, **arguments: object) -> None:
    """The work, which fails once, after `at` parts."""
    if at and len(done) == at[0]:
        at.clear()
        raise DataError("stopped")
    work(part, **arguments)
    done.append(part.name)


def all_five(start: Path, path: Path, place: Place) -> dict[str, str]:
    """Every stage whose work is shared out, over a distilled run."""
    shutil.copytree(start, path)
    pair = open_run(start).manifest["config"]
    given = [kind(**pair[name]) for kind, name in ((sampling.PairConfig, "pair"), (sampling.PromptsConfig, "prompts"))]
    base = BaselineConfig(problems=12, rollouts=2, max_new_tokens=8)
    both(path, given, place)
    detect(path, DETECT)
    knockout(path, KnockoutConfig(candidates=("w7", "w9"), until="budget", resamples=100), base, place=place)
    run_graft(path, GraftConfig(problems=12, rocks=("w7",), clusters=False, resamples=100), base, place=place)
    small = {"steps": 2, "evaluations": 1, "problems": 4, "rollouts": 1, "contexts": 4, "resamples": 100}
    compare(path, CompareConfig(regimes=("uniform", "freeze"), seeds=2, rocks=(7,), **small), place=place)
    return digests(path)


@pytest.mark.slow
def test_two_workers_and_two_nodes_of_ray_make_the_run_that_one_process_makes(
    shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = shared[0]
    monkeypatch.setattr(pieces, "CHUNK", 8)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    start = distilled_run(home / "start", *save_pair(home, prompts=80)).path
    expected = all_five(start, home / "one", Place())
    asked: list[Path] = []
    for kind in (jobs._Local, jobs._Ray):
        give = kind.give
        monkeypatch.setattr(
            kind, "give", lambda own, worker, job, give=give: (asked.append(job[1].part), give(own, worker, job))[1]
        )
    with keeping_workers():
        assert all_five(start, home / "two", Place(workers=2)) == expected
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with keeping_workers():
            assert all_five(start, home / "ray", Place(ray="auto")) == expected
    finally:
        cluster.shutdown()
    assert len(asked) == len(set(asked))  # no job was done twice
    assert len(asked) > 40
