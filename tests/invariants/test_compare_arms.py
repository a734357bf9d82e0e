"""Regimes of a comparison differ in nothing but what they leave out; a comparison goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import distilling
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rocktokens import Selector, make_selector
from rocktokens.compare.regimes import FrozenSets, common_base, regime_config
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import _warn_of_a_higher_rate, compare, make_plan
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.train.distill import distill as lm_distill
from rocktokens.train.settings import DistillConfig
from rocktokens.train.stage import distill
from rocktokens.train.trainer import RockDistillationTrainer, RockOptions

ROCKS = tuple(range(5, 20))
SETTINGS = CompareConfig(prefix=0.5)
TRAINED = DistillConfig(learning_rate=1e-3, max_new_tokens=12, prompts_per_step=8, rollouts_per_prompt=2)


def arm(regime: str, path: Path, *, steps: int = 1, **changes) -> tuple[Run, list[dict]]:
    """A regime trained for a few steps with every occurrence recorded, and its record."""
    base = common_base(TRAINED, SETTINGS, steps=steps)
    config = regime_config(regime, base, SETTINGS, seed=0, sets=FrozenSets(ROCKS, ROCKS))
    run = Run.create(path / regime)
    config = replace(config, telemetry_every=1, **changes)
    found = lm_distill(config, distilling.pair(), distilling.prompts(), run, rocks=ROCKS, show=False)
    return run, found.record.rows


def occurrences(run: Run, step: int) -> dict[tuple[str, int], int]:
    """(rollout, position) → token of one training step."""
    table = pq.read_table(run.path / "telemetry" / f"step={step}")
    return dict(zip(zip(*(table[c].to_pylist() for c in ("rollout_id", "position"))), table["token_id"].to_pylist()))


@pytest.fixture(scope="module")
def uniform(tmp_path_factory) -> dict[tuple[str, int], int]:
    return occurrences(arm("uniform", tmp_path_factory.mktemp("uniform"))[0], 1)


@pytest.mark.parametrize(
    "regime",
    [
        *("freeze", "random", "soft", "adaptive", "divergence", "entropy", "tip"),
        *("teachable", "iw", "fire", "selectkd", "position", "adakd", "prefix"),
    ],
)
def test_first_step_rollouts_are_the_same(regime, uniform, tmp_path):
    run, rows = arm(regime, tmp_path)
    own = occurrences(run, 1)
    longest = {"prefix": 6}.get(regime, 12)
    assert rows[0]["tokens"] == len(own)
    assert own == {place: token for place, token in uniform.items() if place[1] < longest}


def test_random_freezes_as_many_positions_as_freeze_would(tmp_path):
    for regime in ("random",):
        run, rows = arm(regime, tmp_path, steps=3)
        for row in rows:
            tokens = list(occurrences(run, row["step"]).values())
            kept_by_freeze = sum(token not in ROCKS for token in tokens)
            kept = row["kept_share"] * row["tokens"]
            assert row["tokens"] == len(tokens)
            assert abs(kept - kept_by_freeze) <= 0.01 * kept_by_freeze, (regime, row["step"])


@pytest.mark.parametrize(
    ("regime", "keep"),
    [("entropy", 0.5), ("divergence", 0.5), ("tip", 0.5), ("teachable", 0.05)],
)
def test_kept_tokens_are_the_share_asked_for_within_one_percent(regime, keep, tmp_path):
    _, rows = arm(regime, tmp_path, steps=2)
    for row in rows:
        assert row["kept_share"] * row["tokens"] == pytest.approx(keep * row["tokens"], abs=1 + 0.01 * row["tokens"])
        assert row["changed_share"] == pytest.approx(1 - row["kept_share"])


@pytest.mark.parametrize(("regime", "rollouts"), [("small", 8)])
def test_controls_sample_as_many_rollouts_as_they_say(regime, rollouts, uniform, tmp_path):
    run, rows = arm(regime, tmp_path)
    assert rows[0]["rollouts"] == rollouts
    prompts = pq.read_table(run.path / "telemetry" / "step=1")["prompt_id"].to_pylist()
    assert len(set(prompts)) == 8


def hidden_gradients(selector: str, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient at every state that predicts a response token, the token, and whether it counts, for the first step."""
    student, caught = distilling.student(), {}

    def keep(module, arguments, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: caught.setdefault("gradient", gradient.clone()))

    student.model.norm.register_forward_hook(keep)
    args = distilling.arguments(path, per_device_train_batch_size=16, gradient_accumulation_steps=1, max_steps=1)
    options = {"rocks": ROCKS} if selector == "freeze" else {}
    trainer = RockDistillationTrainer(
        student,
        distilling.teacher(),
        args,
        distilling.dataset(),
        processing_class=distilling.tokenizer(),
        selector=make_selector(selector, **options),
        options=RockOptions(normalise="all", generation="ours"),
    )
    step = trainer._compute_loss

    def watched(unwrapped, inputs, number):
        caught.update(token=inputs["completion_ids"], mask=inputs["completion_mask"], row=inputs["row"])
        return step(unwrapped, inputs, number)

    trainer._compute_loss = watched  # reads what goes in; what is computed is the trainer's own
    trainer.train()
    order, width = caught["row"].argsort(), caught["token"].shape[1]
    gradient_BCH = caught["gradient"][:, -width - 1 : -1]
    return gradient_BCH[order], caught["token"][order], caught["mask"][order].bool()


