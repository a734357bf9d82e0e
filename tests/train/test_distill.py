"""Distillation into a run: null tests, exact weights, both stages, what is written, what is refused, what survives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import distilling
import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from tiny import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocktokens import RockDistillationTrainer, make_selector
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.select.settings import SelectorConfig
from rocktokens.settings import from_mapping
from rocktokens.tables import OCCURRENCES, TABLES
from rocktokens.train.checkpoints import _load_resume_file, last_complete_checkpoint
from rocktokens.train.distill import distill
from rocktokens.train.record import account_table
from rocktokens.train.settings import DistillConfig, OffPolicyConfig
from rocktokens.train.teacher import LocalTeacher
from rocktokens.train.trainer import OffPolicyTrainer, _head_in_full

ROCKS = (5, 6, 7, 8, 9, 10, 11, 12)
SMALL = {"steps": 6, "prompts_per_step": 4, "rollouts_per_prompt": 2, "max_new_tokens": 8, "learning_rate": 1e-3}
SMALL |= {"keep": 2, "telemetry_every": 3, "evaluate_every": 3}


def small(**settings) -> DistillConfig:
    return DistillConfig(**{**SMALL, **settings})


def distilled(path: Path, config: DistillConfig | None = None, *, pair=None, **settings):
    check = lambda text, answer: answer in text  # noqa: E731
    settings = {"problems": distilling.prompts(12), "check": check, "rocks": ROCKS, "show": False, **settings}
    run, prompts = Run.create(path, {}), distilling.prompts()
    return distill(config or small(), pair or distilling.pair(), prompts, run, **settings), run


# Null tests


def test_a_teacher_identical_to_the_student_gives_no_loss_no_drift_and_one_alarm(tmp_path, caplog):
    models = (distilling.student(), distilling.student())
    args = distilling.arguments(tmp_path, max_steps=12, optim="sgd", learning_rate=1.0, max_grad_norm=0.0)
    trainer = distilling.trained(tmp_path, args=args, models=models)
    assert max(row["loss"] for row in trainer.record.rows) < 1e-6
    assert distilling.furthest(distilling.parameters(trainer), distilling.parameters(distilling.student())) < 1e-5
    assert caplog.text.count(", floor: ") == 1  # it holds at steps 10 to 12
    assert [row.get("alarm_floor") for row in trainer.record.rows] == [None] * 9 + [1] * 3


def test_lambda_one_equals_uniform_bit_for_bit(tmp_path):
    runs = [make_selector("uniform"), make_selector("soft", rocks=ROCKS, lam=1.0)]
    first, second = (distilling.trained(tmp_path, selector=selector, generation="ours") for selector in runs)
    assert distilling.furthest(distilling.parameters(first), distilling.parameters(second)) == 0
    assert [row["loss"] for row in first.record.rows] == [row["loss"] for row in second.record.rows]


# Exact weights


def divergence(kind, log_p, log_q):
    """The definition, row by row; todi's mixing weights carry no gradient."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "todi":
        alpha = torch.sigmoid((log_q - log_p).detach())
        return (alpha * q * (log_q - log_p) + (1 - alpha) * p * (log_p - log_q)).sum(-1)
    return (p * (log_p - ((0.1 * p + 0.9 * q).log() if kind == "srkl" else log_q))).sum(-1)


def by_autograd(rows, loss_of, denominator):
    """Gradient and loss of a step on full logits, row by row; `loss_of` has both models' log-probabilities."""
    student, teacher = distilling.student(), distilling.teacher()
    total = 0.0
    for prompt, completion in rows:
        ids = torch.cat([prompt, completion])[None]
        mine, theirs = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (student, teacher))
        total = total + loss_of(mine, theirs.detach(), completion)
    (total / denominator).backward()
    gradient = {name: parameter.grad for name, parameter in student.named_parameters()}
    return gradient, float(total.detach()) / denominator


