"""Every code that core may give has a sentence, and the sentence has its numbers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from rocktokens.remarks import Code, Remark, in_words
from rocktokens.report.remarks import SENTENCES, sentence

PACKAGE = Path(__file__).parents[2] / "rocktokens"


def test_every_code_has_a_sentence_and_is_given_somewhere():
    given = {
        node.args[0].value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Remark"
    }
    assert given == set(get_args(Code)) == set(SENTENCES)


@pytest.mark.parametrize(
    ("remark", "said"),
    [
        (
            Remark("fewer_than_k", {"definition": "burden", "found": 1, "k": 4}),
            "`burden`: 1 token type qualifies, fewer than K = 4",
        ),
        (
            Remark("fewer_than_k", {"definition": "burden", "found": 3, "k": 4}),
            "`burden`: 3 token types qualify, fewer than K = 4",
        ),
        (Remark("losses_not_finite", {"count": 2, "of": 5}), "2 of 5 occurrences have no finite loss and are left out"),
        (
            Remark("control_short", {"control": "control", "placed": 3, "wanted": 9}),
            "control: only 3 of 9 occurrences could be matched",
        ),
    ],
)
def test_sentences(remark, said):
    assert sentence(remark) == said


def test_the_same_remark_is_said_once():
    twice = [Remark("no_prompt_id"), Remark("one_checkpoint"), Remark("no_prompt_id")]
    assert in_words(twice) == (sentence(twice[0]), sentence(twice[1]))
