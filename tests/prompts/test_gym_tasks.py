"""reasoning-gym as a source of prompts: distinct, repeatable, disjoint parts, its own scorer, clear refusals."""

from __future__ import annotations

import dataclasses
import json
import pickle
from itertools import islice

import pytest
from tiny import tiny_tokenizer

from rocktokens.errors import ConfigError, DataError
from rocktokens.prompts.checkers import make_checker
from rocktokens.prompts.gym_options import read_options
from rocktokens.prompts.gym_tasks import GymAnswer, gym_rows
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import is_endless, load_prompts

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


def test_a_sentence_may_end_in_a_period():
    source = "reasoning-gym:word_sorting"
    _, _, answer = next(gym_rows(source, (), 0))
    check = make_checker(PromptsConfig(source=source))
    assert check(f"The answer is {answer}.", answer)
    assert not check("The answer is nothing.", answer)


def examples(task):
    for _, _, answer in islice(gym_rows(f"reasoning-gym:{task}", (), 0), 4):
        assert answer.entry["answer"] is None
        yield answer


@pytest.mark.parametrize("task", ["graph_color", "propositional_logic", "rubiks_cube"])
def test_tasks_with_many_right_answers_show_one(task):
    check = make_checker(PromptsConfig(source=f"reasoning-gym:{task}"))
    for answer in examples(task):
        assert answer not in ("None", "")
        for text in (f"<answer>{answer}</answer>", f"I think so.\n\n{answer}\n", f"**Final Answer:**\n\n{answer}"):
            assert check(text, answer), text
        assert not check("None", answer)


def test_an_answer_in_json_may_take_several_lines():
    check = make_checker(PromptsConfig(source="reasoning-gym:graph_color"))
    for answer in examples("graph_color"):
        colours = json.loads(answer)
        assert check(
            f"The colours are:\n```json\n{json.dumps(colours, indent=2)}\n```\nNo edge joins two alike.", answer
        )
        wrong = json.dumps(dict.fromkeys(colours, 1), indent=2)
        assert not check(f"The colours are:\n```json\n{wrong}\n```", answer)


@pytest.mark.parametrize("task", ["boxnet", "rush_hour"])
def test_tasks_that_keep_no_example_say_so(task):
    check = make_checker(PromptsConfig(source=f"reasoning-gym:{task}"))
    for answer in examples(task):
        assert answer == "any solution"
        assert not check(answer, answer)


def test_moves_are_read_from_the_last_paragraph():
    """A board on which the red car has a free way."""
    entry = {"answer": None, "metadata": {"board_config": "o" * 12 + "AAoooo" + "o" * 18}}
    check = make_checker(PromptsConfig(source="reasoning-gym:rush_hour"))
    answer = GymAnswer("any solution", entry)
    assert check("The way is free.\n\nA+4", answer)
    assert check("The way is free. The answer is: A+4", answer)
    assert not check("The way is free.\n\nA+3", answer)


@pytest.mark.parametrize("task", ["futoshiki", "sudoku", "mini_sudoku"])
def test_a_grid_keeps_its_layout(task):
    source = f"reasoning-gym:{task}"
    _, _, answer = next(gym_rows(source, (), 0))
    check = make_checker(PromptsConfig(source=source))
    for text in (
        "{}",
        "Here it is:\n\n{}\n",
        "```\n{}\n```",
        "<answer>\n{}\n</answer>",
        "The answer is:\n\n{}\n\nDone.",
    ):
        assert check(text.format(answer), answer), text
    last = str(answer).rstrip()[-1]
    assert not check(str(answer).rstrip()[:-1] + ("1" if last != "1" else "2"), answer)