def assert_step(trainer, gradient, wanted, loss):
    size = max(float(own.abs().max()) for own in wanted.values())
    assert distilling.furthest(gradient, wanted) < 1e-4 * size
    assert trainer.record.rows[0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "lam", "normalise"),
    [
        *((None, lam, normalise) for lam in (0.0, 0.3) for normalise in ("kept", "all")),
        ("todi", 1.0, "kept"),
        ("srkl", 1.0, "kept"),
    ],
)
def test_weighted_loss_and_gradient_equal_full_logits(tmp_path, kind, lam, normalise):
    selector = make_selector("soft", rocks=ROCKS, lam=lam)
    trainer, gradient = distilling.one_step(
        tmp_path, selector=selector, normalise=normalise, kind=kind, generation="ours"
    )
    texts = [
        (prompt[seen.bool()], completion[kept.bool()])
        for inputs in trainer._buffered_inputs
        for prompt, seen, completion, kept in zip(
            *(inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
        )
    ]
    weigh = lambda token: torch.where(torch.isin(token, torch.tensor(ROCKS)), lam, 1.0)  # noqa: E731
    denominator = sum(float(weigh(own).sum()) if normalise == "kept" else len(own) for _, own in texts)
    expected = by_autograd(texts, lambda p, q, token: (divergence(kind, p, q) * weigh(token)).sum(), denominator)
    assert_step(trainer, gradient, *expected)
    row = trainer.record.rows[0]
    assert row["kept_share"] < 1 if lam == 0 else row["kept_share"] == 1
    assert row["ceiling"] == pytest.approx(1 / row["kept_share"])


def test_prefix_really_stops_the_rollouts_there(tmp_path):
    for generation in ("ours", "trl"):
        prefix = make_selector("prefix", keep=0.25)
        trainer, _ = distilling.one_step(tmp_path, selector=prefix, generation=generation)
        assert trainer._buffered_inputs[0]["completion_ids"].shape[1] == 3  # a quarter of 12
        assert trainer.record.rows[0]["tokens"] <= 3 * 16


def test_selectors_that_need_losses_pay_for_them_on_the_meter(tmp_path):
    entropy = make_selector("entropy", keep=0.25)
    trainer, _ = distilling.one_step(tmp_path, selector=entropy, rocks=ROCKS, generation="ours")
    row = trainer.record.rows[0]
    assert row["kept_share"] == pytest.approx(0.25, abs=0.01)
    assert row["seconds_select"] > row["seconds_head"]
    assert row["flops_select"] > 0
    assert {"loss_rocks", "loss_rest"} <= row.keys()  # measured already, kept or not


def test_rollouts_in_mixed_precision_come_from_the_policy_that_is_trained():
    """Logits rounded to bfloat16 are another policy than the one whose loss is taken; the head is not rounded."""
    model, token_BT = distilling.student(), torch.tensor([[5, 6, 7]])
    layer = model.get_output_embeddings()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden_BTH = model.model(token_BT).last_hidden_state
        rounded = model(token_BT).logits.float()
        with _head_in_full(model):
            found = model(token_BT).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, hidden_BTH.float() @ layer.weight.T)
    assert (found - rounded).abs().max() > 1e-3
    assert "forward" not in vars(layer)


# Into a run


def test_a_run_holds_what_was_promised(tmp_path):
    found, run = distilled(tmp_path / "run", small(shadows=("freeze", "divergence")))
    table = run.read("training")
    assert table["step"].to_pylist() == list(range(7))
    assert {column.name for column in TABLES["training"].columns} <= set(table.column_names)
    rows = table.to_pylist()
    assert [row["step"] for row in rows if row["accuracy"] is not None] == [0, 3, 6]
    assert all(row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] for row in (rows[0], rows[3]))
    for row in rows[1:]:
        assert row["loss"] > 0
        assert row["loss_rocks"] > 0
        stages = [
            row[f"seconds_{stage}"] for stage in ("rollout", "teacher", "student", "head", "optimiser", "telemetry")
        ]
        assert all(seconds > 0 for seconds in stages)
        assert sum(stages) <= row["seconds"] * 1.001
        assert row["shadow_kept_freeze"] == pytest.approx(row["overlap_uniform_freeze"])
        assert row["shadow_kept_divergence"] == pytest.approx(0.5, abs=0.02)
        assert "overlap_freeze_divergence" in row

    # Occurrences of steps 3 and 6: every position once, the mean of kl is the loss that was trained on.
    for step in (3, 6):
        query = f"select * from read_parquet('{run.path}/telemetry/step={step}/*.parquet')"
        occurrences = run.query(query)
        assert occurrences.schema.names[: len(OCCURRENCES.names)] == OCCURRENCES.names
        assert len(occurrences) == rows[step]["tokens"]
        assert np.mean(occurrences["kl"].to_numpy()) == pytest.approx(rows[step]["loss"], rel=1e-5)
        assert set(occurrences["prompt_id"].to_pylist()) <= {f"p{i}" for i in range(64)}

    assert run.checkpoints() == [0, 3, 6]
    loaded = [AutoModelForCausalLM.from_pretrained(run.checkpoint(step)) for step in (0, 6)]
    assert distilling.furthest(distilling.parameters(loaded[0]), distilling.parameters(distilling.student())) == 0
    assert distilling.furthest(distilling.parameters(loaded[1]), distilling.parameters(found.student)) == 0
    assert AutoTokenizer.from_pretrained(run.checkpoint(6)).get_vocab() == distilling.tokenizer().get_vocab()
    assert not list(run.path.glob("checkpoints/step=*/*.bin"))  # no pickles for others to load

    assert found.facts["steps"] == 6
    json.dumps(found.facts, allow_nan=False)
    assert "6 steps" in account_table("x", found.record.summary()).caption[0]


