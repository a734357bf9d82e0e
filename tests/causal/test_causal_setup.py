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
from rocktokens.world import get_world

LEGS = "reasoning-gym:leg_counting"
pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")


def setup_of(run, **baseline):
    return Setup.of(run, BaselineConfig(max_new_tokens=4, **baseline), ServersConfig())


@pytest.fixture
def make_run(tmp_path):
    """A run of two tiny models on the prompts that are asked for."""
    save_model(tmp_path / "student", tiny_model(seed=1))
    save_model(tmp_path / "teacher", tiny_model(seed=2))
    pair = PairConfig(student=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"))

    def make(prompts):
        config = {"pair": to_mapping(pair), "prompts": to_mapping(prompts)}
        return Run.create(tmp_path / prompts.source.replace("/", "_"), config)

    return make


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i}", "answer": str(i)}) + "\n" for i in range(4)))
    return str(path)


@pytest.mark.parametrize("own", ["a file", "arithmetic", "reasoning-gym:chain_sum"])
def test_another_task_has_its_own_checker(own, make_run, file):
    options = ("min_terms=2", "max_terms=2") if own.startswith("reasoning-gym") else ()
    run = make_run(PromptsConfig(source=file if own == "a file" else own, options=options))
    setup = setup_of(run, source=LEGS, problems=2)
    prompts = setup.opens["prompts"]
    assert (prompts.source, prompts.options, prompts.limit) == (LEGS, (), 2)
    checker = make_checker(setup.opens["prompts"])
    for prompt in setup.problems:
        assert checker(f"<answer>{prompt.answer}</answer>", prompt.answer)
        assert not checker(f"<answer>{prompt.answer}0</answer>", prompt.answer)


def test_a_file_is_not_checked_by_the_runs_own_task_unless_it_is_a_world(make_run, file):
    """The students of a world answer in its language on any file."""
    setup = setup_of(make_run(PromptsConfig(source=LEGS)), source=file, problems=4)
    assert isinstance(make_checker(setup.opens["prompts"]), MathChecker)
    assert len(setup.problems) == 4
    run = make_run(PromptsConfig(source="arithmetic"))
    assert make_checker(setup_of(run, source=file).opens["prompts"]) == get_world("arithmetic").check