def test_freezing_zeroes_the_rocks_gradient_and_leaves_the_rest(tmp_path):
    uniform_BCH, token_BC, mask_BC = hidden_gradients("uniform", tmp_path / "u")
    freeze_BCH, same_BC, _ = hidden_gradients("freeze", tmp_path / "f")
    assert torch.equal(token_BC, same_BC)
    rock_BC = torch.isin(token_BC, torch.tensor(ROCKS)) & mask_BC
    rest_BC = mask_BC & ~rock_BC
    assert 0.1 < rock_BC.sum() / mask_BC.sum() < 0.5
    assert uniform_BCH[rock_BC].abs().amax(-1).min() > 0
    assert torch.equal(freeze_BCH[rock_BC], torch.zeros_like(freeze_BCH[rock_BC]))
    torch.testing.assert_close(freeze_BCH[rest_BC], uniform_BCH[rest_BC], rtol=1e-5, atol=1e-9)
    assert freeze_BCH[rest_BC].abs().max() > 1e-6


class FirstOfEach(Selector):
    """Samples the first rollout of each prompt only."""

    def weights(self, batch):
        return torch.ones(len(batch))

    def rollouts(self, prompts, step):
        return [place for place, name in enumerate(prompts) if name not in prompts[:place]]


@pytest.mark.parametrize(("passes", "rollouts"), [(1, 8), (2, 8), (16, 16)])
def test_rollouts_that_a_selector_does_not_want_are_not_sampled(passes, rollouts, tmp_path):
    args = distilling.arguments(
        tmp_path, per_device_train_batch_size=16 // passes, gradient_accumulation_steps=passes, max_steps=2
    )
    trainer = distilling.trained(
        RockDistillationTrainer, tmp_path, args=args, selector=FirstOfEach(), generation="ours", rollouts_per_prompt=2
    )
    assert [row["rollouts"] for row in trainer.record.rows] == [rollouts] * 2
    assert all(np.isfinite(row["loss"]) and row["tokens"] > 0 for row in trainer.record.rows)


# ---------------------------------------------------------------- the stage


@pytest.fixture(scope="module")
def run_path(tmp_path_factory) -> Path:
    """A tiny run that is distilled, sampled and scored."""
    home = tmp_path_factory.mktemp("run")
    for name, model in (("student", distilling.student()), ("teacher", distilling.teacher())):
        model.save_pretrained(home / name)
        distilling.tokenizer().save_pretrained(home / name)
    rows = [{"prompt": p.text, "answer": f"w{3 + i % 40}"} for i, p in enumerate(distilling.prompts(160))]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = PairConfig(student=str(home / "student"), teacher=str(home / "teacher"))
    prompts = PromptsConfig(source=str(home / "prompts.jsonl"), checker="regex", pattern=r"(w\d+)")
    config = replace(TRAINED, steps=4, keep=2, telemetry_every=None)
    distill(home / "run", pair, prompts, config, problems=10)
    sample(home / "run", pair, prompts, RolloutConfig(num_rollouts=1, max_new_tokens=12))
    score(home / "run", ScoreConfig())
    return home / "run"


QUICK = CompareConfig(
    regimes=("freeze", "random"),
    seeds=2,
    evaluations=2,
    problems=12,
    rollouts=2,
    contexts=10,
    rocks=ROCKS,
    resamples=100,
    keep_students=True,
)


def tables(path: Path) -> dict[str, list[dict]]:
    """What a comparison wrote, without its seconds."""
    found = {}
    for name in ("compare", "compare_problems"):
        rows = open_run(path).read(name).to_pylist()
        found[name] = [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]
    return found


