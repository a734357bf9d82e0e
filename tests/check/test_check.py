"""`rocktokens check`: every check on a case that has the fault and on one that has not."""

from __future__ import annotations

import json
from dataclasses import replace

import distilling
import dumps
import numpy as np
import pyarrow as pa
import pytest
import tiny_smollm2
from tiny import save_model, tiny_model

from rocktokens import Run
from rocktokens import check as checks
from rocktokens.check import Side, check, memory_and_time, needs_of
from rocktokens.interop.import_ import import_dump
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.settings import RolloutConfig


def side(tokenizer=None, *, ends=None, rows=400) -> Side:
    tokenizer = tokenizer or tiny_smollm2.chat_tokenizer()
    return Side("model", tokenizer, rows, {tokenizer.eos_token_id} if ends is None else ends)


def with_template(change) -> Side:
    tokenizer = tiny_smollm2.chat_tokenizer()
    tokenizer.chat_template = change(tokenizer.chat_template)
    return side(tokenizer)


def status(finding) -> str:
    assert finding.sentence
    assert bool(finding.remedy) or finding.status != "wrong"
    return finding.status


OTHER_TURN = with_template(lambda text: text.replace("<|im_end|>", "<|endoftext|>"))
BARE = side(distilling.tokenizer(), rows=64)


@pytest.mark.parametrize(
    ("made", "expected", "says"),
    [
        (checks.end_tokens(side(), side()), "fine", ""),
        (checks.end_tokens(side(ends={2, 0}), side(ends={0, 2})), "fine", ""),
        (checks.end_tokens(side(), side(ends={2, 0})), "wrong", "the teacher with"),
        (checks.end_tokens(side(ends={0}), side(ends={0})), "wrong", "generation config"),
        (checks.end_tokens(OTHER_TURN, OTHER_TURN), "wrong", "ends a turn with <|endoftext|>"),
        (checks.chat_template(side(), side()), "fine", ""),
        (checks.chat_template(BARE, BARE), "fine", "plain text"),
        (checks.chat_template(side(), with_template(lambda text: text + "{# a comment #}")), "note", ""),
        (checks.chat_template(side(), with_template(lambda text: text.replace("\n", " "))), "wrong", "student …"),
        (checks.chat_template(side(), with_template(lambda text: None)), "wrong", "Only the student"),
        (checks.chat_template(side(), with_template(lambda text: text + "{{ tools | length }}")), "wrong", "student …"),
        (
            checks.chat_template(side(), with_template(lambda text: text + "{% if tools %}x{% endif %}")),
            "wrong",
            "tool",
        ),
        (checks.tokenizers(side(), side()), "fine", ""),
        (checks.tokenizers(side(), BARE), "wrong", "id 0 is '<|endoftext|>' for the student, '<pad>'"),
        (checks.vocabulary(side(), side()), "fine", ""),
        (checks.vocabulary(side(), side(rows=448)), "fine", ""),
        (checks.vocabulary(side(), side(rows=300)), "wrong", ""),
        (checks.sampling(RolloutConfig()), "fine", ""),
        (checks.sampling(RolloutConfig(top_p=1.0)), "fine", ""),
        (checks.sampling(RolloutConfig(temperature=0.7)), "wrong", "temperature 0.7"),
        (checks.sampling(RolloutConfig(top_p=0.9)), "wrong", "top-p 0.9"),
        (checks.sampling(RolloutConfig(top_k=20)), "wrong", "top-k 20"),
    ],
)
def test_pairs(made, expected, says):
    assert status(made) == expected
    assert says in made.sentence


def test_memory_to_distil_counts_float32_weights_gradients_and_moments(tmp_path, monkeypatch):
    student, teacher = tiny_model(), tiny_model(seed=1, width=64)
    pair = PairConfig(
        student=save_model(tmp_path / "s", student), teacher=save_model(tmp_path / "t", teacher), dtype="bfloat16"
    )
    rollouts = RolloutConfig(batch_size=1, max_new_tokens=4)
    half, full = (needs_of(replace(pair, dtype=dtype), rollouts) for dtype in ("bfloat16", "float32"))
    own, theirs = (sum(p.numel() for p in model.parameters()) for model in (student, teacher))
    # Only the teacher is smaller in bfloat16 while the student trains; when nothing trains, both are.
    assert full.distill_bytes - half.distill_bytes == 2 * theirs
    assert full.score_bytes - half.score_bytes >= 2 * (own + theirs)
    assert half.distill_bytes >= 16 * own + 2 * theirs
    assert status(memory_and_time(pair, rollouts)) == "fine"
    monkeypatch.setattr("rocktokens.models.devices.memory", lambda device: (1000, 1000))
    assert status(memory_and_time(pair, rollouts)) == "wrong"


