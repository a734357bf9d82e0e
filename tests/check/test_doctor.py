"""`rocktokens doctor`: every check on a case that has the fault and on one that has not."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import distilling
import dumps
import numpy as np
import pyarrow as pa
import pytest
import tiny_smollm2
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rocktokens import Run
from rocktokens.check import doctor_pair, doctor_probe, doctor_prompts, doctor_run
from rocktokens.check.doctor import Probe, doctor
from rocktokens.check.doctor_pair import Side
from rocktokens.interop.import_ import import_dump
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.settings import RolloutConfig

QUICK = Probe(prompts=0, learning_rate=2e-6)


def side(tokenizer=None, *, ends=None, rows=400, **generation) -> Side:
    tokenizer = tokenizer or tiny_smollm2.chat_tokenizer()
    ends = ends if ends is not None else tokenizer.eos_token_id
    config = Qwen2Config(vocab_size=rows, eos_token_id=ends, hidden_size=32, num_attention_heads=2)
    return Side("model", tokenizer, config, GenerationConfig(eos_token_id=ends, **generation))


def with_template(change) -> Side:
    tokenizer = tiny_smollm2.chat_tokenizer()
    tokenizer.chat_template = change(tokenizer.chat_template)
    return side(tokenizer)


def status(finding) -> str:
    assert finding.number or finding.status == "not checked"
    assert finding.sentence
    assert bool(finding.remedy) or finding.status != "wrong"
    return finding.status


# The pair


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        (side(), side(), "fine"),
        (side(ends=[2, 0]), side(ends=[0, 2]), "fine"),
        (side(), side(ends=[2, 0]), "wrong"),  # the teacher also ends with another token
        (side(ends=0), side(ends=0), "wrong"),  # the generation config lacks the tokenizer's
        (
            with_template(lambda text: text.replace("<|im_end|>", "<|im_start|>")),
            side(),
            "wrong",
        ),  # the template's turn
    ],
)
def test_end_tokens(student, teacher, expected):
    assert status(doctor_pair.end_tokens(student, teacher)) == expected


def test_a_template_that_ends_a_turn_with_another_token_is_named():
    found = doctor_pair.end_tokens(
        with_template(lambda text: text.replace("<|im_end|>", "<|endoftext|>")),
        with_template(lambda text: text.replace("<|im_end|>", "<|endoftext|>")),
    )
    assert "chat template ends a turn with <|endoftext|>" in found.sentence


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text, "fine"),
        (lambda text: text + "{# a comment #}", "note"),
        (lambda text: text.replace("message['role']", "message['role'] | upper"), "wrong"),
        (lambda text: None, "wrong"),
        (lambda text: text + "{% if tools %}{{ tools | length }}{% endif %}", "wrong"),
    ],
)
def test_chat_templates(change, expected):
    found = doctor_pair.chat_template(side(), with_template(change))
    assert status(found) == expected
    if "character" in found.number:
        assert "student …" in found.sentence


def test_models_without_templates_are_fine():
    bare = side(distilling.tokenizer(), ends=1, rows=64)
    assert status(doctor_pair.chat_template(bare, bare)) == "fine"


def test_tokenizers():
    assert status(doctor_pair.tokenizers(side(), side())) == "fine"
    other = side(distilling.tokenizer(), ends=1, rows=64)
    found = doctor_pair.tokenizers(side(), other)
    assert status(found) == "wrong"
    assert "Id 0 is '<|endoftext|>' for the student and '<pad>'" in found.sentence


def test_round_trip():
    assert status(doctor_pair.round_trip(side())) == "fine"
    from tokenizers import normalizers

    tokenizer = tiny_smollm2.chat_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("x")  # one letter more at every tokenisation
    assert status(doctor_pair.round_trip(side(tokenizer))) == "wrong"


@pytest.mark.parametrize(("rows", "expected"), [((400, 400), "fine"), ((400, 448), "note"), ((400, 300), "wrong")])
def test_vocabulary_padding(rows, expected):
    assert status(doctor_pair.vocabulary(*(side(rows=own) for own in rows))) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "fine"),
        ({"temperature": 0.7}, "wrong"),
        ({"top_p": 0.9}, "wrong"),
        ({"top_k": 20}, "wrong"),
        ({"top_p": 1.0}, "fine"),
    ],
)
def test_sampling_settings_against_scoring(settings, expected):
    assert status(doctor_pair.sampling(RolloutConfig(**settings))) == expected


def test_generation_defaults_that_an_engine_would_take():
    assert status(doctor_pair.generation_defaults(side())) == "fine"
    found = doctor_pair.generation_defaults(side(temperature=0.7, top_p=0.8, repetition_penalty=1.1, do_sample=True))
    assert status(found) == "note"
    assert "temperature 0.7" in found.sentence


# Prompts


def prompts(count, text="{} + {} =", answer=lambda a, b: str(a + b)):
    rng = np.random.default_rng(0)
    rows = [(int(a), int(b)) for a, b in rng.integers(100, 999, (count, 2))]
    return [Prompt(f"p{i}", (1,), text.format(a, b), answer(a, b)) for i, (a, b) in enumerate(rows)]


def test_answers_in_prompts():
    assert status(doctor_prompts.answers_in_prompts(prompts(200))) == "fine"
    leaking = [replace(prompt, text=f"{prompt.text} (answer: {prompt.answer})") for prompt in prompts(200)]
    assert status(doctor_prompts.answers_in_prompts(leaking)) == "wrong"
    choice = [replace(prompt, text="A, B, C or D?", answer="ABCD"[i % 4]) for i, prompt in enumerate(prompts(200))]
    assert status(doctor_prompts.answers_in_prompts(choice)) == "fine"  # every prompt holds every answer
    assert status(doctor_prompts.answers_in_prompts(prompts(3))) == "not checked"


def test_duplicates():
    assert status(doctor_prompts.duplicates({"train": ["a", "b"], "detection": ["c"]})) == "fine"
    found = doctor_prompts.duplicates({"train": ["What is 1?", "b"], "detection": ["what  is 1?"]})
    assert status(found) == "wrong"
    assert "train and detection" in found.sentence
    assert status(doctor_prompts.duplicates({"train": ["a", "a", "b"], "detection": ["c"]})) == "note"


def test_enough_prompts():
    assert status(doctor_prompts.enough(200, 200)) == "fine"
    assert status(doctor_prompts.enough(20, 200)) == "wrong"


def test_answers_that_the_checker_cannot_read(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"w{3 + i % 60} w{3 + i // 60}", "answer": "nobody knows" if i % 2 else "7"} for i in range(400)]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = PromptsConfig(source=str(file), checker="math")
    assert status(doctor_prompts.prompt_findings(config, distilling.tokenizer())[0]) == "wrong"
    file.write_text("\n".join(json.dumps(row | {"answer": "7"}) for row in rows))
    assert status(doctor_prompts.prompt_findings(config, distilling.tokenizer())[0]) == "fine"


# With the models


def answered(right: int, count: int = 100):
    return [doctor_probe._Answer((3,) if i < right else (4,), True) for i in range(count)]


@pytest.mark.parametrize(("student", "teacher", "expected"), [(20, 80, "fine"), (80, 20, "wrong"), (50, 52, "note")])
def test_teacher_ahead(student, teacher, expected):
    asked = [Prompt(f"p{i}", (1,), "", "w3") for i in range(100)]
    answers = {"student": answered(student), "teacher": answered(teacher)}
    found = doctor_probe.teacher_ahead(asked, answers, distilling.tokenizer(), lambda text, answer: text == answer)
    assert status(found) == expected
    assert "[" in found.number
    assert status(doctor_probe.teacher_ahead(asked, answers, distilling.tokenizer(), None)) == "not checked"


def test_length_limit():
    assert status(doctor_probe.length_limit([False] * 30 + [True] * 2, 64)) == "fine"
    assert status(doctor_probe.length_limit([False] * 10 + [True] * 22, 64)) == "wrong"


def test_learning_rate_against_the_resolution_of_the_weights():
    model = distilling.student()
    assert status(doctor_probe.learning_rate(model, 2e-6)) == "fine"
    assert status(doctor_probe.learning_rate(model.bfloat16(), 2e-6)) == "wrong"
    assert status(doctor_probe.learning_rate(model.bfloat16(), 1e-1)) == "fine"


def test_top_k_loss():
    teacher, student = (distilling.teacher(tie_word_embeddings=False) for _ in range(2))
    with torch.no_grad():  # a student that is surer than its teacher of the teacher's first choice
        student.get_output_embeddings().weight *= 3
    pair = distilling.pair(student, teacher)
    asked = distilling.prompts(6)
    answers = [doctor_probe._Answer((5, 9, 11, 1), True) for _ in asked]
    assert status(doctor_probe.top_k_loss(pair, asked, answers, None)) == "not checked"
    assert status(doctor_probe.top_k_loss(pair, asked, answers, 64)) == "fine"  # the whole vocabulary is never negative
    assert status(doctor_probe.top_k_loss(pair, asked, answers, 1)) == "wrong"


def test_a_server_of_other_weights_is_found(monkeypatch):
    from rocktokens.servers import probe

    local = (-1.0, -2.0, -0.5)
    monkeypatch.setattr(probe, "own_logprobs", lambda *_: local)
    servers = SimpleNamespace(teacher=("http://127.0.0.1:1",))
    monkeypatch.setattr("rocktokens.servers.pool.ServerPool", FakePool)
    for shift, expected in ((0.01, "fine"), (0.3, "wrong")):
        monkeypatch.setattr(probe, "served_logprobs", lambda *_, shift=shift: tuple(v - shift for v in local))
        found = doctor_probe.server(PairConfig(teacher="x"), distilling.tokenizer(), 64, servers)
        assert status(found) == expected


class FakePool:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


# A run


def rollout_rows(count, *, truncated=0, looping=0):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        ids = [5, 6, 7] * 30 if i < looping else rng.integers(3, 60, 60).tolist()
        rows.append({"rollout_id": f"r{i}", "token_ids": [*ids, 1], "truncated": i < truncated})
    return rows


def test_truncation_and_repetition():
    assert status(doctor_run.truncation(rollout_rows(100, truncated=5), {1})) == "fine"
    assert status(doctor_run.truncation(rollout_rows(100, truncated=60), {1})) == "wrong"
    unsaid = [row | {"truncated": None} for row in rollout_rows(50)]
    assert status(doctor_run.truncation(unsaid, {1})) == "fine"
    assert status(doctor_run.truncation(unsaid, {2})) == "wrong"
    assert status(doctor_run.truncation(unsaid, set())) == "not checked"
    assert status(doctor_run.repetition(rollout_rows(100, looping=2))) == "fine"
    assert status(doctor_run.repetition(rollout_rows(100, looping=40))) == "wrong"


def training(path, steps=40, **series):
    healthy = {"mean_length": 100.0, "truncated_share": 0.0, "entropy": 0.5, "tokens": 1000, "invalid": 0}
    columns = {
        name: series.get(name, [value] * steps if np.ndim(value) == 0 else value) for name, value in healthy.items()
    }
    run = Run.create(path)
    run.write("training", pa.table({"step": list(range(1, steps + 1)), **{k: list(v) for k, v in columns.items()}}))
    return run


def of(findings, check):
    return next(finding for finding in findings if finding.check == check)


def test_growth_entropy_and_invalid_losses_over_training(tmp_path):
    found = doctor_run.run_findings(training(tmp_path / "a"), None)
    assert [status(of(found, name)) for name in ("length growth", "entropy", "invalid losses")] == ["fine"] * 3
    grown = training(tmp_path / "b", mean_length=np.linspace(100, 400, 40), truncated_share=np.linspace(0, 0.8, 40))
    assert status(of(doctor_run.run_findings(grown, None), "length growth")) == "wrong"
    fallen = training(tmp_path / "c", entropy=np.geomspace(0.5, 1e-3, 40))
    assert status(of(doctor_run.run_findings(fallen, None), "entropy")) == "wrong"
    broken = training(tmp_path / "d", invalid=[0] * 30 + [50] * 10)
    assert status(of(doctor_run.run_findings(broken, None), "invalid losses")) == "wrong"


def test_rollouts_that_the_checker_could_not_read(tmp_path):
    run = Run.create(tmp_path / "run")
    assert status(doctor_run.checker(run)) == "not checked"
    for unreadable, expected in ((2, "fine"), (30, "wrong")):
        counts = {"math_verify": 100 - unreadable, "last_number": 0, "unreadable": unreadable}
        run.finish("sample", {"checked_by": counts})
        assert status(doctor_run.checker(run)) == expected


def test_prompts_measured(tmp_path):
    run = Run.create(tmp_path / "run")
    assert status(doctor_run.prompts_measured(run)) == "not checked"
    for count, expected in ((200, "fine"), (12, "note")):
        run.finish("detect", {"num_prompts": count})
        assert status(doctor_run.prompts_measured(run)) == expected


# An imported dump


@pytest.mark.parametrize(("shift", "expected"), [(0.0, "fine"), (0.5, "wrong")])
def test_an_imported_dump_whose_engine_disagrees_with_the_trainer(tmp_path, shift, expected):
    rows = dumps.rollouts(30)
    for row in rows:
        row["engine"] = row["engine"] - shift * (np.arange(len(row["tokens"])) % 2)
    spelling = dumps.tokenizer(tmp_path / "tokenizer")
    import_dump("prime-rl", dumps.prime_rl(tmp_path / "dump", rows), spelling, tmp_path / "run")
    found = doctor(tmp_path / "run", PairConfig(), PromptsConfig(), RolloutConfig(), QUICK)
    assert status(of(found, "engine and trainer")) == expected
    assert [finding.check for finding in found if finding.status == "wrong"] == (
        [] if expected == "fine" else ["engine and trainer"]
    )
    assert status(of(found, "pair")) == "not checked"
    assert not any("rocktokens sample" in f"{own.sentence}{own.remedy}" for own in found)


def test_an_imported_dump_whose_lengths_explode(tmp_path):
    rows = dumps.rollouts(40, steps=4)
    for row in rows:
        longer = [int(id_) for id_ in np.random.default_rng(1).integers(3, 20, 60 * (row["step"] // 2))]
        row["tokens"] = [*row["tokens"][:-1], *longer, 5 if row["step"] >= 2 else 1]
        for name in ("student", "engine", "teacher"):
            row[name] = np.resize(row[name], len(row["tokens"]))
        row["mask"] = [1] * len(row["tokens"])
        row["text"] = " ".join(f"w{id_}" for id_ in row["tokens"] if id_ > 2)
    file = dumps.jsonl(tmp_path / "a.jsonl", rows)
    import_dump("jsonl", file, dumps.tokenizer(tmp_path / "tokenizer"), tmp_path / "run", detect=False)
    found = doctor(tmp_path / "run", PairConfig(), PromptsConfig(), RolloutConfig(), QUICK)
    assert {finding.check for finding in found if finding.status == "wrong"} == {"truncation", "length growth"}


# No false alarms


def faults(findings) -> list[str]:
    return [f"{finding.check}: {finding.sentence}" for finding in findings if finding.status == "wrong"]


@pytest.mark.parametrize("world", ["arithmetic", "market", "cornerstone"])
def test_no_false_alarm_on_the_built_in_worlds(world):
    probe = Probe(prompts=24, learning_rate=2e-6)
    rollouts = RolloutConfig(max_new_tokens=96)
    assert faults(doctor(None, PairConfig(), PromptsConfig(source=world, limit=300), rollouts, probe)) == []


def test_no_false_alarm_on_a_tiny_qwen_and_on_smollm2s_tokenizer(tmp_path):
    tokenizer = tiny_smollm2.chat_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, seed in (("student", 0), ("teacher", 1)):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, **shape
        )
        model = Qwen2ForCausalLM(config)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = PairConfig(student=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"))
    file = tmp_path / "p.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i} + {2 * i}?"}], "answer": str(3 * i)} for i in range(400)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert faults(doctor(None, pair, PromptsConfig(source=str(file)), RolloutConfig(), QUICK)) == []


# The command


def test_the_command_ends_with_1_where_something_is_wrong(tmp_path, capsys):
    from rocktokens.cli import main

    outcomes = []
    for flags in ([], ["--rollouts.temperature", "0.7"]):
        with pytest.raises(SystemExit) as end:
            main(["doctor", "--probe", "0", "--prompts.limit", "300", *flags])
        outcomes.append((end.value.code or 0, "".join(capsys.readouterr())))
    assert outcomes[0][0] == 0
    assert "no fault" in outcomes[0][1]
    assert outcomes[1][0] == 1
    assert "sampling settings" in outcomes[1][1]
    assert "Traceback" not in outcomes[1][1]
