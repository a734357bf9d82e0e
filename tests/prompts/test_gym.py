"""reasoning-gym as a source of prompts: the same in every process, disjoint parts, answers read and compared."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from itertools import islice

import pytest
from tiny import tiny_tokenizer

from rocktokens.errors import ConfigError, DataError
from rocktokens.prompts.checkers import make_checker
from rocktokens.prompts.gym import TASKS, gym_rows, read_fraction, read_number, read_text
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import load_prompts
from rocktokens.study import qwen_recipe

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")

SUMS = "reasoning-gym:chain_sum"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_the_prompts_of_the_published_results_are_made_again():
    """Prompts of docs/results/qwen.md, beyond the first block; the digest was taken with version 0.2."""
    options = qwen_recipe().prompts.options
    rows = [[*row] for row in islice(gym_rows(SUMS, options, 0), 1300)]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12] == "19943e3a182f"


OF_ALL = """
from itertools import islice
from rocktokens.prompts.gym import TASKS, gym_rows
print([list(islice(gym_rows(f"reasoning-gym:{task}", (), 0), 3)) for task in sorted(TASKS)])
"""


def test_every_task_is_the_same_in_another_process():
    """Two hash seeds: a task that follows the order of a set would differ."""
    found = set()
    for seed in ("7", "8"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found.add(subprocess.run([sys.executable, "-c", OF_ALL], env=environment, stdout=-1, check=True).stdout)
    assert len(found) == 1
    assert len(found.pop()) > 1000


def test_prompts_are_distinct_and_parts_share_none_whatever_the_seed(tokenizer):
    texts = {}
    for part in ("train", "detection", "causal"):
        asked = [PromptsConfig(source=SUMS, limit=60, seed=seed) for seed in (0, 1)]
        first, other = (load_prompts(config, tokenizer, part=part) for config in asked)
        assert len({prompt.text for prompt in first}) == 60
        assert {p.text for p in first} != {p.text for p in other}
        texts[part] = {p.text for p in [*first, *other]}
    assert not texts["train"] & texts["detection"]
    assert not texts["train"] & texts["causal"]
    assert not texts["detection"] & texts["causal"]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_right_answers_are_right_and_others_wrong(task):
    check = make_checker(PromptsConfig(source=f"reasoning-gym:{task}"))
    rows = list(islice(gym_rows(f"reasoning-gym:{task}", (), 3), 12))
    for number, (_, _, answer) in enumerate(rows):
        for text in ("<answer>{}</answer>", "First 3, then 4.\nThe answer is {}.", "**Final answer:**\n\n{}"):
            assert check(text.format(answer), answer), (text, answer)
        other = next((own for _, _, own in rows[number + 1 :] if own != answer), "7.125 of it")
        for text in (f"<answer>{other}</answer>", f"The answer is {other}.", "", "I do not know.", "<answer></answer>"):
            assert not check(text, answer), (text, answer)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("so <answer> 7 </answer> and 9", "7"),
        ("1 + 1 = 3\n#### 1,234", "1234"),
        ("The answer is 12 apples of 40.", "12"),
        ("First 3, then 5.", "5"),
        ("nothing", None),
        ("The answer is 79 - 62 - 16 = 1.", "1"),
        ("Answer: 3 - 0 - 8 = \N{MINUS SIGN}5", "-5"),
        ("So \\boxed{12 \\text{ apples}} of 40", "12"),
        ("<answer>seven</answer> of 9", None),
        ("1,2,3", "3"),
        ("The answer is\n$$\n12\n$$", "12"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1\,234\,567}", "1234567"),
        ("The answer is \N{EN DASH}5.", "-5"),
        ("Between 3\N{EN DASH}5", "5"),
        ("It is 10-5", "5"),
        ("the answer is -.5", "-0.5"),
        ("and so on...5", "5"),
        ("The answer is 25 because 3 = 3", "25"),
        ("The answer is 25. Check: 24 + 1 = 25, 3 = 3.", "25"),
        ("The answer is 25 (as 5 * 4 = 20)", "25"),
        ("The answer is 3 apples + 4 apples = 7 apples.", "7"),
        ("The answer is approx. 25", "25"),
        ("<answer>1</answer> <ANSWER>2</ANSWER> <answer>3", "2"),
    ],
)
def test_numbers(text, wanted):
    found = read_number(text)
    assert (found if found is None else f"{found:f}") == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("words\nB, a, c\n", "b,a,c"),
        ("**Answer: yes**", "yes"),
        ("", None),
        ("The answer is:\n\ngray", "gray"),
        ("### Final Answer\n\n**gray**", "gray"),
        ("The answer is: no, wait.\nThe answer is `gray`!", "gray"),
        (r"\boxed{\text{gray}}", "gray"),
        ("```\ngray\n```", "gray"),
        ("<answer>\ngray.\n</answer> It is blue.", "gray"),
    ],
)
def test_texts(text, wanted):
    assert read_text(text) == wanted


def test_fractions():
    assert read_fraction(r"thus \boxed{\frac{1}{2}} and 3/4") == (1, 2)
    assert read_fraction("The answer is $-50/669$.") == (-50, 669)
    assert read_fraction("1/2, no: 3/4") == (3, 4)
    assert read_fraction("no idea") is None


LONG = ["answer is " * 10_000, "1," * 50_000, " \n" * 50_000, "9" * 100_000, "<answer>" * 12_000, "\\boxed{" * 14_000]
LONG += ["\\boxed{" + "{1}" * 30_000, "answer:" + " " * 100_000, "#" * 100_000, "<answer>" + "9" * 99_999 + "</answer>"]
LONG += ["answer is " + "9 " * 50_000, "final " * 15_000, "-." * 50_000, "answer is " + "for " * 25_000, "9/" * 50_000]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:12])
def test_reading_takes_no_time(text):
    begun = time.process_time()
    for read in (read_number, read_text, read_fraction):
        read(text)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": "reasoning-gym:countdown"}, "chain_sum, color_cube_rotation"),
        ({"source": "reasoning-gym:composite"}, "does not offer"),
        ({"options": ("min_terms",)}, "KEY=VALUE"),
        ({"options": ("min_term=3",)}, "one of min_terms, "),
        ({"options": ("seed=3",)}, "KEY=VALUE"),
        ({"options": ("min_terms=-2",)}, "must be positive"),
        ({"options": ("min_terms=2.5",)}, "min_terms"),
        ({"options": ("min_digits=true",)}, "min_digits"),
        ({"options": ("allow_negation=maybe",)}, "allow_negation"),
        ({"options": ("max_digits=1000000",)}, "cannot make prompts with max_digits=1000000"),
        ({"source": "reasoning-gym:simple_equations", "options": ("operators=[+,*]",)}, "quotes"),
        ({"source": "reasoning-gym:simple_equations", "options": ("operators=+",)}, r"\.operators"),
        ({"source": "arithmetic", "options": ("min_terms=3",)}, "leave options out"),
        ({"split": "test"}, "leave split=test out"),
    ],
)
def test_what_is_refused(settings, says, tokenizer):
    with pytest.raises(ConfigError, match=says):
        load_prompts(PromptsConfig(**{"source": SUMS, "limit": 5, **settings}), tokenizer)


def test_options_reach_the_task_and_a_small_task_says_how_many_it_has(tokenizer):
    config = PromptsConfig(source=SUMS, limit=10, options=("min_terms=4", "max_terms=4", "min_digits=1"))
    for prompt in load_prompts(config, tokenizer):
        assert len([word for word in prompt.text.split() if word in "+-"]) == 3
    tiny = ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1")
    with pytest.raises(DataError, match="5000"):
        load_prompts(PromptsConfig(source=SUMS, limit=5000, options=tiny), tokenizer)
