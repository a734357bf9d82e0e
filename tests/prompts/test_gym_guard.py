"""Rollouts are never run: scorers of reasoning-gym that evaluate texts see plain arithmetic only, and nothing hangs."""

from __future__ import annotations

import ast
import time
from itertools import islice
from pathlib import Path

import pytest

from rocktokens.prompts.gym_guard import GUARDS, may_be_scored
from rocktokens.prompts.gym_tasks import GymAnswer, gym_checker, gym_rows

gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")

EVALUATING = ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"]
EVALUATING += ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"]
GARBAGE = ["I do not know", "I do not know.", "0", "", "-1", "None", "[]", "{}", "<answer></answer>"]
# What evaluates or imports by name, wherever it stands in the package.
DANGEROUS = {"eval", "exec", "compile", "parse_expr", "sympify", "S", "__import__", "import_module", "literal_eval"}
DANGEROUS |= {"system", "popen", "Popen", "run", "check_output", "parse_latex", "lambdify", "unsafe_load", "safe_eval"}
MODULES = {"pickle", "subprocess", "marshal", "shelve", "dill", "numexpr", "os", "importlib"}
# Modules that evaluate only what they themselves have written.
OWN_TEXT = {
    "algorithmic/number_sorting.py": {"eval"},  # the reference answer: guarded all the same
    "arithmetic/basic_arithmetic.py": {"eval"},
    "arithmetic/bitwise_arithmetic.py": {"eval"},
    "arithmetic/gsm_symbolic/generators_00_49.py": {"eval"},
    "arithmetic/gsm_symbolic/generators_50_99.py": {"eval"},
    "code/codeio.py": {"exec"},
    "code/bf.py": {"compile"},
    "code/contrib/bfit/BF-it.py": {"compile", "os"},
    "code/contrib/bfit/Compiler/Compiler.py": {"compile"},
    "data/__init__.py": {"importlib"},
    "logic/propositional_logic.py": {"parse_expr"},  # a function of its own, which evaluates nothing
}


@pytest.fixture(scope="module")
def first():
    """A task's first problem and its checker."""
    made = {}

    def get(task):
        if task not in made:
            source = f"reasoning-gym:{task}"
            made[task] = next(gym_rows(source, (), 0))[2], gym_checker(source, ())
        return made[task]

    return get


@pytest.mark.parametrize("task", EVALUATING)
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch {path}')",
        "[__import__('os').system('touch {path}')]",
        "open('{path}', 'w')",
        "(lambda: open('{path}', 'w'))()",
        "[0 for _ in [open('{path}', 'w')]]",
        "Symbol('x').func.__globals__",
        "1 + open('{path}', 'w').write('')",
    ],
)
def test_a_rollout_is_not_run(task, attack, first, tmp_path):
    answer, check = first(task)
    path = tmp_path / "ran"
    assert check(f"<answer>{attack.format(path=path)}</answer>", answer) is False
    assert not path.exists()


def test_the_reference_is_not_run_either(tmp_path):
    """A variable's name is a setting, and so is what another's settings file says."""
    code = f"__import__('pathlib').Path('{tmp_path / 'ran'}').touch()"
    for task in ("polynomial_multiplication", "number_sorting"):
        assert not may_be_scored(task, "[1]", {"answer": code, "metadata": {}})
    problem = {"variable": "x", "integrand": code}
    assert not may_be_scored("simple_integration", "x", {"answer": "x", "metadata": problem})
    assert not may_be_scored("simple_integration", "x", {"answer": "x"})


@pytest.mark.parametrize("task", [*EVALUATING, "coin_flip", "rubiks_cube", "rush_hour", "chain_sum", "power_function"])
@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9**(9**9)",
        "((((9**99)**99)**99)**99)**99",
        "x**9**9",
        "99999999!",
        "(x+y+z+w)**50",
        "1/(x+1)**20 + 1/(x+2)**20 + 1/(x+3)**20",
        "(" * 150 + "1" + ")" * 150,
        "-" * 2000 + "1",
        "9e999999999",
        "1/3e99999999",
        "R999999999999",
        "A+999999999999 B-99999999999",
        "9" * 4000,
        "9" * 100_000,
    ],
)
def test_nothing_hangs(task, text, first):
    answer, check = first(task)
    begun = time.monotonic()
    assert check(f"<answer>{text}</answer>", answer) is False
    assert time.monotonic() - begun < 20  # at once; much room for a busy machine


@pytest.mark.parametrize("task", sorted(GUARDS.keys() - {"rubiks_cube", "rush_hour", "intermediate_integration"}))
def test_right_answers_are_still_right(task):
    source = f"reasoning-gym:{task}"
    check = gym_checker(source, ())
    for _, _, answer in islice(gym_rows(source, (), 3), 12):
        assert check(f"<answer>{answer}</answer>", answer), answer
        assert not check("<answer>[7.125, 7]</answer>", answer)


@pytest.mark.parametrize("kind", range(8))
def test_right_integrals_of_every_kind_reach_the_scorer(kind):
    """sympy's proof takes seconds; here only that it is asked."""
    weights = [float(number == kind) for number in range(8)]
    for _, _, answer in islice(
        gym_rows("reasoning-gym:intermediate_integration", (f"problem_type_weights={weights}",), 0), 12
    ):
        if (
            "Integral" in answer
        ):  # the package leaves some integrals unsolved, and would take the question for an answer
            assert not may_be_scored("intermediate_integration", str(answer), answer.entry)
            continue
        assert may_be_scored("intermediate_integration", str(answer), answer.entry), answer
        assert not may_be_scored("intermediate_integration", f"1.1*({answer})", answer.entry)


