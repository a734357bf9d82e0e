"""A run directory: what is listed exists and is whole, whatever was killed, cut or repeated."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocktokens.errors import DataError, RunError
from rocktokens.run import Run, open_run
from rocktokens.tables import METRICS


def occurrences(rollout: str, rows: int, kl: float = 0.5) -> pa.Table:
    """Rows of one rollout, in the columns of the schema."""
    columns = {name: np.full(rows, kl, dtype=np.float32) for name in METRICS}
    return pa.table(
        {
            "prompt_id": [rollout.split("#")[0]] * rows,
            "rollout_id": [rollout] * rows,
            "position": np.arange(rows, dtype=np.int32),
            "token_id": np.arange(rows, dtype=np.int32) % 5,
            **columns,
            "is_eos": [False] * rows,
        }
    )


@pytest.fixture
def run(tmp_path) -> Run:
    """A run with two scored checkpoints of several parts each."""
    run = Run.create(tmp_path / "run", {"pair": {"student": "s", "teacher": "t"}, "seed": 3})
    for step in (0, 10):
        for part, rollout in enumerate(("a#0", "a#1", "b#0")):
            run.write_part(step, occurrences(rollout, 3, kl=step + 1.0), part=str(part))
        run.finish(f"score/step={step}", {"occurrences": 9})
    return run


# --- reading ---


def test_rocks_come_by_definition_largest_first(run):
    columns = {"token_id": [1, 2, 3], "r": [0.1, 0.9, 0.5], "r_ctx": [0.3, 0.1, 0.2]}
    columns |= {"in_burden": [False, True, True], "in_context": [True, False, True]}
    run.write("types", pa.table(columns))
    run.finish("detect", {"definition": "context"})
    assert run.rocks()["token_id"].to_pylist() == [1, 3]
    assert run.rocks("burden")["token_id"].to_pylist() == [2, 3]
    with pytest.raises(RunError, match="burden"):
        run.rocks("loudest")


def test_what_has_not_run_is_named(run, tmp_path):
    with pytest.raises(RunError, match=r"types\.parquet"):
        run.types()
    with pytest.raises(RunError, match="rocktokens detect"):
        run.rocks()
    with pytest.raises(RunError, match="has not run"):
        Run.create(tmp_path / "new").occurrences()


# --- damage ---


def test_a_failed_write_leaves_the_old_table(run, monkeypatch):
    """The disk is full halfway."""
    run.write("types", pa.table({"token_id": [1]}))

    def full(table, path, **options):
        Path(path).write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(RunError, match="No space left"):
        run.write("types", pa.table({"token_id": [2]}))
    monkeypatch.undo()
    assert run.read("types")["token_id"].to_pylist() == [1]
    assert not list(run.path.glob(".*tmp"))


# --- manifest ---


def test_stages_are_recorded_reopened_and_known_after_a_restart(run):
    assert open_run(run.path).facts("score/step=0") == {"occurrences": 9}
    run.finish("sample", {"rollouts": 4, "by_step": {10: 0.1, 2: -0.0}, "pair": (1, 2)})
    assert open_run(run.path).facts("sample")["by_step"] == {"10": 0.1, "2": 0.0}
    run.reopen("sample")
    assert not open_run(run.path).done("sample")
    run.reopen("never ran")
    with pytest.raises(RunError, match="rocktokens score"):
        run.facts("score/step=99")


def test_a_configuration_may_grow_and_another_is_refused_saying_where_it_differs(run):
    again = Run.create(run.path, {"pair": {"student": "s", "teacher": "t"}, "seed": 3})
    assert again.done("score/step=10")
    later = Run.create(run.path, {"detect": {"k": 5}, "seed": 3})
    assert later.manifest["config"]["pair"]["student"] == "s"
    assert open_run(run.path).manifest["config"]["detect"] == {"k": 5}
    assert {"rocktokens", "torch", "transformers"} <= later.manifest["versions"].keys()
    with pytest.raises(RunError, match=r"pair\.teacher was 't', now 'u'"):
        Run.create(run.path, {"pair": {"student": "s", "teacher": "u"}})
    with pytest.raises(RunError, match="seed was 3, now 4"):
        Run.create(run.path, {"seed": 4})
    assert open_run(run.path).manifest["config"]["seed"] == 3
    assert len(run.occurrences()) == 18


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    with pytest.raises(RunError, match="not empty"):
        Run.create(tmp_path / "photos")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        Run.create(tmp_path / "file")
    with pytest.raises(RunError, match="no run"):
        open_run(tmp_path / "photos")
    with pytest.raises(RunError, match="no run"):
        open_run(tmp_path / "nowhere")


def test_a_run_of_another_version_is_refused(run):
    run.manifest |= {"schema_version": 99, "versions": {"rocktokens": "9.0"}}
    run.save()
    with pytest.raises(RunError, match=r"made by rocktokens 9\.0"):
        open_run(run.path)
    (run.path / "run.json").write_text('{"schema_version": 1, "config": {}, "stages": {}}')
    with pytest.raises(RunError, match=r"rocktokens==0\.2"):
        open_run(run.path)


def test_duckdb_sees_rows_that_are_nan(tmp_path: Path) -> None:
    # Parquet statistics leave NaN out; with them DuckDB 2.0 answers that isnan() holds nowhere.
    run = Run.create(tmp_path / "run")
    run.write("losses", pa.table({"kl": pa.array([1.0, float("nan"), 2.0], pa.float32())}))
    assert run.query("select count(*) as n from losses where isnan(kl)")["n"].to_pylist() == [1]
    rows = run.query("select isnan(kl) as bad, count(*) as n from losses group by 1 order by 1").to_pylist()
    assert rows == [{"bad": False, "n": 2}, {"bad": True, "n": 1}]


def damage(path: Path, how: str) -> None:
    """Put something in the place of a file that its reader must not take, or wait for."""
    whole = path.read_bytes()
    path.unlink()
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "a device":
        path.symlink_to("/dev/zero")
    elif how == "a directory":
        path.mkdir()
    elif how == "other columns":
        pq.write_table(pa.table({"token_id": ["seven"]}), path)
    else:
        path.write_bytes({"empty": b"", "text": b"hello", "cut": whole[:-20], "head": whole[:100]}[how])


@pytest.mark.parametrize("how", ["empty", "text", "cut", "head", "a pipe", "a device", "a directory", "other columns"])
def test_a_damaged_file_is_one_sentence(run, how):
    part = sorted((run.path / "occurrences" / "step=10").glob("*.parquet"))[1]
    damage(run.write("types", pa.table({"token_id": list(range(1000))})), how)
    damage(part, how)
    opened = open_run(run.path)
    for read in (opened.types, lambda: opened.query("select * from types"), opened.occurrences):
        with pytest.raises(DataError, match=r"types\.parquet|part-"):
            read()
    if how != "other columns":
        damage(run.path / "run.json", how)
        with pytest.raises(RunError, match=r"run\.json"):
            open_run(run.path)


def test_a_manifest_that_somebody_edited_is_one_sentence(run):
    manifest = json.loads((run.path / "run.json").read_text())
    edited = [{"stages": 5}, {"config": {"seed": 4}}, {"digest": None}, {"versions": {"torch": float("inf")}}]
    for text in (
        *(json.dumps(manifest | change) for change in edited),
        "[1]",
        "5",
        '{"a": 1e999}',
        '{"a": NaN}',
        '{"a": "\\ud800"}',
    ):
        (run.path / "run.json").write_text(text)
        with pytest.raises(RunError, match=r"run\.json"):
            open_run(run.path)
