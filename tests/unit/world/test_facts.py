"""The facts that the shipped default pair must show, by a real OPD run of 300 steps in plain PyTorch.

One run, about two minutes on a quiet core; everything else here reads its result. Sampled without replacement of
seeds: the same problems and seeds in every arm, so that a ban which changes nothing changes nothing at all.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from flat_loop import load_minimal_loop
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocktokens.world import get_world

STEPS = 300
PROBLEMS = 1000


@pytest.fixture(scope="module")
def run():
    """OPD on the default world: history, losses on fixed contexts before and after, and an accuracy function."""
    loop, world = load_minimal_loop(), get_world("arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(world.student_path)
    student = AutoModelForCausalLM.from_pretrained(world.student_path)
    teacher = AutoModelForCausalLM.from_pretrained(world.teacher_path)
    before = copy.deepcopy(student)
    ends = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    prompts = {
        split: [tokenizer(p.prompt)["input_ids"] for p in world.problems(split, n, seed=0)]
        for split, n in (("train", 5000), ("detection", 400))
    }
    history = loop.distil(student, teacher, prompts["train"], steps=STEPS, lr=3e-4, rollouts=64, log_every=0, **ends)
    rollouts = loop.sample(student, prompts["detection"], rng=torch.Generator().manual_seed(0), **ends)
    token_N, (pre_N, post_N) = loop.score([before, student], teacher, rollouts)
    held_out = world.problems("causal", PROBLEMS, seed=0)

    def accuracy(model, banned=()):
        return loop.accuracy(model, tokenizer, held_out, world.check, banned=banned)[0]

    return SimpleNamespace(
        truth=world.truth(),
        student=student,
        history=torch.tensor(history),
        pre_N=pre_N,
        post_N=post_N,
        rock_N=torch.isin(token_N, torch.tensor(world.truth().rocks.ids)),
        accuracy=accuracy,
        before=accuracy(before),
        after=accuracy(student),
    )


def test_opd_raises_accuracy_by_fifteen_points(run):
    assert 0.30 <= run.before <= 0.60
    assert run.after - run.before >= 0.15


def test_the_loss_has_stopped_falling(run):
    first, last = run.history[STEPS * 2 // 3 : STEPS * 5 // 6].mean(), run.history[STEPS * 5 // 6 :].mean()
    whole_fall = run.history[:10].mean() - last
    assert first - last < 0.1 * whole_fall


def test_rocks_are_enriched_and_have_not_moved(run):
    share_of_loss = run.post_N[run.rock_N].sum() / run.post_N.sum()
    assert share_of_loss / run.rock_N.float().mean() >= 3
    assert abs(run.post_N[run.rock_N].mean() / run.pre_N[run.rock_N].mean() - 1) < 0.15


def test_everything_else_has_been_learned(run):
    assert run.post_N[~run.rock_N].mean() / run.pre_N[~run.rock_N].mean() <= 0.40


def test_without_the_stumbling_block_accuracy_rises(run):
    assert run.accuracy(run.student, run.truth.stumbling_blocks.ids) - run.after >= 0.05


def test_without_a_pillar_accuracy_falls(run):
    effects = {
        token: run.accuracy(run.student, [number]) - run.after
        for token, number in zip(run.truth.pillars.tokens, run.truth.pillars.ids, strict=True)
    }
    assert max(effects.values()) <= -0.15, effects


def test_without_a_neutral_nothing_changes(run):
    effects = [run.accuracy(run.student, [number]) - run.after for number in run.truth.neutrals.ids]
    assert max(map(abs, effects)) <= 0.005, effects
