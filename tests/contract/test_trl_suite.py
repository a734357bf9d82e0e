"""What TRL's own tests of its DistillationTrainer cover, with our class: a TRL release that breaks us is seen here.

Resume both ways between stock and ours, PEFT, accumulation, forms of datasets, evaluation, tools, streaming.
`make contract-newest` runs this directory against the newest TRL of the package index.
"""

from __future__ import annotations

import copy

import distilling
import pytest
import torch
from datasets import Dataset, DatasetDict
from distilling import made
from made_once import made_once
from peft import LoraConfig
from transformers import TrainerCallback
from trl import DistillationTrainer

from rocktokens import RockDistillationTrainer

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w9 ' }}{% endif %}"
)
KINDS = {"stock": DistillationTrainer, "ours": RockDistillationTrainer}


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=True)
# What a stock script may hand over → settings of both trainers. Those without a stock run of their own train what
# "standard" trains, so ours is held against its losses.
FORMS: dict[str, dict] = {
    "standard": {},
    "more columns": {"data": distilling.dataset().add_column("difficulty", list(range(64)))},
    "one pass": {"arguments": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}},
    "eight passes": {"arguments": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}},
    "conversational": {"chat": True},
    "stream": {"data": distilling.dataset().to_iterable_dataset()},
    "adapters": {"peft_config": ADAPTER},
    "six steps, a second epoch": {"arguments": {"max_steps": 6}},
}
OWN_STOCK = ("standard", "conversational", "stream", "adapters", "six steps, a second epoch")
LOGGED = ("loss", "grad_norm", "entropy", "num_tokens", "completions/mean_length", "learning_rate")


def form(kind, path, name: str):
    """A trainer of the given class after training on one of the forms."""
    settings = dict(FORMS[name])
    args, tokenizer = distilling.arguments(path, **settings.pop("arguments", {})), distilling.tokenizer()
    if settings.pop("chat", False):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = TEMPLATE
        texts = distilling.dataset()["prompt"]
        settings["data"] = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])
    trainer = made(path, kind, args=args, processing_class=tokenizer, **settings)
    before = {key: own.detach().clone() for key, own in trainer.model.named_parameters()}
    trainer.train()
    moved = {key for key, own in trainer.model.named_parameters() if not torch.equal(before[key], own)}
    return trainer, moved


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """What stock TRL logs for a form, trained once per session."""

    def make(folder):
        return {
            name: form(DistillationTrainer, folder / str(i), name)[0].state.log_history
            for i, name in enumerate(OWN_STOCK)
        }

    return made_once(tmp_path_factory, "stock-trl", make)[1]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_stock_script_trains_what_stock_trains(tmp_path, stock, name):
    trainer, moved = form(RockDistillationTrainer, tmp_path, name)
    theirs = stock[name if name in OWN_STOCK else "standard"]
    assert len(trainer.state.log_history) == len(theirs)
    compared = LOGGED if name in OWN_STOCK else ("loss",)
    for mine, their in zip(trainer.state.log_history, theirs):
        for key in compared:
            if key in their:
                assert mine[key] == pytest.approx(their[key], rel=1e-4), key
    assert moved
    assert name != "adapters" or all("lora_" in key for key in moved)


class StopAfterTwo(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= 2


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


def test_a_tools_output_carries_no_loss_and_a_step_of_nothing_else_is_a_step_of_loss_zero(tmp_path):
    """TRL's tool loop marks what a tool wrote; those tokens must not reach the loss, the record or the telemetry."""

    def with_tool(kind):
        class WithTool(kind):
            def _generate(self, prompts):
                found = list(super()._generate(prompts))
                wrote = range(99) if self.state.global_step == 1 else (1, 2)
                found[2] = [[int(place not in wrote) for place in range(len(ids))] for ids in found[1]]
                return tuple(found)

        return WithTool

    trainers = []
    for kind in KINDS.values():  # one after the other: both draw from the seed that is set when a trainer is made
        trainers.append(made(tmp_path, with_tool(kind)))
        trainers[-1].train()
    stock, ours = trainers
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-4)
    assert losses(ours)[1] == 0.0
    row = ours.record.rows[1]
    assert (row["loss"], row["tokens"], row["kept_share"]) == (0.0, 0, 0.0)
    positions = set(ours.grid.batch.position_N.tolist())
    assert 0 in positions
    assert not {1, 2} & positions


def test_completions_are_logged_to_parquet(tmp_path):
    import pyarrow.parquet as pq

    args = distilling.arguments(tmp_path, log_completions=True, max_steps=1)
    made(tmp_path, args=args).train()
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet")
    assert {"step", "prompt", "completion"} <= set(table.column_names)
    assert len(table) == 16