def test_frozen_rocks_are_measured_when_occurrences_are_recorded_and_only_then(tmp_path):
    found, run = distilled(tmp_path / "run", small(selector=SelectorConfig(name="freeze")))
    rows = run.read("training").to_pylist()
    assert [row["step"] for row in rows if row["loss_rocks"] is not None] == [3, 6]
    assert all(row["loss_rest"] == pytest.approx(row["loss"], rel=1e-5) for row in rows[1:])
    query = (
        f"select count(*) n, sum((token_id in {ROCKS})::int) rocks from read_parquet('{run.path}/telemetry/step=3/*')"
    )
    counted = run.query(query).to_pylist()[0]
    assert counted["n"] == rows[3]["tokens"]
    assert counted["rocks"] == round((1 - rows[3]["kept_share"]) * rows[3]["tokens"])
    # And the extra measuring changes nothing in training.
    plain, _ = distilled(tmp_path / "plain", small(selector=SelectorConfig(name="freeze"), telemetry_every=None))
    assert distilling.furthest(distilling.parameters(found.student), distilling.parameters(plain.student)) == 0


def test_lora_trains_and_only_its_adapter_is_saved(tmp_path):
    found, run = distilled(tmp_path / "run", small(lora_rank=4))
    assert isinstance(found.student, PeftModel)
    names = {path.name for path in run.checkpoint(6).iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    base = distilling.student()
    loaded = PeftModel.from_pretrained(base, run.checkpoint(6))
    moved = [p.abs().max() for name, p in loaded.named_parameters() if "lora_B" in name]
    assert max(moved) > 0
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(ids).logits, found.student.eval()(ids).logits)


def test_rocks_and_rest_go_to_the_tracker_that_is_named(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    found, _ = distilled(tmp_path / "run", small(steps=3, report_to=("tensorboard",)), problems=())
    board = events.EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    board.Reload()
    for series, column in (("rocks/loss", "loss_rocks"), ("rest/loss", "loss_rest"), ("kept_share", "kept_share")):
        logged = board.Scalars(f"train/{series}")
        assert [event.step for event in logged] == [1, 2, 3]
        assert [event.value for event in logged] == pytest.approx([row[column] for row in found.record.rows], rel=1e-4)


def test_a_trainers_run_names_its_pair_prompts_and_tokenizer(tmp_path):
    loaded, data = (distilling.student(), distilling.teacher()), distilling.dataset()
    named = {
        name: save_model(tmp_path / name, model, distilling.tokenizer())
        for name, model in zip(("student", "teacher"), loaded)
    }

    def config(name: str, models=(named["student"], named["teacher"]), data=data, **described) -> dict:
        run = Run.create(tmp_path / name, described)
        distilling.made(tmp_path / "out", models=models, data=data, run=run)
        return open_run(tmp_path / name).manifest["config"]

    made = config("run")
    assert from_mapping(PairConfig, made["pair"]) == PairConfig(**named)
    source = from_mapping(PromptsConfig, made["prompts"]).source
    assert [json.loads(line)["prompt"] for line in Path(source).read_text().splitlines()] == data["prompt"]
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").exists()
    assert "float32" in made["trainer"]["precision"]
    assert config("described", pair=named) == {"pair": named}  # what a run says already stays
    unnamed = config("unnamed", loaded, data.to_iterable_dataset())
    assert not {"pair", "prompts"} & unnamed.keys()  # a stream is not read for this


# Off-policy


def test_off_policy_loss_and_gradient_are_half_forward_kl_and_half_cross_entropy(tmp_path):
    answers = [[*range(3 + i, 9 + i), distilling.EOS] for i in range(16)]
    rows = [{"prompt": list(p.prompt_ids), "completion": a} for p, a in zip(distilling.prompts(16), answers)]
    trainer, gradient = distilling.one_step(tmp_path, trainer=OffPolicyTrainer, data=Dataset.from_list(rows))
    texts = [(torch.tensor(row["prompt"]), torch.tensor(row["completion"])) for row in rows]

    def loss_of(mine, theirs, token):
        forward = (theirs.exp() * (theirs - mine)).sum(-1)
        return 0.5 * forward.sum() - 0.5 * mine.gather(1, token[:, None]).sum()

    wanted, loss = by_autograd(texts, loss_of, sum(len(own) for _, own in texts))
    assert_step(trainer, gradient, wanted, loss)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-4)


