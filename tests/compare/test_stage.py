"""The stage `compare`: complete, resumed, grown, started late, refused; the same whatever the number of workers."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import distilling
import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from rocktokens import jobs as jobs_
from rocktokens.compare import trainings
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import compare, plan_trainings
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.servers.settings import ServersConfig
from rocktokens.train.settings import DistillConfig
from rocktokens.train.stage import distill

ROCKS = tuple(range(5, 20))
TRAINED = DistillConfig(learning_rate=1e-3, max_new_tokens=12, prompts_per_step=8, rollouts_per_prompt=2)
QUICK = CompareConfig(
    regimes=("freeze",), seeds=2, evaluations=2, problems=12, rollouts=2, contexts=10, rocks=ROCKS, resamples=100
)
LATE = replace(QUICK, seeds=1, evaluations=1, steps=2, start=4)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Iterator[Path]:
    """A tiny run that is distilled and sampled."""
    gc.freeze()  # a comparison collects garbage after each student: not also what the test session has imported
    home = tmp_path_factory.mktemp("run")
    for name, model in (("student", distilling.student()), ("teacher", distilling.teacher())):
        model.save_pretrained(home / name)
        distilling.tokenizer().save_pretrained(home / name)
    rows = [{"prompt": p.text, "answer": f"w{3 + i % 40}"} for i, p in enumerate(distilling.prompts(160))]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = PairConfig(student=str(home / "student"), teacher=str(home / "teacher"))
    prompts = PromptsConfig(source=str(home / "prompts.jsonl"), checker="regex", pattern=r"(w\d+)")
    distill(home / "run", pair, prompts, replace(TRAINED, steps=4, keep=2, telemetry_every=None), problems=10)
    sample(home / "run", pair, prompts, RolloutConfig(num_rollouts=1, max_new_tokens=12))
    yield home / "run"
    gc.unfreeze()


@pytest.fixture(scope="module")
def compared(fresh, tmp_path_factory) -> Path:
    """The same, compared; tests only read it."""
    path = tmp_path_factory.mktemp("compared") / "run"
    shutil.copytree(fresh, path)
    compare(path, QUICK)
    return path


@pytest.fixture
def run(fresh, tmp_path) -> Run:
    return open_run(shutil.copytree(fresh, tmp_path / "run"))


def tables(path: Path) -> dict[str, list[dict]]:
    """What a comparison wrote, without its seconds."""
    found = {}
    for name in ("compare", "compare_problems"):
        rows = open_run(path).read(name).to_pylist()
        found[name] = [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]
    return found


def planned(run: Run, config: CompareConfig) -> dict[str, DistillConfig]:
    trainings = plan_trainings(run, config, run.path / "compare", ServersConfig())
    return {training.regime: training.distill for training in trainings}


def test_a_comparison_is_complete(compared):
    run = open_run(compared)
    facts = run.facts("compare")
    assert [row["regime"] for row in facts["regimes"]] == ["uniform", "freeze"]
    assert facts["normalise"] == "kept"
    counts = run.query("select regime, seed, count(*) n from compare group by all order by all").to_pylist()
    assert [row["n"] for row in counts] == [5] * 4  # the start and four steps
    starts = run.query("select distinct seed, accuracy from compare where step = 0").to_pylist()
    assert len(starts) == 2  # one start per seed, whatever the regime
    rows = run.read("compare").to_pylist()
    read = [row["step"] for row in rows if row["regime"] == "freeze" and row["accuracy"] is not None]
    assert read == [0, 2, 4, 0, 2, 4]
    assert min(row["kept_share"] for row in rows if row["regime"] == "freeze" and row["step"]) < 0.95
    assert run.query("select count(*) n from compare_problems where regime = 'freeze'")["n"][0].as_py() == 6 * 12

    # Losses by prompt add up to the means that are shown, and give them an interval.
    own = open_run(compared / "compare" / "freeze" / "seed=1")
    losses, problems = own.read("losses/step=4"), own.read("problems/step=4")
    last = next(row for row in rows if (row["regime"], row["seed"], row["step"]) == ("freeze", 1, 4))
    for kind, name in (("rock", "heldout_loss_rocks"), ("rest", "heldout_loss_rest")):
        summed, positions = sum(losses[f"{kind}_loss"].to_pylist()), sum(losses[f"{kind}_positions"].to_pylist())
        assert last[name] == pytest.approx(summed / positions)
    assert np.mean(problems["length"].to_numpy()) == pytest.approx(last["heldout_length"])
    uniform, freeze = facts["regimes"][:2]
    assert freeze["loss_rest_low"] < freeze["loss_rest"] < freeze["loss_rest_high"]
    assert freeze["loss_rest_change"] == pytest.approx(freeze["loss_rest"] - uniform["loss_rest"])


def test_a_killed_comparison_resumes_to_the_same_tables(run, compared, monkeypatch, capsys):
    path, usual, calls = run.path, trainings._evaluate, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == 5:  # two starts, uniform's two evaluations of the first seed, then in the middle of freeze
            raise KeyboardInterrupt
        return usual(*arguments)

    monkeypatch.setattr(trainings, "_evaluate", dying)
    with pytest.raises(KeyboardInterrupt):
        compare(path, QUICK)
    monkeypatch.setattr(trainings, "_evaluate", usual)
    done = {file: file.stat().st_mtime_ns for file in path.glob("compare/uniform/seed=0/*.parquet")}
    assert done
    compare(path, QUICK)
    assert tables(path) == tables(compared)
    assert "Regimes from one start: 4 steps, 2 seeds" in capsys.readouterr().out
    assert all(file.stat().st_mtime_ns == changed for file, changed in done.items())
    facts = open_run(path).facts("compare")
    assert compare(path, QUICK).facts("compare") == facts  # nothing to do
    with pytest.raises(RunError, match=r"steps was 4, now 3.*--again"):
        compare(path, replace(QUICK, steps=3))

    # Rocks that come from a detection are those of the detection as it is now.
    open_run(path).finish("detect", {"rocks": list(ROCKS)[:1]})
    with pytest.raises(RunError, match=r"rocks was .* now .*--again"):
        compare(path, replace(QUICK, regimes=("soft",), rocks=()))


def apart(jobs, work, place=None, **words) -> None:
    """Do the jobs in another order, each as a process would that knows nothing but what it was sent."""
    for job in reversed(list(jobs)):
        sent = pickle.loads(pickle.dumps(job))
        jobs_._kept.clear()
        torch.manual_seed(99)
        work(sent.part, **sent.arguments)


def test_other_processes_make_the_tables_of_one_process(run, compared, monkeypatch):
    """Real ones are in tests/jobs/test_stages.py."""
    monkeypatch.setattr("rocktokens.compare.stage.run_jobs", apart)
    compare(run.path, QUICK)
    assert tables(run.path) == tables(compared)


def test_a_regime_is_added_and_again_replaces_the_trainings_only_when_the_new_ones_are_whole(run, monkeypatch):
    asked = replace(LATE, start=None)
    compare(run.path, asked)
    trained = {file: file.stat().st_mtime_ns for file in (run.path / "compare").rglob("training.parquet")}
    grown = compare(run.path, replace(asked, regimes=("freeze", "soft")))
    assert [row["regime"] for row in grown.facts("compare")["regimes"]] == ["uniform", "freeze", "soft"]
    assert all(file.stat().st_mtime_ns == changed for file, changed in trained.items())
    old = (run.path / "compare" / "uniform" / "seed=0" / "evaluated.json").stat().st_ino
    monkeypatch.setattr(trainings, "_train", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(run.path, asked, again=True)
    assert (run.path / "compare" / "uniform" / "seed=0" / "evaluated.json").stat().st_ino == old
    monkeypatch.undo()
    compare(run.path, replace(asked, steps=3), again=True)  # other settings than those of the stopped one
    assert open_run(run.path).facts("compare")["steps"] == 3
    assert not list(run.path.glob(".compare*"))


def test_a_comparison_starts_from_the_checkpoint_that_is_asked_for_and_trains_in_float32(run, capsys, monkeypatch):
    run.manifest["config"]["pair"]["dtype"] = "bfloat16"  # small updates would vanish in 16 bits
    run.save()
    monkeypatch.setattr(trainings.shutil, "rmtree", lambda *_, **__: None)  # evaluated students stay
    compare(run.path, LATE)
    assert "Regimes from the checkpoint at step 4: 2 steps, 1 seed," in capsys.readouterr().out
    late, early = (load_file(run.checkpoint(step) / "model.safetensors") for step in (4, 0))
    for regime in ("uniform", "freeze"):
        kept = run.path / "compare" / regime / "seed=0" / "checkpoints"
        began, ended = (load_file(kept / f"step={step}" / "model.safetensors") for step in (0, 2))
        assert all(torch.equal(began[name], late[name]) for name in began)
        assert not all(torch.equal(began[name], early[name]) for name in began)
        assert {tensor.dtype for tensor in ended.values()} == {torch.float32}
    with pytest.raises(RunError, match=r"start was 4, now 2"):  # not taken for these
        compare(run.path, replace(LATE, start=2))
    with pytest.raises(ConfigError, match=r"0, 2, 4"):
        compare(run.path, replace(LATE, start=3))


@pytest.mark.parametrize(
    ("change", "config", "error", "said"),
    [
        (lambda run: run.reopen("distill"), QUICK, RunError, "rocktokens distill"),
        (lambda run: run.reopen("sample"), QUICK, RunError, "rocktokens sample"),
        (lambda run: None, replace(QUICK, rocks=()), ConfigError, "bypass"),
        (lambda run: None, replace(QUICK, rocks=(), definition="context"), RunError, "detection"),
        (lambda run: run.manifest["config"]["distill"].update(lora_rank=4), LATE, ConfigError, "adapters"),
        (
            lambda run: run.manifest["config"]["prompts"].update(checker="none", pattern=None),
            QUICK,
            ConfigError,
            "answ",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(run, change, config, error, said):
    change(run)
    run.save()
    with pytest.raises(error, match=said):
        compare(run.path, config)
    assert not list(run.path.glob("compare/*/seed=*/training.parquet"))


def test_adaptive_over_too_few_steps_is_said_to_be_uniform(run, caplog):
    for steps, said in ((101, True), (102, False)):
        caplog.clear()
        planned(run, replace(QUICK, regimes=("adaptive",), steps=steps))
        assert ("adaptive watches 101 steps" in caplog.text) == said


def test_an_empty_list_is_said_and_the_other_regimes_are_still_planned(run, caplog):
    run.finish("detect", {"rocks": list(ROCKS)})
    asked = replace(QUICK, rocks=(), regimes=("freeze", "freeze_rocks", "random"), seeds=1)
    for listed, expected in (
        ((), {"freeze_rocks": ROCKS, "random": ROCKS}),
        (ROCKS[:1], {"freeze": ROCKS[:1], "freeze_rocks": ROCKS, "random": ROCKS[:1]}),
        (ROCKS, {"freeze": ROCKS, "random": ROCKS}),  # not trained twice
    ):
        run.finish("bypass", {"ids": list(listed)})
        found = planned(run, asked)
        assert {regime: config.selector.rocks for regime, config in found.items() if regime != "uniform"} == expected
    assert "the bypass list is empty" in caplog.text


def test_without_declared_rocks_a_definition_says_what_is_left_out(run):
    """As the paper would: the types of `context`, by rank, whatever `detect` declared."""
    columns = {"token_id": [5, 7, 9], "place_context": [2, 1, None], "in_context": [True, True, False]}
    run.write("types", pa.table(columns))
    run.finish("detect", {"rocks": []})
    run.finish("bypass", {"ids": []})
    asked = replace(QUICK, rocks=(), definition="context", regimes=("freeze", "freeze_rocks", "random"), seeds=1)
    found = planned(run, asked)
    assert list(found) == ["uniform", "freeze_rocks", "random"]
    assert found["freeze_rocks"].selector.rocks == found["random"].selector.rocks == (7, 5)


def test_a_pair_without_rocks_is_left_out_and_says_so(run, caplog):
    run.finish("detect", {"rocks": []})
    assert not compare(run.path, replace(QUICK, rocks=())).done("compare")
    assert "detect declared no rocks" in caplog.text
    assert "nothing to compare" in caplog.text
