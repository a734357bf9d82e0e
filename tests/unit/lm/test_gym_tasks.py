"""reasoning-gym as a source of prompts: distinct, repeatable, disjoint parts, its own scorer, clear refusals."""

from __future__ import annotations

import pickle

import pytest
from tiny import tiny_tokenizer

from rocktokens.config import PromptsConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.lm.checkers import make_checker
from rocktokens.lm.gym_tasks import GymAnswer, gym_rows, stated_answer
from rocktokens.lm.tasks import is_endless, load_prompts

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")

SUMS = PromptsConfig(source="reasoning-gym:chain_sum", limit=40)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_prompts_are_distinct_and_the_same_every_time(tokenizer):
    first, again = load_prompts(SUMS, tokenizer), load_prompts(SUMS, tokenizer)
    assert first == again
    assert len({prompt.text for prompt in first}) == len(first) == 40
    other = load_prompts(PromptsConfig(source=SUMS.source, limit=40, seed=1), tokenizer)
    assert {p.text for p in other} != {p.text for p in first}


def test_parts_share_no_problem_whatever_their_seed(tokenizer):
    texts = {
        part: {p.text for seed in (0, 1) for p in load_prompts(replace_seed(seed), tokenizer, part=part)}
        for part in ("train", "detection", "causal")
    }
    assert not texts["train"] & texts["detection"]
    assert not texts["train"] & texts["causal"]
    assert not texts["detection"] & texts["causal"]


def replace_seed(seed):
    return PromptsConfig(source=SUMS.source, limit=60, seed=seed)


def test_options_reach_the_task(tokenizer):
    config = PromptsConfig(source=SUMS.source, limit=10, options=("min_terms=4", "max_terms=4", "min_digits=1"))
    for prompt in load_prompts(config, tokenizer):
        assert len([word for word in prompt.text.split() if word in "+-"]) == 3


def test_the_tasks_own_scorer_checks(tokenizer):
    check = make_checker(SUMS)
    for prompt in load_prompts(SUMS, tokenizer)[:10]:
        assert check(f"Adding up gives 999, then {prompt.answer}.", prompt.answer)
        assert not check(f"It is {int(prompt.answer) + 1}.", prompt.answer)
        assert not check("I do not know.", prompt.answer)


def test_a_task_that_scores_by_its_metadata_needs_the_problem():
    """A countdown puzzle has many right answers: only the problem tells which numbers may be used."""
    source = "reasoning-gym:countdown"
    _, _, answer = next(gym_rows(source, (), 0))
    check = make_checker(PromptsConfig(source=source))
    assert check(f"<answer>{answer}</answer>", answer)
    copied = pickle.loads(pickle.dumps(answer))
    assert isinstance(copied, GymAnswer)
    assert copied.entry == answer.entry
    assert check(f"<answer>{copied}</answer>", copied)
    assert not check("<answer>1 + 1</answer>", answer)


@pytest.mark.parametrize(
    ("text", "reference", "wanted"),
    [
        ("so <answer> 7 </answer> and 9", "7", "7"),
        (r"thus \boxed{\frac{1}{2}} and 9", "1/2", r"\frac{1}{2}"),
        ("1 + 1 = 3\n#### 1,234", "1234", "1234"),
        ("The answer is 12 apples of 40.", "12", "12"),
        ("First 3, then 5.", "5", "5"),
        ("nothing", "5", None),
        ("words\nb, a, c\n", "b, a, c", "b, a, c"),
        ("**Answer: yes**", "yes", "yes"),
        ("", "yes", None),
    ],
)
def test_the_stated_answer(text, reference, wanted):
    assert stated_answer(text, reference) == wanted


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": "reasoning-gym:gsm_symbolik"}, "did you mean reasoning-gym:gsm_symbolic"),
        ({"options": ("min_terms",)}, "KEY=VALUE"),
        ({"options": ("nosuch=3",)}, "nosuch"),
        ({"options": ("min_terms=-2",)}, "must be positive"),
        ({"options": ("seed=3",)}, "prompts.seed"),
    ],
)
def test_what_is_refused(settings, says, tokenizer):
    with pytest.raises(ConfigError, match=says):
        load_prompts(PromptsConfig(**{"source": SUMS.source, "limit": 5, **settings}), tokenizer)


def test_a_small_task_says_how_many_it_has(tokenizer):
    tiny = ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1")
    with pytest.raises(DataError, match="distinct problems where 5000 were asked for"):
        load_prompts(PromptsConfig(source=SUMS.source, limit=5000, options=tiny), tokenizer)


def test_endless_sources():
    assert is_endless("arithmetic")
    assert is_endless("reasoning-gym:chain_sum")
    assert not is_endless("mine.jsonl")