# Prompts


def sums(count):
    rng = np.random.default_rng(0)
    rows = [(int(a), int(b)) for a, b in rng.integers(100, 999, (count, 2))]
    return [Prompt(f"p{i}", (1,), f"{a} + {b} =", str(a + b)) for i, (a, b) in enumerate(rows)]


def test_answers_in_prompts():
    assert status(checks.answers_in_prompts(sums(200))) == "fine"
    leaking = [replace(prompt, text=f"{prompt.text} (answer: {prompt.answer})") for prompt in sums(200)]
    assert status(checks.answers_in_prompts(leaking)) == "wrong"
    choice = [replace(prompt, text="A, B, C or D?", answer="ABCD"[i % 4]) for i, prompt in enumerate(sums(200))]
    assert status(checks.answers_in_prompts(choice)) == "fine"  # every prompt holds every answer
    assert status(checks.answers_in_prompts(sums(3))) == "not checked"


def test_duplicates_and_enough_prompts():
    assert status(checks.duplicates({"train": ["a", "b"], "detection": ["c"]})) == "fine"
    found = checks.duplicates({"train": ["What is 1?", "b"], "detection": ["what  is 1?"]})
    assert status(found) == "wrong"
    assert "train and detection" in found.sentence
    assert status(checks.duplicates({"train": ["a", "a", "b"], "detection": ["c"]})) == "note"
    assert status(checks.enough(200, 200)) == "fine"
    assert status(checks.enough(20, 200)) == "wrong"


def test_answers_that_the_checker_cannot_read(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"w{3 + i % 60} w{3 + i // 60}", "answer": "nobody knows" if i % 2 else "7"} for i in range(400)]
    config = PromptsConfig(source=str(file), checker="math")
    file.write_text("\n".join(map(json.dumps, rows)))
    assert status(checks.prompt_findings(config, distilling.tokenizer())[0]) == "wrong"
    file.write_text("\n".join(json.dumps(row | {"answer": "7"}) for row in rows))
    assert status(checks.prompt_findings(config, distilling.tokenizer())[0]) == "fine"


# With the models


@pytest.mark.parametrize(("student", "teacher", "expected"), [(20, 80, "fine"), (80, 20, "wrong"), (50, 52, "note")])
def test_teacher_ahead(student, teacher, expected):
    asked = [Prompt(f"p{i}", (1,), "", "w3") for i in range(100)]
    right = {"student": student, "teacher": teacher}
    ids = {who: [(3,) if i < count else (4,) for i in range(100)] for who, count in right.items()}
    found = checks.teacher_ahead(asked, ids, distilling.tokenizer(), lambda text, answer: text == answer)
    assert status(found) == expected
    assert "[" in found.number
    assert status(checks.teacher_ahead(asked, ids, distilling.tokenizer(), None)) == "not checked"


def test_length_limit_and_learning_rate():
    assert status(checks.length_limit([False] * 30 + [True] * 2, 64)) == "fine"
    assert status(checks.length_limit([False] * 10 + [True] * 22, 64)) == "wrong"
    model = distilling.student()
    assert status(checks.resolution(model, 2e-6)) == "fine"
    assert status(checks.resolution(model.bfloat16(), 2e-6)) == "wrong"
    assert status(checks.resolution(model.bfloat16(), 1e-1)) == "fine"


# A run


def rollout_rows(count, *, truncated=0, looping=0):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        ids = [5, 6, 7] * 30 if i < looping else rng.integers(3, 60, 60).tolist()
        rows.append({"rollout_id": f"r{i}", "token_ids": [*ids, 1], "truncated": i < truncated})
    return rows


UNSAID = [row | {"truncated": None} for row in rollout_rows(50)]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (checks.truncation(rollout_rows(100, truncated=5), {1}), "fine"),
        (checks.truncation(rollout_rows(100, truncated=60), {1}), "wrong"),
        (checks.truncation(UNSAID, {1}), "fine"),
        (checks.truncation(UNSAID, {2}), "wrong"),
        (checks.truncation(UNSAID, set()), "not checked"),
        (checks.repetition(rollout_rows(100, looping=2)), "fine"),
        (checks.repetition(rollout_rows(100, looping=40)), "wrong"),
    ],
)
def test_rollouts(made, expected):
    assert status(made) == expected


