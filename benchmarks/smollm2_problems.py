"""Grade-school word problems from templates: endless, distinct, of one or two steps, each with a worked solution.

    problems = word_problems(4000, seed=0)      # a longer list continues a shorter one
    problems[0].prompt, problems[0].solution, problems[0].answer

A story is an opening, then at most two changes or a comparison or a sharing-out, then a question; every part has
several wordings, and so has every sentence of the solution. Nothing here is planted for anybody to find: the wording
is drawn at random, independently of the numbers. This module knows English and sums; no model, no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

LARGEST = 20  # no number on the way is larger: the task is to read a story, not to calculate

PEOPLE = {
    "she": ("Anna", "Maya", "Sara", "Lucy", "Emma", "Nina", "Ruth", "Clara", "Grace", "Julia"),
    "he": ("Tom", "Ben", "Omar", "Jack", "Leo", "Paul", "Sam", "Max", "Peter", "David"),
}
THINGS = (
    "apples", "books", "marbles", "stickers", "pencils", "cookies", "shells", "coins", "cards", "balloons",
    "stamps", "oranges", "flowers", "toy cars", "buttons", "candles",
)  # fmt: skip
HOLDERS = ("boxes", "bags", "baskets", "jars", "packs")
PLACES = ("at the market", "at school", "in the garden", "at home", "on the table", "at the fair")

OPENINGS = {
    "has": (
        "{name} has {a} {things}.",
        "{name} starts the day with {a} {things}.",
        "There are {a} {things} in {name}'s room.",
        "{name} collects {a} {things} {place}.",
    ),
    "groups": (
        "{name} has {a} {holders} with {b} {things} in each.",
        "{name} fills {a} {holders}. Each of them holds {b} {things}.",
        "There are {a} {holders} {place}, and {name} puts {b} {things} into each.",
    ),
}
CHANGES = {
    "gain": (
        "{friend} gives {him} {b} more.",
        "Then {he} buys {b} more {things}.",
        "Later {he} finds another {b} {things}.",
        "{His} aunt brings {b} more {things}.",
    ),
    "lose": (
        "{He} gives {b} of them to {friend}.",
        "Then {he} loses {b} {things}.",
        "Later {he} sells {b} of the {things}.",
        "{friend} takes away {b} of them.",
    ),
    "more": ("{friend} has {b} more {things} than {name}.", "{friend} has {b} {things} more than {he} does."),
    "fewer": ("{friend} has {b} fewer {things} than {name}.", "{friend} has {b} {things} less than {he} does."),
    "share": (
        "{He} shares them equally among {b} friends.",
        "{He} divides the {things} equally between {b} children.",
        "{He} puts all of them into {b} equal rows.",
    ),
}
QUESTIONS = {
    "now": (
        "How many {things} does {name} have now?",
        "How many {things} are there in the end?",
        "What is the number of {things} that {name} has now?",
        "Find how many {things} {name} has now.",
    ),
    "all": ("How many {things} are there in all?", "How many {things} does {name} have altogether?"),
    "friend": ("How many {things} does {friend} have?", "Find how many {things} {friend} has."),
    "each": ("How many {things} are in each part?", "How many {things} does each of them get?"),
}

SIGNS = {"gain": "+", "lose": "-", "more": "+", "fewer": "-", "share": "/", "groups": "*"}
OPENERS = ("", "", "Let's work it out. ", "We can solve this step by step. ", "Let us see. ", "Okay. ")
SECOND = ("Then ", "Next, ", "After that, ", "Now ", "So then ")
FIRST = ("First, ", "To start, ", "At first ", "")
WORKINGS = {
    "gain": ("we add {b}: {sum}. ", "{name} gets {b} more, so {sum}. ", "with {b} more there are {sum}. "),
    "lose": ("we subtract {b}: {sum}. ", "{name} has {b} less, so {sum}. ", "taking away {b} leaves {sum}. "),
    "more": ("{friend} has {b} more, so {sum}. ", "we add the {b} extra {things}: {sum}. "),
    "fewer": ("{friend} has {b} fewer, so {sum}. ", "we take {b} from {a}: {sum}. "),
    "share": ("we divide by {b}: {sum}. ", "each part is {sum}. ", "splitting {a} into {b} parts gives {sum}. "),
    "groups": ("we multiply: {sum}. ", "{a} {holders} with {b} {things} each make {sum}. ", "there are {sum} in all. "),
}
CLOSINGS = {
    "now": ("{name} has {c} {things} now.", "So {name} has {c} {things}.", "That leaves {name} with {c} {things}."),
    "all": ("There are {c} {things} in all.", "Altogether that makes {c} {things}."),
    "friend": ("{friend} has {c} {things}.", "So {friend} has {c} {things}."),
    "each": ("Each one gets {c} {things}.", "So there are {c} {things} for each."),
}
ANY_CLOSING = ("The answer is {c}.", "So the answer is {c}.", "Answer: {c}", "Therefore, the answer is {c}.")


@dataclass(frozen=True)
class WordProblem:
    """A question in words, one way to work it out, and the number that is right."""

    prompt: str
    solution: str
    answer: str
    steps: int


@dataclass(frozen=True)
class _Step:
    kind: str
    a: int
    b: int
    c: int

    @property
    def sum(self) -> str:
        return f"{self.a} {SIGNS[self.kind]} {self.b} = {self.c}"


def word_problems(count: int, *, seed: int = 0) -> list[WordProblem]:
    """The first `count` problems of a seed; no two have the same prompt."""
    return list(islice(_distinct(random.Random(f"word problems/{seed}")), count))


def _distinct(rng: random.Random) -> Iterator[WordProblem]:
    seen: set[str] = set()
    while True:
        problem = _problem(rng)
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            yield problem


def _problem(rng: random.Random) -> WordProblem:
    steps, question = _plan(rng)
    words = _words(rng)
    start = steps[0]
    opening = "groups" if start.kind == "groups" else "has"
    sentences = [rng.choice(OPENINGS[opening]).format(**words, a=start.a, b=start.b)]
    changes = [step for step in steps if step.kind != "groups"]
    sentences += [rng.choice(CHANGES[step.kind]).format(**words, b=step.b) for step in changes]
    sentences.append(rng.choice(QUESTIONS[question]).format(**words))
    answer = steps[-1].c
    return WordProblem(" ".join(sentences), _solution(rng, steps, question, words), str(answer), len(steps))


def _plan(rng: random.Random) -> tuple[list[_Step], str]:
    """The sums of a story, and what is asked: an opening with one or two steps in all."""
    grouped, more = rng.random() < 0.35, rng.random() < 0.5
    steps: list[_Step] = []
    if grouped:
        a, b = rng.randint(2, 4), rng.randint(2, 5)
        steps.append(_Step("groups", a, b, a * b))
        if not more:
            return steps, "all"
    steps += _changes(rng, steps[-1].c if steps else rng.randint(4, 14), 1 if grouped or not more else 2)
    question = {"more": "friend", "fewer": "friend", "share": "each"}.get(steps[-1].kind, "now")
    return steps, question


def _changes(rng: random.Random, total: int, count: int) -> list[_Step]:
    steps = []
    for number in range(count):
        last = number == count - 1
        parts = [n for n in range(2, 7) if total % n == 0 and total // n > 1]
        kinds = ["gain"] if total <= LARGEST - 2 else []
        kinds += ["lose"] if total >= 4 else []
        kinds += [{"gain": "more", "lose": "fewer"}[kind] for kind in kinds] if last else []
        kinds += ["share"] if last and parts else []
        kind = rng.choice(kinds)
        if kind == "share":
            b = rng.choice(parts)
            step = _Step(kind, total, b, total // b)
        elif kind in ("gain", "more"):
            b = rng.randint(2, min(9, LARGEST - total))
            step = _Step(kind, total, b, total + b)
        else:
            b = rng.randint(2, min(9, total - 2))
            step = _Step(kind, total, b, total - b)
        steps.append(step)
        total = step.c
    return steps


def _words(rng: random.Random) -> dict[str, str]:
    he = rng.choice(("he", "she"))
    name = rng.choice(PEOPLE[he])
    friend = rng.choice([person for people in PEOPLE.values() for person in people if person != name])
    him, his = ("him", "his") if he == "he" else ("her", "her")
    found = {"name": name, "friend": friend, "he": he, "He": he.title(), "him": him, "his": his, "His": his.title()}
    return found | {"things": rng.choice(THINGS), "holders": rng.choice(HOLDERS), "place": rng.choice(PLACES)}


def _solution(rng: random.Random, steps: list[_Step], question: str, words: dict[str, str]) -> str:
    text = rng.choice(OPENERS)
    for number, step in enumerate(steps):
        marker = rng.choice(SECOND if number else FIRST) if len(steps) > 1 else ""
        working = rng.choice(WORKINGS[step.kind]).format(**words, a=step.a, b=step.b, sum=step.sum)
        text += marker + working if marker else working[0].upper() + working[1:]
    return text + rng.choice((*CLOSINGS[question], *ANY_CLOSING)).format(**words, c=steps[-1].c)
