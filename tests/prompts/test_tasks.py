"""Prompts and checkers: what is read, what is compared, and what is refused with which words."""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_tokenizer
from transformers import AutoTokenizer

from rocktokens.errors import ConfigError, DataError
from rocktokens.prompts.checkers import MathChecker, check_all, how_checked, make_checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import PART_TENTHS, Prompt, load_prompts
from rocktokens.world import get_world

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}So,{% endif %}"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(get_world("arithmetic").student_path)


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---------------------------------------------------------------- what is read


def test_built_in_prompts_are_the_worlds_own(tokenizer):
    world = get_world("arithmetic")
    prompts = load_prompts(PromptsConfig(source="arithmetic", split="causal", limit=5, seed=3), tokenizer)
    problems = world.problems("causal", 5, seed=3)
    assert [(p.prompt_id, p.text, p.answer) for p in prompts] == [(p.id, p.prompt, p.answer) for p in problems]
    assert list(prompts[0].prompt_ids) == tokenizer(problems[0].prompt)["input_ids"]


def test_jsonl_with_fields_named_in_the_config(tmp_path, tokenizer):
    path = tmp_path / "mine.jsonl"  # the blank line is passed over; ids are line numbers
    path.write_text('{"question": "Ana has", "solution": 14}\n\n{"question": "Ben has"}\n')
    config = PromptsConfig(source=str(path), prompt_field="question", answer_field="solution")
    ids = tuple(tokenizer("Ana has")["input_ids"])
    first, second = load_prompts(config, tokenizer)
    assert first == Prompt("mine/1", ids, "Ana has", "14")
    assert (second.prompt_id, second.answer) == ("mine/3", None)


def test_messages_go_through_the_tokenizers_own_template(tmp_path, chat_tokenizer):
    messages = [{"role": "user", "content": "Ana has"}, {"role": "assistant", "content": "nothing to see"}]
    source = write_jsonl(tmp_path / "chat.jsonl", {"messages": messages})
    (prompt,) = load_prompts(PromptsConfig(source=source), chat_tokenizer)
    assert prompt.text == "Ana has\nSo,"
    assert list(prompt.prompt_ids) == chat_tokenizer("Ana has\nSo,")["input_ids"]


def test_trls_conversations_and_openais_lists_of_parts_are_messages(tmp_path, chat_tokenizer):
    """One file serves the trainer and the command."""
    parts = [{"type": "text", "text": "Ana"}, {"type": "text", "text": " has"}]
    rows = [[{"role": "user", "content": content}] for content in ("Ana has", parts)]
    source = write_jsonl(tmp_path / "p.jsonl", *({"prompt": messages, "answer": 3} for messages in rows))
    one, two = load_prompts(PromptsConfig(source=source), chat_tokenizer)
    assert one.text == two.text == "Ana has\nSo,"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system role \x1b[31m') }}", r"no system role \\x1b"),
        ("{{ messages[9].content.x }}", "undefined|has no"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "no end within"),
        ("{% for", "p/1"),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_one_sentence(tmp_path, tokenizer, monkeypatch, template, says):
    monkeypatch.setattr("rocktokens.prompts.tasks.TEMPLATE_SECONDS", 0.5)
    tokenizer.chat_template = template
    source = write_jsonl(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "Ana"}]})
    with pytest.raises(DataError, match=says) as error:
        load_prompts(PromptsConfig(source=source), tokenizer)
    assert "row p/1" in str(error.value)


def test_plain_text_takes_the_template_only_when_asked_and_a_system_message_first(tmp_path, chat_tokenizer):
    source = write_jsonl(tmp_path / "plain.jsonl", {"prompt": "Ana has"})
    asked = PromptsConfig(source=source, chat=True, system="Be brief.")
    assert load_prompts(PromptsConfig(source=source), chat_tokenizer)[0].text == "Ana has"
    assert load_prompts(replace(asked, system=None), chat_tokenizer)[0].text == "Ana has\nSo,"
    assert load_prompts(asked, chat_tokenizer)[0].text == "Be brief.\nAna has\nSo,"
    with pytest.raises(ConfigError, match="system is a message of a chat: set chat too"):
        PromptsConfig(source=source, system="Be brief.")


