"""Which chat template is used, and what is said where the pair's two differ."""

from __future__ import annotations

import pytest
from tiny import CHAT_TEMPLATE, letter_tokenizer, save_model, tiny_model

from rocktokens.check.stage import check
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.chat_templates import what_templates_do
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import load_prompts
from rocktokens.sample.settings import RolloutConfig


def test_equal_templates_and_none():
    assert what_templates_do(letter_tokenizer(), letter_tokenizer()) == "Both models have the same chat template."
    bare = letter_tokenizer(template="")
    assert "plain text" in what_templates_do(bare, bare)
    assert "Only the teacher" in what_templates_do(bare, letter_tokenizer())
    assert "Only the student" in what_templates_do(letter_tokenizer(), bare)


def test_a_difference_is_shown_with_what_it_does():
    other = letter_tokenizer(CHAT_TEMPLATE.replace("assistant: ", "answer: "))
    said = what_templates_do(letter_tokenizer(), other)
    assert "'ssistant: '" in said
    assert "'nswer: '" in said
    assert "the teacher scores the same token ids" in said


def test_another_source_that_renders_alike_is_no_fault():
    other = letter_tokenizer(CHAT_TEMPLATE + "{% if tools %}tools{% endif %}")
    assert "render plain conversations alike" in what_templates_do(letter_tokenizer(), other)


def test_a_template_that_refuses_a_system_message_differs():
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    assert "no system message" in what_templates_do(letter_tokenizer(), letter_tokenizer(strict + CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    teachers = letter_tokenizer(CHAT_TEMPLATE.replace("assistant: ", "answer: "))
    return PairConfig(
        student=save_model(folder / "student", tiny_model("qwen2", vocabulary=99), letter_tokenizer()),
        teacher=save_model(folder / "teacher", tiny_model("qwen2", seed=1, vocabulary=99), teachers),
    )


def test_check_says_it(pair, capsys):
    check(pair, PromptsConfig(), RolloutConfig(max_new_tokens=8))
    assert "The chat templates differ" in " ".join(capsys.readouterr().out.split())


def test_prompts_go_through_the_students(pair, tmp_path):
    from rocktokens.models.pair import check_tokenizers

    tokenizer, _ = check_tokenizers(pair)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 3)
    prompts = load_prompts(PromptsConfig(source=str(tmp_path / "p.jsonl"), chat=True), tokenizer)
    assert prompts[0].text == "<start>user: 1+1?<eos><start>assistant: "
