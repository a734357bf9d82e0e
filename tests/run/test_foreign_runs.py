"""Somebody else's run folder: nothing in it is executed, and no text in it becomes SQL."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_runs import save_pair, scored_run

from rocktokens.causal.knockout import knockout
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.cli import main, parse, permissions_of
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.prompts.checkers import make_checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import open_run
from rocktokens.study import load_settings


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("foreign")
    scored_run(home / "run", *save_pair(home / "pair"))
    return home / "run"


@pytest.fixture
def run(scored, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(scored, tmp_path / "run"))


def change(run: Path, **sections) -> None:
    """What somebody who makes runs to be opened by others may write into one."""
    made = open_run(run)
    for section, values in sections.items():
        made.manifest["config"][section] |= values
    made.save()


def evil_module(folder: Path) -> Path:
    """A module that leaves a mark when it is imported."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef check(text, answer):\n    return True\n")
    return folder / "ran"


def test_a_checker_that_a_run_names_is_not_imported(run, tmp_path, capsys):
    mark = evil_module(tmp_path)
    change(run, prompts={"checker": "evil:check"})
    with pytest.raises(ConfigError, match=r"evil\.py.*--allow-code"):
        knockout(run, KnockoutConfig(candidates=("w7",)), BaselineConfig(problems=4))
    for words in (["report", str(run)], ["knockout", str(run)], ["graft", str(run)]):
        with pytest.raises(SystemExit):
            main(words)
    assert not mark.exists()
    assert "--allow-code" in capsys.readouterr().err


