"""Nothing around a command changes its results, and nothing in the current directory is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from rocktokens.train import stage

TESTS = Path(__file__).parents[1]
STUDY = """
import sys
from dataclasses import replace
from pathlib import Path
from attacks import run_stages, small_study
config = small_study(Path(sys.argv[1]))
config = replace(config, pair=replace(config.pair, threads=None))
run_stages(config, *config.stages)
"""
TABLES = (
    "rollouts",
    "types",
    "geometry",
    "persistence",
    "baseline",
    "knockouts",
    "census",
    "grafts",
    "compare_summary",
)


@pytest.mark.slow
def test_environment_variables_change_no_result(tmp_path: Path) -> None:
    """Two small studies, to the bit; times are no results."""
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS / "helpers", TESTS / "campaign")))
    variables = [
        {"PYTHONHASHSEED": "1", "TZ": "UTC", "LANG": "C", "OMP_NUM_THREADS": "1"},
        {"PYTHONHASHSEED": "77", "TZ": "Asia/Kathmandu", "LANG": "tr_TR.UTF-8", "OMP_NUM_THREADS": "4"},
    ]
    for number, own in enumerate(variables):
        words = [sys.executable, "-c", STUDY, str(tmp_path / str(number))]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": path, **own})
    one, two = (tmp_path / str(number) / "run" for number in range(2))
    for name in TABLES:
        first, second = (pq.read_table(run / f"{name}.parquet") for run in (one, two))
        timeless = [column for column in first.column_names if "second" not in column]
        assert first.select(timeless).equals(second.select(timeless)), name
    lists = [(run / "bypass.json").read_text().replace(str(run.parent), "HOME") for run in (one, two)]
    assert lists[0] == lists[1]


def test_torchruns_processes_import_nothing_from_the_current_directory(tmp_path: Path, monkeypatch) -> None:
    """Those of the pool and of Ray: tests/jobs."""
    seen = []
    monkeypatch.setattr(
        stage.subprocess, "run", lambda *_, env, **__: seen.append(env) or SimpleNamespace(returncode=1)
    )
    asked = stage.Request(
        *(getattr(stage, kind)() for kind in ("PairConfig", "PromptsConfig", "DistillConfig")), 4, stage.ServersConfig()
    )
    with pytest.raises(stage.RunError, match="status 1"):
        stage._launch(tmp_path, asked, again=False)
    assert seen[0]["PYTHONSAFEPATH"] == "1"