def test_dataset_directory_goes_through_the_datasets_library(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "owner" / "sums"
    data.mkdir(parents=True)
    write_jsonl(data / "train.jsonl", {"q": "Ana has", "a": "1"}, {"q": "Ben has", "a": "2"})
    write_jsonl(data / "test.jsonl", {"q": "Cleo has", "a": "3"})
    config = PromptsConfig(source=str(data), split="test", prompt_field="q", answer_field="a")
    assert [(p.prompt_id, p.text, p.answer) for p in load_prompts(config, tokenizer)] == [
        ("sums/test/0", "Cleo has", "3")
    ]
    with pytest.raises(ConfigError, match="nowhere"):
        load_prompts(PromptsConfig(source=str(data), split="nowhere"), tokenizer)


# ---------------------------------------------------------------- what is refused

ANA = {"prompt": "Ana"}


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        ([{"question": "Ana", "label": 1}], {}, r"'prompt' nor 'messages'.*'question', 'label'"),
        ([{"prompt": "Ana", "solution": 1}], {"checker": "math"}, "answer-field"),
        ('{"prompt": "Ana"}\n{"prompt": \n', {}, "line 2"),
        ("[1, 2]\n", {}, r"line 1.*object"),
        ("", {}, "no prompts"),
        ([ANA, {"prompt": ""}], {}, r"1 of 2 prompts are empty.*p/2"),
        ([{"prompt": ["Ana"]}], {}, "objects with role"),
        ([ANA, {"prompt": "1" * 200}], {}, "p/2 with 200"),
        ([{"messages": [{"role": "user", "content": "Ana"}]}], {}, "no chat template"),
        ([{"messages": "hello"}], {}, "p/1"),
        ([{"messages": [{"role": "user", "content": None}]}], {}, "p/1: message 1 has no text"),
        ([{"prompt": [{"role": "user"}]}], {}, "p/1: message 1 has no text"),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], {}, "p/1: message 1 has no text"),
        ([{"messages": [{"role": "assistant", "content": "hello"}]}], {}, "no message for the student"),
        ([ANA], {"options": ("a=1",)}, "leave options out"),
        (b'{"prompt": "caf\xe9"}\n', {}, "UTF-8"),
        (b'{"prompt": "\\ud800"}\n', {}, "surrogate"),
        (b"[" * 100_000, {}, "not valid JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", {}, "not valid JSON|holds text"),
        ([], {"source": "arithmetc"}, "Did you mean 'arithmetic'"),
        ([], {"source": "gsm"}, "owner/name"),
        ([], {"source": "/"}, "is no dataset"),
        ([], {"source": "a/b/c"}, "owner/name"),
        ([], {"source": "missing.jsonl"}, "no prompt file"),
        ([], {"source": "arithmetic", "prompt_field": "q"}, "leave prompt_field out"),
        ([], {"source": "arithmetic", "split": "nosuch", "limit": 4}, "no split"),
        ([], {"source": "arithmetic", "answer_field": "nosuch", "limit": 4}, "answer_field"),
        ([ANA], {"split": "test"}, "no splits"),
        ([{"prompt": f"{n} {n}"} for n in range(30)], {"answer_field": "solution"}, "solution"),
    ],
)
def test_what_is_refused(tmp_path, tokenizer, rows, settings, says):
    """Also where a stage takes a part of its own: a mistyped split must not be passed over for that."""
    path = tmp_path / "p.jsonl"
    rows = "".join(json.dumps(row) + "\n" for row in rows) if isinstance(rows, list) else rows
    path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    for part in (None, "train") if {"split", "answer_field"} & settings.keys() else (None,):
        with pytest.raises((ConfigError, DataError), match=says):
            load_prompts(PromptsConfig(**{"source": str(path), **settings}), tokenizer, part=part)


# ---------------------------------------------------------------- checkers


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", True),
        ("the answer is $14$.", "14", True),
        ("the answer is 13", "14", False),
        ("in all 1,200 coins", "1200", True),
        ("The sum is 70 + 2. #### 72", "Some working. #### 72", True),
        ("no idea", "14", False),
        ("it is \N{EN DASH}5", "-5", True),
        ("it is \N{EN DASH}5", "5", False),
        ("it is \N{MINUS SIGN}5", "-5", True),
        ("it is .5", "0.5", True),
    ],
)
def test_math_checker(text, answer, right):
    assert MathChecker()(text, answer) is right


def test_math_checker_falls_back_to_the_last_number(monkeypatch):
    monkeypatch.setattr("rocktokens.prompts.checkers._read_formulas", lambda text: [])
    check = MathChecker()
    assert check("first 3, then 1,014", "it is 1014")
    assert not check("first 1014, then 3", "1014")
    assert check.counts == {"math_verify": 0, "last_number": 2, "unreadable": 0}
    assert check("first 3, then .5", "0.5")
    assert check("from 3\N{EN DASH}5", "5")
    assert check("it is \N{MINUS SIGN}.5", "-0.5")
    assert check("so 1,234,567.5", "so 1234567.50")  # exactly, and commas only where thousands have them
    assert not check("so 12,34", "so 1234")
    assert not check("so " + "1" * 400, "so " + "2" * 400)