def of(findings, name):
    return next(finding for finding in findings if finding.check == name)


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("length growth", {"mean_length": np.linspace(100, 400, 40), "truncated_share": np.linspace(0, 0.8, 40)}),
        ("entropy", {"entropy": np.geomspace(0.5, 1e-3, 40)}),
        ("invalid losses", {"invalid": [0] * 30 + [50] * 10}),
    ],
)
def test_over_training(tmp_path, name, series):
    healthy = {"mean_length": 100.0, "truncated_share": 0.0, "entropy": 0.5, "tokens": 1000, "invalid": 0}
    columns = {key: [value] * 40 for key, value in healthy.items()}
    for expected, given in (("fine", {}), ("wrong", {key: list(value) for key, value in series.items()})):
        run = Run.create(tmp_path / expected)
        run.write("training", pa.table({"step": list(range(1, 41)), **columns, **given}))
        assert status(of(checks.run_findings(run, None), name)) == expected


def test_unreadable_rollouts(tmp_path):
    run = Run.create(tmp_path / "run")
    assert status(checks.readable_rollouts(run)) == "not checked"
    for unreadable, expected in ((2, "fine"), (30, "wrong")):
        counts = {"math_verify": 100 - unreadable, "last_number": 0, "unreadable": unreadable}
        run.finish("sample", {"checked_by": counts})
        assert status(checks.readable_rollouts(run)) == expected


# An imported dump


@pytest.mark.parametrize(("shift", "expected"), [(0.0, []), (0.5, ["engine and trainer"])])
def test_an_imported_dump_whose_engine_disagrees_with_the_trainer(tmp_path, shift, expected):
    rows = dumps.rollouts(30)
    for row in rows:
        row["engine"] = row["engine"] - shift * (np.arange(len(row["tokens"])) % 2)
    spelling = dumps.tokenizer(tmp_path / "tokenizer")
    import_dump("prime-rl", dumps.prime_rl(tmp_path / "dump", rows, teacher=True), spelling, tmp_path / "run")
    found = check(tmp_path / "run")
    assert [finding.check for finding in found if finding.status == "wrong"] == expected
    assert status(of(found, "engine and trainer")) == ("wrong" if expected else "fine")
    assert status(of(found, "pair")) == "not checked"


# No false alarms


@pytest.mark.parametrize("world", ["arithmetic", "market", "cornerstone"])
def test_no_false_alarm_on_the_built_in_worlds(world):
    found = check(prompts=PromptsConfig(source=world, limit=300), rollouts=RolloutConfig(max_new_tokens=96), probe=24)
    assert [finding for finding in found if finding.status == "wrong"] == []
    assert status(of(found, "teacher ahead")) in ("fine", "note")


def test_no_false_alarm_on_a_tiny_qwen_with_a_chat_template(tmp_path):
    tokenizer = tiny_smollm2.chat_tokenizer()
    own = {"vocabulary": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2048}
    for seed, name in enumerate(("student", "teacher")):
        save_model(tmp_path / name, tiny_model("qwen2", seed=seed, **own), tokenizer)
    rows = [
        {"messages": [{"role": "user", "content": f"What is {i} + {2 * i}?"}], "answer": str(3 * i)} for i in range(400)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pair = PairConfig(student=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"))
    found = check(None, pair, PromptsConfig(source=str(tmp_path / "p.jsonl")), probe=0)
    assert [finding for finding in found if finding.status == "wrong"] == []


# The command


def test_the_command_ends_with_1_where_something_is_wrong(capsys):
    from rocktokens.cli import main

    said = []
    for flags, code in (([], 0), (["--rollouts.temperature", "0.7"], 1), (["--json"], 0)):
        with pytest.raises(SystemExit) as end:
            main(["check", "--probe", "0", "--prompts.limit", "300", *flags])
        assert (end.value.code or 0) == code
        said.append(capsys.readouterr())
    assert "no fault" in said[0].out
    assert "sampling settings" in said[1].err
    findings = json.loads(said[2].out)
    assert {"check", "status", "number", "sentence", "remedy"} == set(findings[0])