@pytest.mark.parametrize("text", ["The answer is not 11.", "{}", "<answer></answer>", "[[1, 2], 3", "\N{SNOWMAN}", ""])
@pytest.mark.parametrize("task", ["prime_factorization", "game_of_life", "chain_sum", "gsm_symbolic", "sudoku"])
def test_a_scorer_that_stumbles_has_found_no_answer(task, text):
    source = f"reasoning-gym:{task}"
    _, _, answer = next(gym_rows(source, (), 0))
    assert make_checker(PromptsConfig(source=source))(text, answer) is False


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": "reasoning-gym:gsm_symbolik"}, "did you mean reasoning-gym:gsm_symbolic"),
        ({"options": ("min_terms",)}, "KEY=VALUE"),
        ({"options": ("nosuch=3",)}, "nosuch"),
        ({"options": ("min_terms=-2",)}, "must be positive"),
        ({"options": ("seed=3",)}, "prompts.seed"),
        ({"options": ("min_term=3",)}, "has no setting 'min_term'; did you mean min_terms?"),
        ({"options": ("min_terms=3", "min_terms=4")}, "min_terms twice"),
        ({"options": ("min_terms=2.5",)}, "min_terms must be a whole number, got '2.5'"),
        ({"options": ("min_terms=abc",)}, "min_terms must be a whole number, got 'abc'"),
        ({"options": ("min_digits=true",)}, "min_digits must be a whole number"),
        ({"options": ("allow_negation=maybe",)}, "allow_negation must be true or false, got 'maybe'"),
        ({"options": ("max_digits=1000000",)}, "reasoning-gym:chain_sum cannot make problems with max_digits=1000000"),
        ({"source": "reasoning-gym:simple_equations", "options": ("operators=[+]",)}, "problems with operators"),
        ({"source": "reasoning-gym:simple_equations", "options": ("operators=[+,*]",)}, "in quotes"),
        ({"source": "reasoning-gym:simple_equations", "options": ("operators=+",)}, "must be a list such as"),
        ({"source": "reasoning-gym:composite", "options": ("datasets=[{name: chain_sum}]",)}, "name one of those"),
        ({"source": "reasoning-gym:word_sorting", "options": ("transformation=loud",)}, "one of lowercase, uppercase"),
        ({"source": "reasoning-gym:basic_arithmetic", "options": ("format_style=odd",)}, "one of simple, natural"),
        ({"source": "reasoning-gym:calendar_arithmetic", "options": ("tasks=[1]",)}, "a list, each part of it text"),
        ({"source": "reasoning-gym:time_intervals", "options": ("min_date=never",)}, "a date such as"),
        ({"source": "reasoning-gym:arc_agi", "options": ("board_format_opts={}",)}, "leave it out"),
        ({"split": "test"}, "leave split=test out"),
        ({"messages_field": "chat"}, "leave messages_field out"),
    ],
)
def test_what_is_refused(settings, says, tokenizer):
    with pytest.raises(ConfigError, match=says):
        load_prompts(PromptsConfig(**{"source": SUMS.source, "limit": 5, **settings}), tokenizer)


def test_options_for_another_source_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="leave options out"):
        load_prompts(PromptsConfig(source="arithmetic", limit=5, options=("min_terms=3",)), tokenizer, part="train")


def test_a_refusal_without_a_word_shows_the_options(tokenizer, monkeypatch):
    import reasoning_gym

    def refuse(*args, **settings):
        raise AssertionError

    monkeypatch.setattr(reasoning_gym, "create_dataset", refuse)
    with pytest.raises(ConfigError, match=r"reasoning-gym:chain_sum refuses min_terms=3 max_terms=4$"):
        next(gym_rows(SUMS.source, ("min_terms=3", "max_terms=4"), 0))


@pytest.mark.parametrize(
    ("source", "option", "key", "value"),
    [
        ("word_sorting", "transformation=uppercase", "transformation", "uppercase"),
        ("time_intervals", "min_time=08:30", "min_time", "08:30:00"),
        ("time_intervals", "min_date=2026-01-31", "min_date", "2026-01-31"),
        ("caesar_cipher", "delimiter=on", "delimiter", "on"),
        ("rearc", "rng_difficulty_ranges=[[0, 0.5], [0.5, 1]]", "rng_difficulty_ranges", "[(0.0, 0.5), (0.5, 1.0)]"),
        ("countdown", "operators=['+', '-']", "operators", "('+', '-')"),
        ("figlet_font", "static_word=null", "static_word", "None"),
        ("binary_alternation", "p_solvable=1", "p_solvable", "1.0"),
        ("binary_alternation", "p_solvable=5e-1", "p_solvable", "0.5"),
    ],
)
def test_options_become_what_the_task_wants(source, option, key, value):
    from reasoning_gym.factory import DATASETS

    read = read_options(source, DATASETS[source][1], (option,))[key]
    assert str(getattr(read, "value", read)) == value


def test_every_task_takes_its_own_defaults():
    """What the package's configurations start from passes the checks of types, as far as it can be written down."""
    from reasoning_gym.factory import DATASETS

    for name, (_, config) in DATASETS.items():
        for field in dataclasses.fields(config):
            if isinstance(field.default, int | float) and field.name not in ("seed", "size"):
                written = f"{field.name}={str(field.default).lower()}"
                assert read_options(name, config, (written,)) == {field.name: field.default}, (name, written)


def test_a_small_task_says_how_many_it_has(tokenizer):
    tiny = ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1")
    with pytest.raises(DataError, match="distinct problems where 5000 were asked for"):
        load_prompts(PromptsConfig(source=SUMS.source, limit=5000, options=tiny), tokenizer)


def test_endless_sources():
    assert is_endless("arithmetic")
    assert is_endless("reasoning-gym:chain_sum")
    assert not is_endless("mine.jsonl")
