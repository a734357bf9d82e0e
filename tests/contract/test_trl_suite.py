"""What TRL's own tests of its DistillationTrainer cover, with our class: a TRL release that breaks us is seen here.

Callbacks, resume both ways between stock and ours, PEFT, accumulation, forms of datasets, evaluation, tools, streaming.
`make contract-newest` runs this directory against the newest TRL of the package index.
"""

from __future__ import annotations

import distilling
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from transformers import TrainerCallback
from trl import DistillationTrainer

from rocktokens import RockDistillationTrainer

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w9 ' }}{% endif %}"
)
KINDS = {"stock": DistillationTrainer, "ours": RockDistillationTrainer}


def made(path, kind=RockDistillationTrainer, data=None, args=None, **settings):
    settings = {"processing_class": distilling.tokenizer(), **settings}
    args = args or distilling.arguments(path)
    data = data if data is not None else distilling.dataset()
    return kind(distilling.student(), distilling.teacher(), args, data, **settings)


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def both(path, **settings):
    """Losses of stock and of ours, each trained from the same start."""
    found = []
    for kind in KINDS.values():
        trainer = made(path, kind, **settings)
        trainer.train()
        found.append(losses(trainer))
    return found


def chatting(data: list[str]) -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in data])


class Count(TrainerCallback):
    def __init__(self):
        self.events: list[str] = []

    def on_train_begin(self, *_, **__):
        self.events.append("begin")

    def on_step_end(self, *_, **__):
        self.events.append("step")

    def on_log(self, args, state, control, logs=None, **_):
        self.events += ["log"] if "loss" in logs else []

    def on_train_end(self, *_, **__):
        self.events.append("end")


class StopAfterTwo(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= 2


def test_callbacks_see_every_event_in_stocks_order(tmp_path):
    seen = {}
    for name, kind in KINDS.items():
        callback = Count()
        made(tmp_path, kind, callbacks=[callback]).train()
        seen[name] = callback.events
    assert seen["ours"] == seen["stock"]
    assert seen["ours"].count("step") == 3


def test_a_callback_can_stop_training(tmp_path):
    trainer = made(tmp_path, callbacks=[StopAfterTwo()])
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(("first", "second"), [("stock", "ours"), ("ours", "stock")])
def test_a_run_begun_by_one_class_is_resumed_by_the_other(tmp_path, first, second):
    args = distilling.arguments(tmp_path / "both", save_strategy="steps", save_steps=1)
    made(tmp_path, KINDS[first], args=args, callbacks=[StopAfterTwo()]).train()
    resumed = made(tmp_path, KINDS[second], args=args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "both" / "checkpoint-2"))
    whole = made(tmp_path, args=distilling.arguments(tmp_path / "whole"))
    whole.train()
    assert resumed.state.global_step == 3
    assert losses(resumed) == pytest.approx(losses(whole), rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_and_the_base_does_not(tmp_path, kind):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = made(tmp_path, KINDS[kind], peft_config=adapter)
    before = {name: own.detach().clone() for name, own in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, own in trainer.model.named_parameters() if not torch.equal(before[name], own)}
    assert moved
    assert all("lora_" in name for name in moved)


def test_adapters_give_stocks_losses(tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=True)
    stock, ours = both(tmp_path, peft_config=adapter)
    assert ours == pytest.approx(stock, rel=1e-4)


def test_what_trl_refuses_of_peft_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lm_head"):
        made(tmp_path, peft_config=LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize(("size", "passes"), [(16, 1), (8, 2), (2, 8)])
def test_accumulation_changes_nothing(tmp_path, size, passes):
    args = distilling.arguments(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=passes)
    stock, ours = both(tmp_path, args=args)
    assert ours == pytest.approx(stock, rel=1e-4)


@pytest.mark.parametrize("form", ["standard", "conversational", "more columns"])
def test_forms_of_datasets(tmp_path, form):
    tokenizer = distilling.tokenizer()
    texts = distilling.dataset()["prompt"]
    data = distilling.dataset()
    if form == "conversational":
        data, own = chatting(texts), tokenizer.chat_template
        tokenizer.chat_template = TEMPLATE
    elif form == "more columns":
        data = data.add_column("difficulty", list(range(len(texts))))
    try:
        stock, ours = both(tmp_path, data=data)
    finally:
        if form == "conversational":
            tokenizer.chat_template = own
    assert ours == pytest.approx(stock, rel=1e-4)


def test_streams(tmp_path):
    stock, ours = both(tmp_path, data=distilling.dataset().to_iterable_dataset())
    assert len(ours) == 3
    assert ours == pytest.approx(stock, rel=1e-4)


@pytest.mark.parametrize("several", [False, True])
def test_evaluation_while_training_and_by_itself(tmp_path, several):
    data = distilling.dataset(8)
    data = DatasetDict({"one": data, "two": data}) if several else data
    args = distilling.arguments(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    found = {}
    for name, kind in KINDS.items():
        trainer = made(tmp_path, kind, eval_dataset=data, args=args)
        trainer.train()
        key = "eval_one_loss" if several else "eval_loss"
        found[name] = [row[key] for row in trainer.state.log_history if key in row]
    assert found["ours"] == pytest.approx(found["stock"], rel=1e-4)
    assert not several or "eval_two_loss" in trainer.evaluate()


def test_a_tools_output_carries_no_loss(tmp_path):
    """TRL's tool loop marks what a tool wrote; those tokens must not reach the loss, the record or the telemetry."""

    def with_tool(kind):
        class WithTool(kind):
            def _generate(self, prompts):
                found = list(super()._generate(prompts))
                found[2] = [[1, 0, 0, *([1] * (len(ids) - 3))][: len(ids)] for ids in found[1]]
                return tuple(found)

        return WithTool

    results = []
    for kind in KINDS.values():
        trainer = made(tmp_path, with_tool(kind))
        trainer.train()
        results.append(losses(trainer))
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    positions = set(trainer.grid.batch.position_N.tolist())
    assert 0 in positions
    assert not {1, 2} & positions


def test_a_template_without_tools_is_refused_as_in_trl(tmp_path):
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    for kind in KINDS.values():
        with pytest.raises((ValueError, ImportError), match="tool"):
            made(tmp_path, kind, tools=[add])


def test_completions_are_logged_to_parquet(tmp_path):
    import pyarrow.parquet as pq

    args = distilling.arguments(tmp_path, log_completions=True, max_steps=1)
    made(tmp_path, args=args).train()
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet")
    assert {"step", "prompt", "completion"} <= set(table.column_names)
    assert len(table) == 16


def test_models_are_saved_and_load_again(tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = made(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert distilling.furthest(distilling.parameters(again), distilling.parameters(trainer)) == 0
