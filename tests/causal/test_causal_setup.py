"""Causal tests on prompts of another source: they are checked as that source's answers are."""

from __future__ import annotations

import json

import pytest
from tiny import save_model, tiny_model

from rocktokens.causal.baseline import Setup
from rocktokens.causal.settings import BaselineConfig
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.checkers import MathChecker, make_checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping

LEGS = "reasoning-gym:leg_counting"


def setup_of(run, **baseline):
    return Setup.of(run, BaselineConfig(max_new_tokens=4, **baseline), ServersConfig())


@pytest.fixture
def make_run(tmp_path):
    """A run of two tiny models on the prompts that are asked for."""
    save_model(tmp_path / "student", tiny_model(seed=1))
    save_model(tmp_path / "teacher", tiny_model(seed=2))
    pair = PairConfig(student=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"))

    def make(prompts):
        return Run.create(tmp_path / "run", {"pair": to_mapping(pair), "prompts": to_mapping(prompts)})

    return make


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"w{i}", "answer": str(i)}) + "\n" for i in range(4)))
    return str(path)


@pytest.mark.parametrize("own", ["a file", "arithmetic", "reasoning-gym:chain_sum"])
def test_another_task_has_its_own_checker(own, make_run, sums):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")
    options = ("min_terms=2", "max_terms=2") if own.startswith("reasoning-gym") else ()
    field = {"prompt_field": "question"} if own == "a file" else {}
    run = make_run(PromptsConfig(source=sums if own == "a file" else own, options=options, **field))
    setup = setup_of(run, source=LEGS, problems=2)
    assert (setup.prompts.source, setup.prompts.options, setup.prompts.limit) == (LEGS, (), 2)
    checker = make_checker(setup.prompts)
    for prompt in setup.problems:
        assert checker(f"<answer>{prompt.answer}</answer>", prompt.answer)
        assert not checker(f"<answer>{prompt.answer}0</answer>", prompt.answer)


def test_a_file_is_not_checked_by_the_runs_own_task(make_run, tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")
    path = tmp_path / "fresh.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i}", "answer": str(i)}) + "\n" for i in range(4)))
    run = make_run(PromptsConfig(source=LEGS))
    setup = setup_of(run, source=str(path), problems=4)
    assert isinstance(make_checker(setup.prompts), MathChecker)
    assert len(setup.problems) == 4


def test_the_students_of_a_world_answer_in_its_language_on_any_file(make_run, tmp_path):
    from rocktokens.world import get_world

    path = tmp_path / "fresh.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i}", "answer": str(i)}) + "\n" for i in range(4)))
    setup = setup_of(make_run(PromptsConfig(source="arithmetic")), source=str(path))
    assert make_checker(setup.prompts) == get_world("arithmetic").check
