"""What is read out of a rollout as its answer, in the many ways in which models write answers."""

from __future__ import annotations

import time

import pytest

from rocktokens.prompts.gym_answers import readings, stated_answer


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
        ("The answer is 79 - 62 - 16 = 1.", "1", "1"),
        ("Answer: 3 - 0 - 8 = \N{MINUS SIGN}5", "-5", "-5"),
        ("So \\boxed{12 \\text{ apples}} of 40", "12", "12"),
        ("<answer>1,234</answer>", "1234", "1234"),
        ("<answer>seven</answer> of 9", "9", "seven"),
        ("1,2,3", "3", "3"),
        ("The grid:\n1 2\n3 4\n", "5 6\n7 8", "1 2\n3 4"),
        ("The answer is: **yes**", "yes", "yes"),
        ("The answer is:\n\ngray", "gray", "gray"),
        ("**Answer:**\n\ngray", "gray", "gray"),
        ("**Answer**: gray", "gray", "gray"),
        ("**Final Answer:**\ngray", "gray", "gray"),
        ("### Final Answer\n\n**gray**", "gray", "gray"),
        ("The answer is **gray**.", "gray", "gray"),
        ("The answer is\n$$\n12\n$$", "12", "12"),
        ("The answer is: no, wait.\nThe answer is `gray`!", "gray", "gray"),
        (r"\boxed{\text{gray}}", "gray", "gray"),
        (r"\boxed{1{,}234}", "1234", "1234"),
        (r"\boxed{1\,234\,567}", "1234567", "1234567"),
        (r"\boxed{f{1,2}}", "2", "1"),
        ("The answer is \N{EN DASH}5.", "-5", "-5"),
        ("It is \N{MINUS SIGN}5", "-5", "-5"),
        ("Between 3\N{EN DASH}5", "5", "5"),
        ("It is 10-5", "5", "5"),
        ("the answer is .5", "0.5", "0.5"),
        ("the answer is -.5", "-0.5", "-0.5"),
        ("so 1.5.", "1.5", "1.5"),
        ("and so on...5", "5", "5"),
        ("The answer is 25 because 3 = 3", "25", "25"),
        ("The answer is 25, since 3 = 3", "25", "25"),
        ("The answer is 25. Check: 24 + 1 = 25, 3 = 3.", "25", "25"),
        ("The answer is 25 (as 5 * 4 = 20)", "25", "25"),
        ("The answer is 3 apples + 4 apples = 7 apples.", "7", "7"),
        ("The answer is approx. 25", "25", "25"),
        ("```\n1 2\n\n 3\n```", "1 2\n\n 3", "1 2\n\n 3"),
        ("All in all\n\nA+1 B-2\nC+1\n", None, "A+1 B-2\nC+1"),
        ('first {"a": 1}, then\n{\n "a": 2\n}\nas asked', None, '{\n "a": 2\n}'),
        ("so [[1,\n 0]]", "[[1, 0]]", "[[1,\n 0]]"),
        ("", None, None),
        ("<answer>1</answer> <ANSWER>2</ANSWER> <answer>3", "2", "2"),
    ],
)
def test_the_stated_answer(text, reference, wanted):
    assert stated_answer(text, reference) == wanted


@pytest.mark.parametrize(
    ("text", "reference", "also"),
    [
        ("The answer is a cat.", "cat", "a cat"),
        ("The answer is 1/4.", "0.25", "1/4"),
        ("<answer>\n  1 2\n3 4\n</answer>", "  1 2\n3 4", "  1 2\n3 4"),
        ("The answer is:\n1 2\n3 4\n\nAll rows differ.\nDone.", "1 2\n3 4", "1 2\n3 4"),
        ("<answer>```json\n[1]\n```</answer>", None, "[1]"),
        ("**a:**", "a:", "**a:**"),
    ],
)
def test_a_text_may_be_read_in_two_ways(text, reference, also):
    assert also in readings(text, reference)


LONG = ["[" * 50_000, '{"a":' * 20_000, "answer is " * 10_000, "1," * 50_000, " \n" * 50_000, "9" * 100_000]
LONG += [
    "<answer>" * 12_000,
    "\\boxed{" * 14_000,
    "\\boxed{" + "{1}" * 30_000,
    "answer:" + " " * 100_000,
    "#" * 100_000,
]
LONG += [
    "<answer>" + "9" * 100_000 + "</answer>",
    "answer is " + "9 " * 50_000,
    "final " * 15_000,
    "-." * 50_000,
    "answer is " + "for " * 25_000,
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:12])
def test_reading_takes_no_time(text):
    begun = time.process_time()
    for reference in (None, "5", "yes", "1 2\n3 4", "[1]"):
        readings(text, reference)
    assert time.process_time() - begun < 5