def test_a_checker_on_the_command_line_asks_for_allow_code(run, tmp_path, capsys):
    mark = evil_module(tmp_path)
    words = ["sample", str(tmp_path / "new"), "--prompts.checker", "evil:check"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert str(tmp_path / "evil.py") in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("where", ["study", "config"])
def test_settings_of_a_study_in_a_run_permit_nothing(run, where):
    """`rocktokens study RUN` takes its settings from the run, but for what a command line has to permit."""
    evil = {"trust_remote_code": True, "allow_pickle": True}
    if where == "config":
        change(run, pair=evil)
    else:
        made = open_run(run)
        made.manifest["study"] = {"pair": evil}
        made.save()
    kept = load_settings(run)
    assert not kept.pair.trust_remote_code
    assert not kept.pair.allow_pickle
    command = parse(["study", str(run)])
    assert permissions_of(command, allow_code=False) == []
    asked = parse(["study", str(run), "--pair.trust-remote-code"])
    assert permissions_of(asked, allow_code=False) == ["model code"]


def test_code_of_a_tokenizer_in_a_run_is_not_run(run, tmp_path):
    """`report` loads the tokenizer that a run names; its code stays where it is."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil_tokenizer.Evil", None]}})
    )
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "evil_tokenizer.C"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil_tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    change(run, pair={"student": str(model), "trust_remote_code": True})
    with pytest.raises(SystemExit):
        main(["report", str(run), "--again"])
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", [".lock", "checkpoints", "types.parquet", "detect.parts"])
def test_nothing_is_written_through_a_link(run, tmp_path, capsys, name):
    victim = tmp_path / "victim"
    victim.mkdir() if name in ("checkpoints", "detect.parts") else victim.write_text("precious")
    before = victim.read_text() if victim.is_file() else sorted(victim.iterdir())
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    with pytest.raises(SystemExit) as ended:
        main(["detect", str(run), "--again"])
    assert ended.value.code == 1
    assert f"{name} is a symbolic link" in capsys.readouterr().err
    assert (victim.read_text() if victim.is_file() else sorted(victim.iterdir())) == before


@pytest.mark.parametrize("replaced", [False, True], ids=["moved", "replaced"])
def test_a_run_that_is_moved_while_a_stage_works_is_left_alone(run, tmp_path, monkeypatch, capsys, replaced):
    from rocktokens.detect import stage

    real, complete = stage.detect_rocks, open_run(run).manifest["stages"]

    def moving(*arguments, **options):
        run.rename(tmp_path / "elsewhere")
        if replaced:
            shutil.copytree(tmp_path / "elsewhere", run)
        return real(*arguments, **options)

    monkeypatch.setattr(stage, "detect_rocks", moving)
    with pytest.raises(SystemExit) as ended:
        main(["detect", str(run), "--again"])
    assert ended.value.code == 1
    assert "was moved, deleted or replaced" in capsys.readouterr().err
    assert run.exists() == replaced  # no ghost
    for left in (tmp_path / "elsewhere", *([run] if replaced else [])):
        assert open_run(left).manifest["stages"] == complete


def every_file(run: Path) -> list[str]:
    return sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())


def test_a_pipe_in_place_of_any_file_is_waited_for_by_no_command(run, scored, capsys):
    for name in every_file(scored):
        (run / name).rename(run / "kept")
        os.mkfifo(run / name)
        for command in (["detect", str(run)], ["report", str(run)], ["bypass", str(run)], ["export", str(run)]):
            start = time.monotonic()
            with pytest.raises(SystemExit) as ended:
                main(command)
            assert time.monotonic() - start < 10
            assert ended.value.code in (0, 1, 2)
            assert "should not have happened" not in capsys.readouterr().err, (name, command)
        (run / name).unlink()
        (run / "kept").rename(run / name)


def test_a_table_that_promises_what_nothing_can_hold_is_refused(run):
    """Ten thousand million equal rows are a file of some kilobytes."""
    many = pa.RecordBatch.from_arrays([pa.DictionaryArray.from_arrays(np.zeros(10**6, np.int8), ["x"])], ["token"])
    opened = open_run(run)
    with pq.ParquetWriter(run / "types.parquet", many.schema, compression="zstd") as writer:
        for _ in range(30):
            writer.write_batch(many)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=10**7, available=10**7))
        for read in (opened.types, lambda: opened.query("select * from types")):
            with pytest.raises(DataError, match=r"types\.parquet.*promises 30,000,000 rows"):
                read()


# ---------------------------------------------------------------- SQL


def test_a_table_name_is_no_sql(run, tmp_path):
    name = "x as select 1; copy (select 1) to '" + "owned.csv' --"
    opened = open_run(run)
    opened.write(name, pa.table({"a": [1]}))
    assert opened.query(f'select * from "{name}"'.replace('"x', '"x'))["a"].to_pylist() == [1]
    assert not list(tmp_path.rglob("owned.csv"))
    with pytest.raises((DataError, RunError)):
        opened.query(f"select * from {name}")
    assert not list(tmp_path.rglob("owned.csv"))


@pytest.mark.parametrize(
    "sql",
    [
        "copy (select 1) to '{home}/owned.csv'",
        "select 1; copy (select 1) to '{home}/owned.csv'",
        "select * from read_csv('{home}/secret.csv')",
        "select * from read_text('/etc/hostname')",
        "attach '{home}/other.db'",
        "install httpfs",
        "set enable_external_access = true",
    ],
)
def test_a_query_reads_the_runs_own_files_and_writes_nothing(run, tmp_path, sql):
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with pytest.raises((DataError, RunError)):
        open_run(run).query(sql.format(home=tmp_path))
    assert not (tmp_path / "owned.csv").exists()


# ---------------------------------------------------------------- answers


def test_a_pattern_that_tries_every_way_is_stopped(monkeypatch):
    monkeypatch.setattr("rocktokens.prompts.checkers.TIMEOUT_SECONDS", 1)
    check = make_checker(PromptsConfig(source="x.jsonl", checker="regex", pattern=r"((?:a|aa|.a)+)\d$"))
    start = time.monotonic()
    with pytest.raises(ConfigError, match="took more than 1 s"):
        check("a" * 200 + "!", "a")
    assert time.monotonic() - start < 25


def test_a_checker_that_raises_is_named(tmp_path, monkeypatch):
    (tmp_path / "raising_checker.py").write_text("def check(text, answer):\n    raise KeyError('gone')\n")
    monkeypatch.chdir(tmp_path)
    check = make_checker(PromptsConfig(source="x.jsonl", checker="raising_checker:check"))
    with pytest.raises(ConfigError, match="raising_checker:check failed with KeyError"):
        check("a", "b")
