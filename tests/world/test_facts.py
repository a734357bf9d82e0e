"""The facts that the shipped default pair must show, by a real OPD run in plain PyTorch.

One run, shared with test_planted_rocks; everything else here reads its result. The same problems and seeds in every
arm, so that a ban which changes nothing changes nothing at all.
"""

from types import SimpleNamespace

import pytest
import torch
from flat_loop import LONG, QUICK, distilled

from rocktokens.world import get_world

PROBLEMS = 600


@pytest.fixture(scope="module", params=[QUICK, pytest.param(LONG, marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """OPD on the default world: history, losses on fixed contexts before and after, and an accuracy function."""
    world, made = get_world("arithmetic"), distilled("arithmetic", request.param, tmp_path_factory)
    prompts = [made.tokenizer(p.prompt)["input_ids"] for p in world.problems("detection", 400, seed=0)]
    rollouts = made.loop.sample(made.student, prompts, rng=torch.Generator().manual_seed(0), **made.ends)
    token_N, (pre_N, post_N) = made.loop.score([made.before, made.student], made.teacher, rollouts)
    held_out = world.problems("causal", PROBLEMS, seed=0)

    def accuracy(model, banned=()):
        return made.loop.accuracy(model, made.tokenizer, held_out, world.check, banned=banned)[0]

    return SimpleNamespace(
        truth=world.truth(),
        student=made.student,
        history=made.history,
        pre_N=pre_N,
        post_N=post_N,
        rock_N=torch.isin(token_N, torch.tensor(world.truth().rocks.ids)),
        accuracy=accuracy,
        before=accuracy(made.before),
        after=accuracy(made.student),
    )


def test_opd_raises_accuracy_by_fifteen_points(run):
    assert 0.30 <= run.before <= 0.60
    assert run.after - run.before >= 0.15


def test_the_loss_has_stopped_falling(run):
    steps = len(run.history)
    first, last = run.history[steps * 2 // 3 : steps * 5 // 6].mean(), run.history[steps * 5 // 6 :].mean()
    whole_fall = run.history[:10].mean() - last
    assert first - last < 0.1 * whole_fall


def test_rocks_are_enriched_and_have_not_moved(run):
    share_of_loss = run.post_N[run.rock_N].sum() / run.post_N.sum()
    assert share_of_loss / run.rock_N.float().mean() >= 3
    assert abs(run.post_N[run.rock_N].mean() / run.pre_N[run.rock_N].mean() - 1) < 0.15


def test_everything_else_has_been_learned(run):
    assert run.post_N[~run.rock_N].mean() / run.pre_N[~run.rock_N].mean() <= 0.40


@pytest.mark.parametrize("run", [pytest.param(LONG, marks=pytest.mark.slow)], indirect=True)
def test_without_the_stumbling_block_accuracy_rises(run):
    """Five points after the long run, four after the short one."""
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
