"""Stages whose work is shared out make the same run in every place, bit for bit, and do nothing twice."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from small_runs import save_pair

from rocktokens.errors import DataError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.run import open_run
from rocktokens.sample import stage as sampling
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score import stage as scoring
from rocktokens.score.settings import ScoreConfig

ROLLOUTS = RolloutConfig(num_rollouts=2, max_new_tokens=8)


def digests(path: Path) -> dict[str, str]:
    """Every table and tensor of a run."""
    found = [file for kind in ("parquet", "safetensors") for file in path.rglob(f"*.{kind}")]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in found}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, object]:
    """A pair with many small jobs; workers read the constants from their module, the driver lists the jobs."""
    monkeypatch.setattr(sampling, "PART_PROMPTS", 8)
    monkeypatch.setattr(scoring, "PART_ROLLOUTS", 16)
    return tmp_path, save_pair(tmp_path)


def both(path: Path, given: object, place: Place) -> dict[str, str]:
    pair, prompts = given  # type: ignore[misc]
    sampling.sample(path, pair, prompts, ROLLOUTS, place=place)
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


@pytest.mark.slow
def test_two_nodes_of_ray_make_the_run_that_one_process_makes(shared, monkeypatch: pytest.MonkeyPatch) -> None:
    home, given = shared
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    expected = both(home / "one", given, Place())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        assert both(home / "two", given, Place(ray=cluster.address)) == expected
    finally:
        cluster.shutdown()
    assert open_run(home / "two").done("score")
