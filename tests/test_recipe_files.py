"""The YAML recipes for real pairs: settings that exist, with values that are allowed, and sizes that fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocktokens.cli import _parse

RECIPES = sorted((Path(__file__).parents[1] / "examples" / "recipes").glob("*.yaml"))


def test_there_are_two_real_pairs():
    assert len(RECIPES) >= 2
    pairs = {(own.pair.student, own.pair.teacher) for own in (_parse("study", [str(file)]) for file in RECIPES)}
    assert len(pairs) == len(RECIPES)
    assert all(student and teacher for student, teacher in pairs)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_a_study(file):
    asked = _parse("study", [str(file)])
    assert asked.distill.max_new_tokens <= asked.rollouts.max_new_tokens
    assert asked.path.parts[0] == "runs"
    # Flags stand above the file.
    assert _parse("study", [str(file), "--distill.steps", "7"]).distill.steps == 7
    rollouts = asked.distill.prompts_per_step * asked.distill.rollouts_per_prompt
    for processes in (1, 8):
        assert rollouts % processes == 0
        assert rollouts // processes % (asked.distill.micro_batch or 1) == 0


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_with_students_on_servers_says_who_draws_grafts(file):
    """Grafts on servers need a teacher that generates; the file's comment has the command."""
    text = file.read_text()
    if "--servers.student" in text:
        assert "generates" in text
