"""How a rollout's text is compared with the reference answer: math, exact, a regular expression, or a user's function.

check = make_checker(PromptsConfig(source="mine.jsonl"))     # check(rollout_text, answer) -> bool
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from rocktokens.errors import ConfigError
from rocktokens.prompts.gym import gym_checker, is_gym_source
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.settings import require
from rocktokens.world import get_world, world_names

Checker = Callable[[str, str], bool]

NAMED_CHECKERS = ("auto", "math", "exact", "regex", "none")
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|(?<![\d.])\.\d+)")
# A minus sign or en dash that makes a number negative; after a number it is a range or a difference.
SIGN = re.compile(r"(?<![\w)\]}])[\N{MINUS SIGN}\N{EN DASH}](?=[\d.])")
COMMAND = re.compile(r"\\text\{[^}]*\}|\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]{3,}")
GROUPED = re.compile(r"-?\d+(?:\.\d+)?|-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
TIMEOUT_SECONDS = 5  # of one symbolic comparison, and of one regular expression


def make_checker(config: PromptsConfig) -> Checker | None:
    """The function that compares a response with an answer; None: accuracy is not measured."""
    match config.checker:
        case "none":
            return None
        case "auto" if config.source in world_names():
            return get_world(config.source).check
        case "auto" if is_gym_source(config.source):
            return gym_checker(config.source)
        case "auto" | "math":
            return MathChecker()
        case "exact":
            return lambda text, answer: text.split() == answer.split()
        case "regex":
            return _regex_checker(config.pattern or "")
    return _function_by_path(config.checker)


class MathChecker:
    """math-verify where it can read both sides, the last number of each where it cannot.

    `counts` says how many comparisons each way decided, and how many neither could read (counted as wrong). A formula
    that takes longer than `TIMEOUT_SECONDS` is unreadable; math-verify can stop it only in the main thread, where every
    stage checks answers.
    """

    def __init__(self) -> None:
        # Without a signal-based timeout (outside the main thread) math-verify warns at every call.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.counts: Counter[str] = Counter(math_verify=0, last_number=0, unreadable=0)
        self._answers: dict[str, list[Any] | None] = {}
        self._known: dict[tuple[str, str], tuple[str, bool]] = {}  # sympy reads a repeated text once

    def __call__(self, text: str, answer: str) -> bool:
        if (text, answer) not in self._known:
            self._known[text, answer] = self._decide(text, answer)
        how, right = self._known[text, answer]
        self.counts[how] += 1
        return right

    def _decide(self, text: str, answer: str) -> tuple[str, bool]:
        from math_verify import verify

        expected, found = self._read_answer(answer), _read_formulas(text)
        if expected is None or found is None:
            return "unreadable", False
        if expected and found:
            return "math_verify", bool(verify(expected, found, timeout_seconds=_timeout()))
        expected_number, found_number = _last_number(answer), _last_number(text)
        if expected_number is None or found_number is None:
            return "unreadable", False
        return "last_number", expected_number == found_number

    def readable(self, answer: str) -> bool:
        """Whether an answer can be compared at all."""
        found = self._read_answer(answer)
        return bool(found) or (found is not None and _last_number(answer) is not None)

    def _read_answer(self, answer: str) -> list[Any] | None:
        if answer not in self._answers:
            # Reference answers are mostly bare LaTeX, which math-verify reads only between delimiters; a plain word
            # between them it would take for a product of letters.
            stated = answer.rpartition("####")[2].strip()
            bare = "$" not in stated and not WORD.search(COMMAND.sub(" ", stated))
            self._answers[answer] = _read_formulas(f"${stated}$" if bare else stated)
        return self._answers[answer]


def check_all(checker: Checker, pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether each text states its reference answer."""
    return [bool(checker(text, answer)) for text, answer in pairs]


def how_checked(checker: Checker | None, texts: list[str], answers: list[str | None]) -> dict[str, dict[str, int]]:
    """How many of these answers math-verify decided, how many the last number, how many were unreadable."""
    if not isinstance(checker, MathChecker):
        return {}
    before = checker.counts.copy()
    for text, answer in zip(texts, answers):
        if answer is not None:
            checker(text, answer)
    return {"checked_by": {how: checker.counts[how] - before[how] for how in checker.counts}}


def _read_formulas(text: str) -> list[Any] | None:
    """The formulas of a text; None where reading it takes too long."""
    from math_verify import parse
    from math_verify.errors import TimeoutException

    try:
        found = parse(text, parsing_timeout=_timeout(), raise_on_error=True)
    except TimeoutException:
        return None
    except Exception:  # sympy raises whatever a formula makes it stumble over; such a text holds no formula
        return []
    return [formula for formula in found if not isinstance(formula, str)]


def _timeout() -> int | None:
    return TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None


def _last_number(text: str) -> tuple[Decimal, ...] | None:
    """The last number of a text, exact however long; commas that do not group thousands make it a list of numbers."""
    found = NUMBER.findall(SIGN.sub("-", text))
    if not found:
        return None
    last = found[-1].rstrip(",")
    parts = [last.replace(",", "")] if GROUPED.fullmatch(last) else [part for part in last.split(",") if part]
    try:
        return tuple(Decimal(part) for part in parts)
    except InvalidOperation:
        return None


def _regex_checker(pattern: str) -> Checker:
    import regex

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}.") from None
    require(compiled.groups > 0, f"pattern {pattern!r} needs a group in parentheses round the answer.")

    def check(text: str, answer: str) -> bool:
        try:
            matches = list(compiled.finditer(text, timeout=TIMEOUT_SECONDS))
        except TimeoutError:
            raise ConfigError(
                f"pattern {pattern!r} took more than {TIMEOUT_SECONDS} s on one rollout: nested repeats such as (a+)+ "
                "make it try every way to match. Write it without them."
            ) from None
        return bool(matches) and (matches[-1].group(1) or "").strip() == answer.strip()

    return check


def _function_by_path(path: str) -> Checker:
    module_name, _, name = path.partition(":")
    known = f"{', '.join(NAMED_CHECKERS)}, or package.module:function"
    require(bool(name), f"no checker is called {path!r}; there are {known}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a user's own file in the directory of the command
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"checker {path}: cannot import {module_name} ({error}).") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"checker {path}: {module_name} has no function {name!r}.")
    logging.getLogger(__name__).info("answers are checked by %s of %s", name, getattr(module, "__file__", module_name))

    def check(text: str, answer: str) -> bool:
        try:
            return bool(function(text, answer))
        except Exception as error:  # somebody else's code may raise anything
            raise ConfigError(f"checker {path} failed with {type(error).__name__}: {error}.") from error

    return check
