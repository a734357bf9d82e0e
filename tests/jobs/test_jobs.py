"""Jobs: the same parts from every place, whatever happens to a worker; nothing done twice, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_jobs import work

from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.jobs import RETRIES, Job, Place, run

POOL = Place(workers=2)


def toy(folder: Path, count: int = 6, faults: dict[int, dict[str, object]] | None = None) -> list[Job]:
    """Jobs that write squares; `faults` says which of them go wrong."""
    (folder / "parts").mkdir(exist_ok=True)
    common = {"log": str(folder / "log")}
    return [
        Job(f"{n}", folder / "parts" / f"{n}", {"number": n, **common, **(faults or {}).get(n, {})})
        for n in range(count)
    ]


def parts(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (folder / "parts").glob("[0-9]*")}


def attempts(folder: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in (folder / "log").read_text().splitlines())


def processes(folder: Path) -> set[int]:
    """Ids of all processes that worked or were started by one that did."""
    return {int(line.split()[1]) for line in (folder / "log").read_text().splitlines()} - {os.getpid()}


def alive(ids: set[int]) -> set[int]:
    def runs(process: int) -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return {process for process in ids if runs(process)}


SQUARES = {str(n): str(n * n) for n in range(6)}


@pytest.mark.parametrize("place", [Place(), POOL], ids=["here", "pool"])
def test_every_place_makes_the_same_parts_once(tmp_path: Path, place: Place) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "3").write_text("9")
    run(toy(tmp_path), work, place, what="squaring")
    run(toy(tmp_path), work, place, what="squaring")
    assert parts(tmp_path) == SQUARES
    assert attempts(tmp_path) == Counter("01245")
    assert not alive(processes(tmp_path))


@pytest.mark.parametrize("times", range(RETRIES + 2))
@pytest.mark.parametrize("victim", [0, 5])
def test_a_killed_worker_costs_its_job_only(tmp_path: Path, victim: int, times: int) -> None:
    jobs = toy(tmp_path, faults={victim: {"fault": "killed", "times": times}})
    if times > RETRIES:
        with pytest.raises(RunError, match="killed"):
            run(jobs, work, POOL, what="squaring")
        run(toy(tmp_path), work, POOL, what="squaring")  # a repeat completes
    else:
        run(jobs, work, POOL, what="squaring")
        assert attempts(tmp_path) == Counter("012345" + str(victim) * times)
    assert parts(tmp_path) == SQUARES
    assert not alive(processes(tmp_path))


def test_a_part_that_was_written_before_its_worker_died_is_not_made_again(tmp_path: Path) -> None:
    run(toy(tmp_path, faults={2: {"fault": "killed afterwards", "times": 1}}), work, POOL, what="squaring")
    assert attempts(tmp_path) == Counter("012345")


@pytest.mark.parametrize("place", [Place(), POOL], ids=["here", "pool"])
@pytest.mark.parametrize("fault", ["ours", "full disk", "a bug"])
def test_a_job_that_raises_ends_the_command(tmp_path: Path, place: Place, fault: str) -> None:
    """Errors of ours and of the disk arrive as they are; a bug in a worker arrives with its traceback."""
    kinds = {"ours": RockTokensError, "full disk": OSError, "a bug": KeyError if place == Place() else RuntimeError}
    with pytest.raises(kinds[fault], match=r"prompt 7|No space|no such column"):
        run(toy(tmp_path, faults={4: {"fault": fault}}), work, place, what="squaring")
    finished = set(parts(tmp_path))
    assert "4" not in finished
    assert len(finished) >= 3
    run(toy(tmp_path), work, place, what="squaring")
    assert parts(tmp_path) == SQUARES
    assert all(attempts(tmp_path)[name] == 1 for name in finished)
    assert not alive(processes(tmp_path))


# A shell that starts the tests in the background lets them ignore SIGINT; the driver must not inherit that.
DRIVER = """
import signal
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_jobs import Place, toy
from toy_jobs import work
from rocktokens.jobs import run
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(toy(Path({folder!r}), faults={faults!r}), work, {place!r}, what="squaring")
"""


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
@pytest.mark.parametrize("moment", [0, 3])
def test_a_stopped_driver_leaves_no_process(tmp_path: Path, signal_: signal.Signals, moment: int) -> None:
    stop_at(moment, signal_, tmp_path, POOL)


def stop_at(moment: int, signal_: signal.Signals, tmp_path: Path, place: Place) -> None:
    """Stop a driver when `moment` parts are there and two jobs hang; then repeat its command."""
    script = tmp_path / "driver.py"
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "helpers"), str(here.parents[1])]
    faults = {moment: {"fault": "sleeps"}, moment + 1: {"fault": "sleeps"}}
    script.write_text(DRIVER.format(path=paths, folder=str(tmp_path), faults=faults, place=place))
    driver = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() or attempts(tmp_path)["child"] < 2:
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.02)
    driver.send_signal(signal_)
    assert driver.wait(20) != 0
    deadline = time.monotonic() + 5
    while alive(processes(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(processes(tmp_path))
    assert len(parts(tmp_path)) >= moment
    finished = set(parts(tmp_path))
    run(toy(tmp_path), work, Place(), what="squaring")
    assert parts(tmp_path) == SQUARES
    assert all(attempts(tmp_path)[name] == 1 for name in finished)


def test_workers_do_not_import_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "multiprocessing.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    run(toy(tmp_path), work, POOL, what="squaring")
    assert parts(tmp_path) == SQUARES


def test_wrong_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in (0, 1000):
        with pytest.raises(ConfigError, match="workers"):
            Place(workers=workers)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--ray"):
        run(toy(tmp_path), work, what="squaring")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two Ray nodes with a core each on this machine."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here.parents[1], here.parent / "helpers"))))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.mark.slow
def test_two_nodes_of_ray_make_the_same_parts_once(tmp_path: Path, cluster: Any) -> None:
    place = Place(ray=cluster.address)
    run(toy(tmp_path, faults={n: {"fault": "slow"} for n in range(6)}), work, place, what="squaring")
    run(toy(tmp_path), work, place, what="squaring")
    assert parts(tmp_path) == SQUARES
    assert attempts(tmp_path) == Counter("012345")
    assert len(processes(tmp_path)) == 2
    for fault in ("ours", "memory", "killed"):
        (tmp_path / "parts" / "4").unlink(missing_ok=True)
        with pytest.raises(RockTokensError, match=r"prompt 7|died|memory"):
            run(toy(tmp_path, faults={4: {"fault": fault}}), work, place, what="squaring")
    run(toy(tmp_path, faults={4: {"fault": "killed", "times": attempts(tmp_path)["4"] + 1}}), work, place, what="it")
    assert parts(tmp_path) == SQUARES
    assert not alive(processes(tmp_path))


@pytest.mark.slow
def test_a_driver_on_ray_that_is_stopped_leaves_no_process(tmp_path: Path, cluster: Any) -> None:
    for moment in (0, 1, 3):
        (tmp_path / str(moment)).mkdir()
        stop_at(moment, signal.SIGINT, tmp_path / str(moment), Place(ray=cluster.address))


@pytest.mark.slow
def test_a_node_that_is_lost_costs_its_jobs_only(tmp_path: Path, cluster: Any) -> None:
    def lose() -> None:
        while not (tmp_path / "log").exists() or len(processes(tmp_path)) < 2:
            time.sleep(0.02)
        cluster.remove_node(cluster.second, allow_graceful=False)

    losing = threading.Thread(target=lose)
    losing.start()
    jobs = toy(tmp_path, faults={n: {"fault": "slow"} for n in range(6)})
    run(jobs, work, Place(ray=cluster.address), what="squaring")
    losing.join()
    assert parts(tmp_path) == SQUARES
    assert sum(attempts(tmp_path).values()) <= 7