def test_a_comparison_is_complete_resumes_and_grows(run_path, capsys):
    run = compare(run_path, QUICK)
    said = capsys.readouterr().out
    facts = run.facts("compare")
    assert [row["regime"] for row in facts["regimes"]] == ["uniform", "freeze", "random"]
    assert facts["normalise"] == "kept"
    assert all(sentence.split()[0] in said for sentence in facts["verdicts"])
    assert "Regimes from one start: 4 steps, 2 seeds" in said

    table = run.read("compare")
    counts = run.query("select regime, seed, count(*) n from compare group by all order by all").to_pylist()
    assert [row["n"] for row in counts] == [5] * 6  # the start and four steps
    starts = run.query("select distinct seed, accuracy from compare where step = 0").to_pylist()
    assert len(starts) == 2  # one start a seed, whatever the regime
    shrinking = run.query(
        "select count(*) n from (select seconds_total - lag(seconds_total, 1, 0.0) over "
        "(partition by regime, seed order by step) as spent from compare) where spent < 0"
    )
    assert shrinking["n"][0].as_py() == 0
    read = [row["step"] for row in table.to_pylist() if row["regime"] == "freeze" and row["accuracy"] is not None]
    assert read == [0, 2, 4, 0, 2, 4]
    assert min(row["kept_share"] for row in table.to_pylist() if row["regime"] == "freeze" and row["step"]) < 0.95
    assert run.query("select count(*) n from compare_problems where regime = 'freeze'")["n"][0].as_py() == 6 * 12

    # Again: nothing to do. An arm that was stopped while it was read goes on, to the same tables.
    before = tables(run_path)
    assert compare(run_path, QUICK).facts("compare") == facts
    stopped = open_run(run_path / "compare" / "freeze" / "seed=1")
    for stage in ("read", "read/step=4"):
        stopped.reopen(stage)
    (stopped.path / "problems" / "step=4.parquet").unlink()
    open_run(run_path).reopen("compare")
    compare(run_path, QUICK)
    assert tables(run_path) == before

    # Another regime is added; what was trained stays.
    trained = {path: path.stat().st_mtime_ns for path in (run_path / "compare").rglob("training.parquet")}
    grown = compare(run_path, replace(QUICK, regimes=("freeze", "soft")))
    assert [row["regime"] for row in grown.facts("compare")["regimes"]] == ["uniform", "freeze", "soft"]
    assert all(path.stat().st_mtime_ns == changed for path, changed in trained.items())
    with pytest.raises(RunError, match=r"steps was 4, now 3.*--again"):
        compare(run_path, replace(QUICK, steps=3))

    # Rocks that come from a detection are those of the detection as it is now.
    open_run(run_path).finish("detect", {"rocks": list(ROCKS)})
    found = replace(QUICK, regimes=("freeze", "soft"), rocks=())
    assert compare(run_path, found).facts("compare")["rocks"] == list(ROCKS)
    open_run(run_path).finish("detect", {"rocks": list(ROCKS)[:1]})
    with pytest.raises(RunError, match=r"rocks was .* now .*--again"):
        compare(run_path, found)
    open_run(run_path).reopen("detect")  # other tests share the run


def test_losses_by_prompt_add_up_to_the_mean_and_give_it_an_interval(run_path):
    run = compare(run_path, QUICK)
    losses = open_run(run_path / "compare" / "freeze" / "seed=1").read("losses/step=4")
    rows = run.read("compare").to_pylist()
    last = next(row for row in rows if (row["regime"], row["seed"], row["step"]) == ("freeze", 1, 4))
    for own, name in (("rock", "heldout_loss_rocks"), ("rest", "heldout_loss_rest")):
        summed, positions = sum(losses[f"{own}_loss"].to_pylist()), sum(losses[f"{own}_positions"].to_pylist())
        assert last[name] == pytest.approx(summed / positions)
    problems = open_run(run_path / "compare" / "freeze" / "seed=1").read("problems/step=4")
    assert np.mean(problems["length"].to_numpy()) == pytest.approx(last["heldout_length"])
    assert np.mean(problems["truncated"].to_numpy()) == pytest.approx(last["heldout_truncated"])
    facts = run.facts("compare")
    uniform, freeze = facts["regimes"][:2]
    assert freeze["length_ratio_low"] <= freeze["length_ratio"] <= freeze["length_ratio_high"]
    assert freeze["loss_rest_low"] < freeze["loss_rest"] < freeze["loss_rest_high"]
    assert freeze["loss_rest_change"] == pytest.approx(freeze["loss_rest"] - uniform["loss_rest"])
    assert facts["before"]["loss_rest"] > 0
    assert 0 <= facts["before"]["accuracy"] <= 1