def test_both_stages_in_one_run_and_the_first_is_not_repeated(tmp_path):
    config = small(off_policy=OffPolicyConfig(answers=32, batch=8, learning_rate=1e-3, epochs=2))
    found, run = distilled(tmp_path / "run", config)
    answers = run.read("teacher_answers")
    assert len(answers) == 32
    assert run.read("off_policy")["step"].to_pylist() == list(range(1, 9))
    # OPD starts from what the first stage left.
    start = AutoModelForCausalLM.from_pretrained(run.checkpoint(0))
    first = AutoModelForCausalLM.from_pretrained(run.path / "checkpoints" / "off_policy")
    assert distilling.furthest(distilling.parameters(start), distilling.parameters(first)) == 0
    assert distilling.furthest(distilling.parameters(start), distilling.parameters(distilling.student())) > 1e-4
    # Killed after the first stage: its weights and answers are taken from the run.
    for name in (".resume", "step=0", "step=3", "step=6"):
        shutil.rmtree(run.path / "checkpoints" / name)
    again, _ = distilled(tmp_path / "run", config)
    assert run.read("teacher_answers") == answers
    assert distilling.furthest(distilling.parameters(found.student), distilling.parameters(again.student)) == 0


# What is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rocks": [3, 64]}, "rock id .64"),
        ({"shadows": [make_selector("entropy"), make_selector("entropy", keep=0.1)]}, "share a name"),
        ({"normalise": "most"}, "normalise"),
        ({"kind": "todi", "run": True, "telemetry_every": 5}, "reverse KL"),
        ({"rollouts_per_prompt": 5}, "cannot be divided"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(tmp_path, settings, says):
    args = distilling.arguments(tmp_path, **({"min_p": settings.pop("min_p")} if "min_p" in settings else {}))
    settings = {**settings, "run": Run.create(tmp_path / "run")} if "run" in settings else settings
    with pytest.raises(ConfigError, match=says):
        distilling.trained(tmp_path, args=args, **{"generation": "ours", **settings})


def test_zero_3_is_refused_and_its_lower_stages_are_not():
    """What of a trainer decides; sharding itself needs several devices."""
    plugin = SimpleNamespace(zero_stage=2)
    trainer = SimpleNamespace(
        is_deepspeed_enabled=True,
        args=SimpleNamespace(deepspeed_plugin=plugin),
        teacher_model=distilling.teacher(),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
    )
    assert LocalTeacher(trainer).rows == distilling.VOCABULARY
    plugin.zero_stage = 3
    with pytest.raises(ConfigError, match=r"ZeRO-3.*--servers\.teacher"):
        LocalTeacher(trainer)


def test_a_keyword_of_version_02_names_its_new_place(tmp_path):
    with pytest.raises(ConfigError, match=r"options=RockOptions\(telemetry_every"):
        RockDistillationTrainer(distilling.student(), distilling.teacher(), telemetry_every=5)


def test_a_run_of_another_model_or_selector_or_with_too_few_prompts_is_refused(tmp_path):
    distilled(tmp_path / "run")
    for config, pair, says in (
        (small(), distilling.pair(distilling.model(0, width=48)), "hidden_size"),
        (small(selector=SelectorConfig(name="freeze")), None, "selector uniform"),
        (small(prompts_per_step=65), None, "prompts_per_step"),
    ):
        with pytest.raises((RunError, DataError), match=says):
            distilled(tmp_path / "run", config, pair=pair)


def test_half_written_checkpoints_are_passed_over(tmp_path):
    for step, text in ((5, '{"global_step": 5}'), (10, '{"global_st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-15").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-5"
    assert last_complete_checkpoint(tmp_path / "none") is None
    with pytest.raises(RunError, match="no complete checkpoint"):
        distilling.made(tmp_path / "empty").train(resume_from_checkpoint=True)


def test_resume_files_are_tensors_or_refused(tmp_path):
    torch.save({"step": torch.tensor(1)}, tmp_path / "optimizer.pt")
    assert _load_resume_file(tmp_path / "optimizer.pt")["step"] == 1
    torch.save({"evil": PurePosixPath("x")}, tmp_path / "optimizer.pt")
    (tmp_path / "rng_state.pth").write_bytes(b"PK\x03\x04 cut")
    for name in ("optimizer.pt", "rng_state.pth"):
        with pytest.raises(RunError, match="damaged"):
            _load_resume_file(tmp_path / name)
