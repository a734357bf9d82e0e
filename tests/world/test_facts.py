"""The facts that the shipped default pair must show, by a real OPD run in plain PyTorch.

One run, shared with test_planted_rocks; everything else here reads its result. The same problems and seeds in every
arm, so that a ban which changes nothing changes nothing at all.
"""

from types import SimpleNamespace

import pytest
import torch
from flat_loop import LONG, QUICK, distilled

from rocktokens.world import get_world

PROBLEMS, FEW = 600, 250


@pytest.fixture(scope="module", params=[QUICK, pytest.param(LONG, marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """OPD on the default world: history, losses on fixed contexts before and after, and an accuracy function."""
    world, made = get_world("arithmetic"), distilled("arithmetic", request.param, tmp_path_factory)
    prompts = [made.tokenizer(p.prompt)["input_ids"] for p in world.problems("detection", 400, seed=0)]
    rollouts = made.loop.sample(made.student, prompts, rng=torch.Generator().manual_seed(0), **made.ends)
    token_N, (pre_N, post_N) = made.loop.score([made.before, made.student], made.teacher, rollouts)
    held_out = world.problems("causal", PROBLEMS, seed=0)

    def accuracy(model, banned=(), number=PROBLEMS):
        return made.loop.accuracy(model, made.tokenizer, held_out[:number], world.check, banned=banned)[0]

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


def test_opd_raises_accuracy_by_fifteen_points_until_the_loss_has_stopped_falling(run):
    assert 0.30 <= run.before <= 0.60
    assert run.after - run.before >= 0.15
    steps = len(run.history)
    first, last = run.history[steps * 2 // 3 : steps * 5 // 6].mean(), run.history[steps * 5 // 6 :].mean()
    assert first - last < 0.1 * (run.history[:10].mean() - last)


def test_rocks_are_enriched_and_have_not_moved_and_everything_else_has_been_learned(run):
    share_of_loss = run.post_N[run.rock_N].sum() / run.post_N.sum()
    assert share_of_loss / run.rock_N.float().mean() >= 3
    assert abs(run.post_N[run.rock_N].mean() / run.pre_N[run.rock_N].mean() - 1) < 0.15
    assert run.post_N[~run.rock_N].mean() / run.pre_N[~run.rock_N].mean() <= 0.40


@pytest.mark.parametrize("run", [pytest.param(LONG, marks=pytest.mark.slow)], indirect=True)
def test_without_the_stumbling_block_accuracy_rises(run):
    """Five points after the long run, four after the short one."""
    assert run.accuracy(run.student, run.truth.stumbling_blocks.ids) - run.after >= 0.05


def test_without_a_pillar_accuracy_falls_and_without_a_neutral_nothing_changes(run):
    after = run.accuracy(run.student, number=FEW)
    pillars, neutrals = (
        [run.accuracy(run.student, [token], FEW) - after for token in planted.ids]
        for planted in (run.truth.pillars, run.truth.neutrals)
    )
    assert max(pillars) <= -0.15, pillars
    assert max(map(abs, neutrals)) <= 0.005, neutrals