@pytest.mark.parametrize(
    ("task", "reference", "metadata", "right", "wrong"),
    [
        ("game_of_life_halting", "True", {}, ["True", "true"], ["I do not know", "False", "0"]),
        ("game_of_life_halting", "False", {}, ["False", "false"], ["I do not know", "True", "0"]),
        ("puzzle24", "3*8*1*1", {"numbers": [3, 8, 1, 1]}, ["3*8*1*1", "(8/1)*3/1"], ["6*4*1*1", "3*8", "3*8*1**1"]),
        ("puzzle24", "10+10+6-2", {"numbers": [2, 6, 10, 10]}, ["10 + 10 + 6 - 2"], ["10+10+2*6/2", "2*6+10+10/1"]),
        ("puzzle24", "8*9/3*1", {"numbers": [9, 8, 3, 1]}, ["8*9/3*1"], ["8*3+1/9", "9*3-8/3-1"]),  # 24.1 and 23.3
        ("coin_flip", "0.25", {}, ["0.25", "1/4", "0.25005"], ["0", "0.2", "1/3", "I do not know", "2e-1"]),
        ("spell_backward", "alternate", {}, ["alternate", "Alternate"], ["alternates", "alternate it is", "a"]),
        ("letter_jumble", "two words", {}, ["two words", "Two words"], ["two words more", "two", "words two"]),
        ("figlet_font", "everlasting", {}, ["everlasting", "EVERLASTING"], ["everlastind", "everlastingly"]),
        ("word_sorting", "a, b", {"sorted_words": ["a", "b"]}, ["a, b", "a,b"], ["a, b, c", "b, a", "a"]),
        ("gsm_symbolic", "5", {}, ["5", "5.0"], ["-5", "5.5", "none"]),
        ("calendar_arithmetic", "-1", {"task": "recurring_event_day"}, ["-1"], ["0", "7", "none"]),
        ("calendar_arithmetic", "Friday", {"task": "weekday_of_date"}, ["Friday"], ["Monday", "0"]),
        ("polynomial_equations", "", {}, ["", '""'], ["I do not know", "0", "x"]),
    ],
)
def test_what_the_package_would_take_for_right(task, reference, metadata, right, wrong):
    answer = GymAnswer(reference, {"answer": reference, "metadata": metadata})
    check = gym_checker(f"reasoning-gym:{task}", ())
    assert [text for text in right if not check(f"<answer>{text}</answer>", answer)] == []
    assert [text for text in wrong if check(f"<answer>{text}</answer>", answer)] == []


def test_no_task_takes_just_anything():
    """Two problems of every task; a new release may bring another scorer that does."""
    from reasoning_gym.factory import DATASETS

    fooled = []
    for task in sorted(DATASETS.keys() - {"composite"}):
        source = f"reasoning-gym:{task}"
        check = gym_checker(source, ())
        for _, _, answer in islice(gym_rows(source, (), 1), 2):
            meant = {str(answer).removesuffix(".0")} if answer else {"", "<answer></answer>"}
            fooled += [(task, text, answer) for text in GARBAGE if text not in meant and check(text, answer)]
    assert not fooled


def test_other_ways_to_write_a_right_answer(first):
    answer, check = first("countdown")
    assert check(f"<answer>({answer}) * 2**0</answer>", answer) is False  # it uses other numbers
    assert check(f"<answer>({answer})</answer>", answer)
    integral, check = first("simple_integration")
    assert check(f"<answer>{str(integral).replace('C', 'c')}</answer>", integral)
    assert check(f"<answer>7 + {str(integral).replace(' + C', '')}</answer>", integral)
    entry = {"answer": "exp(2*x)/2", "metadata": {"variable": "x", "integrand": "exp(2*x)"}}
    assert may_be_scored("intermediate_integration", "E**(2*x)/2 + C", entry)
    unsolved = {"answer": "Integral(x*sin(3*x), x)", "metadata": {"variable": "x", "integrand": "x*sin(3*x)"}}
    assert may_be_scored("intermediate_integration", "-x*cos(3*x)/3 + sin(3*x)/9 + C", unsolved)
    assert may_be_scored("rubiks_cube", "R2 U' F3", {"answer": "None"})
    assert may_be_scored("coin_flip", "1/4", {"answer": "0.25"})


def test_no_scorer_that_evaluates_texts_is_missing():
    """Looks through the installed package: a new release may bring another."""
    package = Path(gym.__file__).parent
    guarded = {_module_of(task, package) for task in EVALUATING}
    found = {str(path.relative_to(package)): _dangers(path) for path in sorted(package.rglob("*.py"))}
    unknown = {
        name: dangers - OWN_TEXT.get(name, set())
        for name, dangers in found.items()
        if name not in guarded and dangers - OWN_TEXT.get(name, set())
    }
    assert not unknown, "look whether these evaluate what a model wrote; guard them in lm/gym_guard.py, or list them"
    assert all(found[name] for name in guarded)
    assert set(EVALUATING) <= set(GUARDS)


def _module_of(task: str, package: Path) -> str:
    from reasoning_gym.factory import DATASETS

    return DATASETS[task][0].__module__.removeprefix("reasoning_gym.").replace(".", "/") + ".py"


def _dangers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in DANGEROUS:
                # re.compile makes a pattern, not code
                if not (isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "re.compile"):
                    found.add(name)
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names} & MODULES
            case ast.ImportFrom(module=str(module), level=0):
                found |= {module.split(".")[0]} & MODULES
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load")):
                found.add("yaml.load")
    return found
