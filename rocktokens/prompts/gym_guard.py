"""Which texts may reach the scorer of a reasoning-gym task.

Some of its scorers evaluate what a model wrote as Python (`eval`, sympy's `parse_expr`), and some count as far as the
text says. A rollout is nobody's code: for these tasks only texts that are plain arithmetic, or the answer letter by
letter, are passed on, and none that would take long; any other text is wrong without having been scored.
Some scorers give full marks to wrong answers: for these tasks only texts that are right are passed on.
tests/prompts/test_gym_guard.py looks through the installed package for scorers that are missing here.
"""

from __future__ import annotations

import ast
import cmath
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

Entry = Mapping[str, object]

MOST_CHARACTERS = 20_000  # of any stated answer
MOST_OF_A_FORMULA = 3000  # characters
MOST_DIGITS = 30  # of one number in a formula
MOST_EXPONENT = 100
MOST_WEIGHT = 5000  # digits that a formula's value may come to, and terms
MOST_DEPTH = 80  # of brackets and signs
MOST_MOVES = 2000

FORMULA_TEXT = re.compile(r"[0-9A-Za-z+\-*/(). ]*")
LONG_EXPONENT = re.compile(r"[eE][+-]?\d{4}")
MOVE_COUNT = re.compile(r"\d+")
OPERATORS: dict[type[ast.operator], Callable[[complex, complex], complex]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{name: getattr(cmath, name) for name in ("exp", "log", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{"asin": cmath.asin, "acos": cmath.acos, "atan": cmath.atan, "ln": cmath.log},
    **{"sec": lambda z: 1 / cmath.cos(z), "csc": lambda z: 1 / cmath.sin(z), "cot": lambda z: 1 / cmath.tan(z)},
}
CONSTANTS: dict[str, complex] = {"pi": math.pi, "E": math.e, "I": 1j}
ANY_CONSTANT = 0.7  # stands for an integration constant
# Off the real axis, where roots and logarithms have no jumps, and near 1, where powers neither vanish nor explode.
POINTS = (0.9 + 0.5j, 1.2 + 0.3j, 0.4 + 0.8j)
STEP = 1e-5
TOLERANCE = 1e-3
COIN_TOLERANCE = Fraction(1, 10_000)  # the scorer's own
ROUNDING = 1e-9  # of a slope, relative to the value: 64-bit floats over STEP, and some more


class NotPlain(Exception):
    """A text is no plain formula."""


def may_be_scored(task: str, stated: str | None, entry: Entry) -> bool:
    """Whether a task's scorer may see what a rollout states; a text that it may not see is wrong.

    Args:
        task: The task's name.
        stated: What the rollout gives as its answer.
        entry: The problem as the task made it.
    """
    if stated is None:
        return True
    if len(stated) > MOST_CHARACTERS:
        return False
    guard = GUARDS.get(task)
    try:
        return guard is None or guard(stated, entry)
    except (NotPlain, SyntaxError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return False


def _is_sum(stated: str, entry: Entry) -> bool:
    """Numbers, the four operations, brackets and whole powers."""
    _weigh(_formula(stated), names=False)
    return True


def _makes_24(stated: str, entry: Entry) -> bool:
    """The given numbers, each once, come to 24: the scorer takes any four numbers, and 24.9 for 24."""
    formula = _formula(stated)
    _weigh(formula, names=False)
    numbers = [node.value for node in ast.walk(formula) if isinstance(node, ast.Constant)]
    has_powers = any(isinstance(node, ast.Pow) for node in ast.walk(formula))
    given = _problem(entry)["numbers"]
    if has_powers or not isinstance(given, list) or sorted(map(str, numbers)) != sorted(map(str, given)):
        return False
    return abs(_value(formula, {}) - 24) < ROUNDING


def _is_polynomial(stated: str, entry: Entry) -> bool:
    for text in (stated, str(entry["answer"])):
        _weigh(_formula(text), names=True)
    return True


def _is_antiderivative(stated: str, entry: Entry) -> bool:
    """A plain formula whose slope is the integrand's value at some points: sympy takes minutes over many that are not.

    The scorer has the last word: it proves what is only computed here.
    """
    problem = _problem(entry)
    variable = str(problem["variable"])
    formula, integrand = _formula(stated), _formula(str(problem["integrand"]))
    for tree in (formula, integrand):
        _weigh(tree, names=True, functions=True)
    for x in POINTS:
        wanted = _value(integrand, {variable: x})
        after, before = _value(formula, {variable: x + STEP}), _value(formula, {variable: x - STEP})
        error = abs((after - before) / (2 * STEP) - wanted)
        if not error <= TOLERANCE * abs(wanted) + ROUNDING * max(1.0, abs(after)):
            return False
    return True


def _is_the_answer(stated: str, entry: Entry) -> bool:
    """Letter by letter: these scorers give full marks to nothing else, and evaluate all else for a part of them."""
    others = _problem(entry).get("valid_answers", ())
    others = others if isinstance(others, list | tuple) else ()
    return stated in (str(entry["answer"]), str(entry["answer"]).strip(), *others)


def _reference_is_a_list(stated: str, entry: Entry) -> bool:
    """The scorer evaluates its own reference."""
    return isinstance(ast.literal_eval(str(entry["answer"])), list)


def _is_the_probability(stated: str, entry: Entry) -> bool:
    """A number near the reference: the scorer also gives full marks to one that begins like it, such as 0."""
    stated = stated.replace(",", "").replace("_", "")
    if LONG_EXPONENT.search(stated):
        return False
    return abs(Fraction(stated) - Fraction(str(entry["answer"]))) <= COIN_TOLERANCE


def _few_moves(stated: str, entry: Entry) -> bool:
    """`R3` and `R+3` are three moves; so many as a text says are carried out."""
    return sum(int(count) for count in MOVE_COUNT.findall(stated)) <= MOST_MOVES


def _is_the_text(stated: str, entry: Entry) -> bool:
    """Whatever its case and spaces: these scorers take any text, or one that goes on after the answer."""
    return _letters(stated) == _letters(str(entry["answer"]))


def _are_the_words(stated: str, entry: Entry) -> bool:
    """No words after the right ones, which the scorer passes over."""
    return [word.strip() for word in stated.split(",")] == _problem(entry)["sorted_words"]


def _is_the_number(stated: str, entry: Entry) -> bool:
    """With its sign, which the scorer passes over."""
    return float(stated) == float(str(entry["answer"]))


def _is_the_number_if_one(stated: str, entry: Entry) -> bool:
    """Where the answer is a number, that number: the scorer takes any where the answer is below 0."""
    try:
        wanted = int(str(entry["answer"]))
    except ValueError:
        return True
    return int(stated) == wanted


def _is_empty_if_the_answer_is(stated: str, entry: Entry) -> bool:
    """Where an equation has no solution, no text: the scorer takes any without a number."""
    return bool(str(entry["answer"]).strip()) or not stated.strip(" \"'")


def _problem(entry: Entry) -> Entry:
    problem = entry.get("metadata")
    return problem if isinstance(problem, Mapping) else {}


def _letters(text: str) -> str:
    return "".join(text.split()).lower()


GUARDS: dict[str, Callable[[str, Entry], bool]] = {
    "countdown": _is_sum,
    "puzzle24": _makes_24,
    "polynomial_multiplication": _is_polynomial,
    "simple_integration": _is_antiderivative,
    "intermediate_integration": _is_antiderivative,
    "string_insertion": _is_the_answer,
    "spiral_matrix": _is_the_answer,
    "binary_matrix": _is_the_answer,
    "n_queens": _is_the_answer,
    "number_sorting": _reference_is_a_list,
    "coin_flip": _is_the_probability,
    "rubiks_cube": _few_moves,
    "rush_hour": _few_moves,
    "game_of_life_halting": _is_the_text,
    "spell_backward": _is_the_text,
    "letter_jumble": _is_the_text,
    "figlet_font": _is_the_text,
    "word_sorting": _are_the_words,
    "gsm_symbolic": _is_the_number,
    "calendar_arithmetic": _is_the_number_if_one,
    "polynomial_equations": _is_empty_if_the_answer_is,
}


# ---------------------------------------------------------------- formulas


def _formula(text: str) -> ast.expr:
    """A text's syntax tree; parsing it runs nothing."""
    text = text.strip()
    if len(text) > MOST_OF_A_FORMULA or not FORMULA_TEXT.fullmatch(text):
        raise NotPlain(text)
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise NotPlain(text) from None


def _weigh(node: ast.expr, *, names: bool, functions: bool = False, depth: int = 0) -> int:
    """An upper bound of a plain formula's digits and terms; NotPlain where it is none, or too big to compute.

    Args:
        node: The formula.
        names: Whether it may have symbols of one letter, and roots.
        functions: Whether it may have sin, exp and the like.
        depth: How deep in another formula it stands.
    """
    if depth > MOST_DEPTH:
        raise NotPlain("too deep")

    def inner(part: ast.expr) -> int:
        return _weigh(part, names=names, functions=functions, depth=depth + 1)

    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if not abs(number) < 10**MOST_DIGITS:
                raise NotPlain("a long number")
            weight = len(str(number))
        case ast.Name(id=name) if names and (len(name) == 1 or name in CONSTANTS):
            weight = 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            weight = inner(operand)
        case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=right) if functions:
            weight = 1 + inner(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = abs(_exponent(right, whole=not names))
            if exponent > MOST_EXPONENT:
                raise NotPlain("a high power")
            weight = math.ceil(inner(left) * max(1.0, exponent))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            weight = inner(left) + inner(right)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if functions and name in FUNCTIONS:
            weight = 1 + inner(argument)
        case _:
            raise NotPlain(ast.dump(node)[:80])
    if weight > MOST_WEIGHT:
        raise NotPlain("too big")
    return weight


def _exponent(node: ast.expr, *, whole: bool) -> float:
    """A power's exponent, which must be written as a number, or where it need not be whole, a quotient of two."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Constant(value=float() as number) if not whole:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exponent(operand, whole=whole)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if not whole:
            return _exponent(left, whole=True) / _exponent(right, whole=True)
    raise NotPlain("an exponent that is no number")


def _value(node: ast.expr, symbols: Mapping[str, complex]) -> complex:
    """A weighed formula's value; symbols that are not given are constants."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return complex(number)
        case ast.Name(id=name):
            return symbols.get(name, CONSTANTS.get(name, ANY_CONSTANT))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, symbols)
        case ast.UnaryOp(operand=operand):
            return _value(operand, symbols)
        case ast.BinOp(left=left, op=operator, right=right):
            return OPERATORS[type(operator)](_value(left, symbols), _value(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return FUNCTIONS[name](_value(argument, symbols))
    raise NotPlain(ast.dump(node)[:80])