def test_math_checker_works_outside_the_main_thread():
    found = []
    worker = threading.Thread(target=lambda: found.append(MathChecker()("$14$", "14")))
    worker.start()
    worker.join()
    assert found == [True]


@pytest.mark.parametrize(
    ("settings", "text", "answer", "right"),
    [
        ({"checker": "exact"}, " a  b\n", "a b", True),
        ({"checker": "exact"}, "a b c", "a b", False),
        ({"checker": "regex", "pattern": r"=(\d+)"}, "1+1=2, 2+2=4", "4", True),
        ({"checker": "regex", "pattern": r"=(\d+)"}, "1+1=2, 2+2=4", "2", False),
        ({"checker": "regex", "pattern": r"=(\d+)"}, "nothing", "4", False),
        ({"source": "market"}, "Stock **14**, okay; bye!", "14", True),
        ({"source": "market"}, "Count **14**, okay; bye!", "14", False),
    ],
)
def test_other_checkers(settings, text, answer, right):
    assert make_checker(PromptsConfig(**{"source": "x.jsonl", **settings}))(text, answer) is right


def test_checker_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "my_checker_of_tests.py").write_text("def same(text, answer):\n    return text[::-1] == answer\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    check = make_checker(PromptsConfig(source="x.jsonl", checker="my_checker_of_tests:same"))
    assert check("abc", "cba")
    with pytest.raises(ConfigError, match="no function 'other'"):
        make_checker(PromptsConfig(source="x.jsonl", checker="my_checker_of_tests:other"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"checker": "maths"}, "auto, math, exact"),
        ({"checker": "no.such.module:check"}, "cannot import"),
        ({"checker": "os:linesep"}, "no function"),
        ({"checker": "regex", "pattern": "("}, "not a regular expression"),
        ({"checker": "regex", "pattern": "abc"}, "group"),
    ],
)
def test_unknown_checkers_and_bad_patterns(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_checker(PromptsConfig(source="x.jsonl", **settings))


def test_the_three_parts_are_disjoint_and_make_up_the_file(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i + 1}"}) + "\n" for i in range(300)))
    config = PromptsConfig(source=str(path), checker="none")
    parts = {part: {p.text for p in load_prompts(config, tokenizer, part=part)} for part in PART_TENTHS}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 300
    assert parts["train"] == {p.text for p in load_prompts(config, tokenizer, part="train")}
    for part, tenths in PART_TENTHS.items():
        assert abs(len(parts[part]) - 30 * tenths) < 40  # 4 standard deviations of 300 draws


@pytest.mark.parametrize(
    "text", ["$9^{9^{9^{9}}}$", "$\\sum_{n=1}^{10000000} n^n$", "$\\binom{1000000000}{500000000}$", f"${'(' * 500}1$"]
)
def test_a_formula_without_end_is_stopped(text, monkeypatch):
    """Powers and sums that sympy would expand for hours."""
    monkeypatch.setattr("rocktokens.prompts.checkers.TIMEOUT_SECONDS", 1)
    begun = time.monotonic()
    assert not MathChecker()(text, "12345")
    assert time.monotonic() - begun < 20


def test_known_texts_are_not_read_again_and_all_are_counted(monkeypatch):
    check = MathChecker()
    pairs = [("$1/2$", "0.5"), ("it is 3", "4"), ("no idea", "7"), ("$1/2$", "0.5")]
    assert check_all(check, pairs) == [True, False, False, True]
    monkeypatch.setattr("rocktokens.prompts.checkers._read_formulas", None)  # would raise
    counts = {"math_verify": 3, "last_number": 0, "unreadable": 1}
    assert how_checked(check, [text for text, _ in pairs], [answer for _, answer in pairs]) == {"checked_by": counts}
    assert how_checked(lambda text, answer: True, ["a"], ["a"]) == {}


def test_duplicate_prompts_are_counted(tmp_path, caplog):
    (tmp_path / "double.jsonl").write_text('{"prompt": "w4 w5"}\n' * 3 + '{"prompt": "w6"}\n')
    load_prompts(PromptsConfig(source=str(tmp_path / "double.jsonl")), tiny_tokenizer())
    assert "2 of 4 prompts" in caplog.text