def test_further_seeds_on_another_machine_are_those_of_one_comparison(tmp_path, run_path):
    compare(run_path, QUICK)
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    open_run(tmp_path / "run").reopen("compare")
    compare(tmp_path / "run", replace(QUICK, regimes=("freeze",), seeds=1, first_seed=1))
    alone = [row for row in tables(tmp_path / "run")["compare_problems"] if row["regime"] == "freeze"]
    together = [row for row in tables(run_path)["compare_problems"] if (row["regime"], row["seed"]) == ("freeze", 1)]
    assert alone
    assert alone == together


LATE = replace(QUICK, regimes=("freeze",), seeds=1, evaluations=1, steps=2, start=4)


def test_a_comparison_starts_from_the_checkpoint_that_is_asked_for(tmp_path, run_path, capsys):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    open_run(tmp_path / "run").reopen("compare")
    run = compare(tmp_path / "run", LATE)
    assert "Regimes from the checkpoint at step 4: 2 steps, 1 seed," in capsys.readouterr().out
    assert run.facts("compare")["start"] == 4
    for regime in ("uniform", "freeze"):
        began = load_file(run.path / "compare" / regime / "seed=0" / "checkpoints" / "step=0" / "model.safetensors")
        late, early = (load_file(run.checkpoint(step) / "model.safetensors") for step in (4, 0))
        assert all(torch.equal(began[name], late[name]) for name in began)
        assert not all(torch.equal(began[name], early[name]) for name in began)
    # Trainings from another start are not taken for these.
    with pytest.raises(RunError, match=r"start was 4, now 2.*--again"):
        compare(tmp_path / "run", replace(LATE, start=2))
    with pytest.raises(ConfigError, match=r"start = 3, but .* keeps the checkpoints 0, 2, 4"):
        compare(tmp_path / "run", replace(LATE, start=3))


def test_a_late_start_at_a_higher_rate_than_the_distillation_had_there_is_warned_of(run_path, caplog):
    run = open_run(run_path)
    rates = {row["step"]: row["learning_rate"] for row in run.read("training").to_pylist()}
    assert rates[4]
    make_plan(run, replace(LATE, learning_rate=3 * rates[4]))
    assert f"had come down to a learning rate of {rates[4]:.1e} at step 4" in caplog.text
    assert f"a peak of {3 * rates[4]:.1e}" in caplog.text
    caplog.clear()
    make_plan(run, replace(LATE, learning_rate=rates[4]))
    make_plan(run, replace(LATE, start=None, learning_rate=3 * rates[4]))
    assert "learning rate" not in caplog.text


@pytest.mark.parametrize(
    ("rates", "warned"), [([0.0, 1e-6, 3e-6], False), ([3e-6, 1e-6, 0.0], True), ([None] * 3, False)]
)
def test_a_rate_that_is_warming_up_is_not_called_decayed(run_path, monkeypatch, caplog, rates, warned):
    rows = [{"step": step, "learning_rate": rate} for step, rate in zip((1, 2, 4), rates)]
    monkeypatch.setattr(Run, "read", lambda self, name: pa.Table.from_pylist(rows))
    _warn_of_a_higher_rate(open_run(run_path), 9e-6, 4)
    assert ("learning rate" in caplog.text) == warned


def test_adapters_have_no_whole_model_to_start_late_from(tmp_path, run_path):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    manifest["config"]["distill"]["lora_rank"] = 4
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"start = 4 names a checkpoint of adapters"):
        make_plan(open_run(tmp_path / "run"), LATE)


def test_compared_students_train_in_float32_though_the_pair_is_loaded_in_16_bits(tmp_path, run_path):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    manifest["config"]["pair"]["dtype"] = "bfloat16"
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    open_run(tmp_path / "run").reopen("compare")
    compare(tmp_path / "run", replace(LATE, start=None))
    trained = load_file(
        tmp_path / "run" / "compare" / "freeze" / "seed=0" / "checkpoints" / "step=2" / "model.safetensors"
    )
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}


def test_runs_that_cannot_be_compared_say_so(tmp_path, run_path):
    Run.create(tmp_path / "empty")
    with pytest.raises(RunError, match="not distilled"):
        compare(tmp_path / "empty", QUICK)
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    with pytest.raises(ConfigError, match=r"regime freeze needs a bypass list .* run `rocktokens bypass` first"):
        compare(tmp_path / "run", replace(QUICK, rocks=()))


def test_adaptive_over_too_few_steps_is_said_to_be_uniform(run_path, caplog):
    make_plan(open_run(run_path), replace(QUICK, regimes=("adaptive",), steps=101))
    assert "adaptive watches 101 steps before it freezes anything: in 101 it trains as uniform" in caplog.text
    caplog.clear()
    make_plan(open_run(run_path), replace(QUICK, regimes=("adaptive",), steps=102))
    assert "adaptive watches" not in caplog.text


def test_an_empty_list_is_said_and_the_other_regimes_are_still_planned(tmp_path, run_path, caplog):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    run = open_run(tmp_path / "run")
    run.finish("detect", {"rocks": list(ROCKS)})
    run.finish("bypass", {"ids": []})
    asked = replace(QUICK, rocks=(), regimes=("freeze", "freeze_rocks", "random"), seeds=1)
    plan = make_plan(open_run(tmp_path / "run"), asked)
    assert [regime for _, regime in plan.arms] == ["uniform", "freeze_rocks", "random"]
    assert plan.arms[0, "random"].selector.rocks == ROCKS
    assert "there is nothing for freeze to leave out: the bypass list is empty" in caplog.text
    run.finish("bypass", {"ids": list(ROCKS)[:1]})
    plan = make_plan(open_run(tmp_path / "run"), asked)
    assert {regime: config.selector.rocks for (_, regime), config in plan.arms.items() if regime != "uniform"} == {
        "freeze": ROCKS[:1],
        "freeze_rocks": ROCKS,
        "random": ROCKS[:1],
    }
    run.finish("bypass", {"ids": list(ROCKS)})
    plan = make_plan(open_run(tmp_path / "run"), asked)
    assert [regime for _, regime in plan.arms] == ["uniform", "freeze", "random"]  # not trained twice


def test_without_declared_rocks_a_definition_says_what_is_left_out(tmp_path, run_path):
    """As the paper would: the types of `context`, by rank, whatever `detect` declared."""
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    run = open_run(tmp_path / "run")
    asked = replace(QUICK, rocks=(), definition="context", regimes=("freeze", "freeze_rocks", "random"), seeds=1)
    with pytest.raises(RunError, match="definition = context needs a detection"):
        make_plan(run, asked)
    rows = [(5, 2, True), (7, 1, True), (9, None, False)]
    columns = {"token_id": [t for t, _, _ in rows], "rank_context": [r for _, r, _ in rows]}
    run.write("types", pa.table({**columns, "in_context": [chosen for _, _, chosen in rows]}))
    run.finish("detect", {"rocks": []})
    run.finish("bypass", {"ids": []})
    plan = make_plan(open_run(tmp_path / "run"), asked)
    assert [regime for _, regime in plan.arms] == ["uniform", "freeze_rocks", "random"]
    assert plan.arms[0, "freeze_rocks"].selector.rocks == plan.arms[0, "random"].selector.rocks == (7, 5)
    with pytest.raises(ConfigError, match="name one of them"):
        replace(asked, rocks=(7,))


def test_a_pair_without_rocks_is_left_out_and_says_so(tmp_path, run_path, caplog):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare"))
    run = open_run(tmp_path / "run")
    run.finish("detect", {"rocks": []})
    run.reopen("compare")  # as if no other test had compared anything in the run that this one is a copy of
    assert not compare(tmp_path / "run", replace(QUICK, rocks=())).done("compare")
    assert "detect declared no rocks" in caplog.text
    assert "there is nothing for freeze to leave out" in caplog.text
    assert "nothing to compare" in caplog.text


def test_without_answers_nothing_is_compared_and_it_says_so(run_path, tmp_path):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare*"))
    run = open_run(tmp_path / "run")
    run.manifest["config"]["prompts"] |= {"checker": "none", "pattern": None}
    run.finish("distill", run.facts("distill"))
    with pytest.raises(ConfigError, match=r"compared on accuracy, and these prompts have no answers to check"):
        compare(tmp_path / "run", QUICK)


def test_more_prompts_than_there_are_cannot_be_trained_on(run_path, tmp_path):
    shutil.copytree(run_path, tmp_path / "run", ignore=shutil.ignore_patterns("compare*"))
    with pytest.raises(ConfigError, match=r"train_prompts = 5000, but the source has \d+ prompts to train on"):
        compare(tmp_path / "run", replace(QUICK, train_prompts=5000))
