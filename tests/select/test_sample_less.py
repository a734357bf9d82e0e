"""Savings from the token record: where to cut, which prompts need fewer rollouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocktokens import make_selector
from rocktokens.errors import ConfigError, DataError
from rocktokens.select.interface import SelectorBatch
from rocktokens.select.sample_less import PRIOR_ROLLOUTS, REFERENCE_STEPS, Fewer, Merit, prefix_cut

ROCK = 9
PROMPTS = ["a"] * 4 + ["b"] * 4


def test_the_cut_is_where_the_loss_ends():
    position = np.tile(np.arange(10), 3)
    loss = np.tile([1, 1, 1, 1, 1, 0, 0, 0, 0, 0], 3)
    found = prefix_cut(position, loss, np.ones(30, bool), limit=20, coverage=1.0)
    assert found == (5, 1.0, 0.5)
    assert prefix_cut(position, loss, np.ones(30, bool), limit=20, coverage=0.6).length == 3


def test_rocks_at_the_end_do_not_hold_the_cut_back():
    position, loss = np.arange(10), np.array([1, 1, 0, 0, 0, 0, 0, 0, 0, 50.0])
    assert prefix_cut(position, loss, position < 9, limit=10).length == 2
    assert prefix_cut(position, loss, np.ones(10, bool), limit=10).length == 10


def test_a_cut_ignores_what_is_not_a_number_and_never_passes_the_limit():
    loss = np.array([1.0, np.nan, 1.0, 1.0])
    assert prefix_cut(np.arange(4), loss, np.ones(4, bool), limit=3, coverage=1.0).length == 3
    with pytest.raises(DataError, match="no loss outside the rocks"):
        prefix_cut(np.arange(4), loss, np.zeros(4, bool), limit=4)
    with pytest.raises(DataError, match="coverage"):
        prefix_cut(np.arange(4), loss, np.ones(4, bool), limit=4, coverage=0.0)


def step(selector: Fewer, losses: dict[str, float], rock_loss: float = 5.0) -> None:
    """One optimiser step in which every rollout has three rows of its prompt's loss and one rock."""
    rollout_K = torch.arange(len(PROMPTS)).repeat_interleave(4)
    token_K = torch.tensor([3, 4, 5, ROCK]).repeat(len(PROMPTS))
    value_K = torch.tensor([[losses[name]] * 3 + [rock_loss] for name in PROMPTS]).flatten()
    selector.remember(PROMPTS, rollout_K, token_K, value_K)


def test_every_rollout_is_sampled_until_there_is_something_to_compare_with():
    selector = Fewer(rocks=[ROCK])
    for number in range(REFERENCE_STEPS):
        assert selector.rollouts(PROMPTS, number + 1) is None
        step(selector, {"a": 1.0, "b": 1.0})
    assert selector.rollouts(PROMPTS, 11) == list(range(8))  # nothing has fallen: all of them


def test_fewer_are_sampled_as_the_loss_outside_the_rocks_falls():
    selector = Fewer(rocks=[ROCK])
    for _ in range(REFERENCE_STEPS):
        step(selector, {"a": 1.0, "b": 1.0})
    for _ in range(80):
        step(selector, {"a": 0.2, "b": 0.2})  # the rock's loss stays at 5
    # 0.2 of the reference is 0.4 of what earns all four: two.
    assert selector.rollouts(PROMPTS, 91) == [0, 1, 4, 5]
    for _ in range(200):
        step(selector, {"a": 1e-3, "b": 1e-3})
    assert selector.rollouts(PROMPTS, 291) == [0, 4]
    assert Fewer(rocks=[ROCK], least=3).least == 3


def test_a_hard_prompt_keeps_more_than_an_easy_one():
    selector = Fewer(rocks=[ROCK])
    for _ in range(REFERENCE_STEPS):
        step(selector, {"a": 1.0, "b": 1.0})
    for _ in range(100):
        step(selector, {"a": 0.5, "b": 0.05})
    chosen = selector.rollouts([*PROMPTS, *["new"] * 4], 111)
    assert chosen is not None
    counts = [sum(first <= place < first + 4 for place in chosen) for first in (0, 4, 8)]
    assert counts[0] > counts[2] > counts[1]  # a prompt not seen before is taken as the mean of the run
    assert PRIOR_ROLLOUTS > 0


def test_its_memory_survives_a_checkpoint(tmp_path):
    selector = Fewer(rocks=[ROCK])
    for _ in range(40):
        step(selector, {"a": 0.9, "b": 0.1})
    torch.save(selector.state_dict(), tmp_path / "state.pt")
    other = Fewer(rocks=[ROCK])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.rollouts(PROMPTS, 41) == selector.rollouts(PROMPTS, 41)
    assert other.state_dict() == selector.state_dict()


def batch(positions: int, limit: int) -> SelectorBatch:
    position_N = torch.arange(positions)
    return SelectorBatch(torch.full((positions,), 3), torch.zeros(positions).long(), position_N, 1, limit)


def test_merit_stops_sampling_at_its_cut_and_weighs_what_is_left():
    selector = make_selector("merit", rocks=[ROCK], keep=0.3)
    assert isinstance(selector, Merit)
    assert selector.length(10) == 3
    assert selector.weights(batch(10, 10)).tolist() == [1.0] * 3 + [0.0] * 7
    assert make_selector("fewer").length(10) == 10
    assert make_selector("merit", keep=39 / 80).length(80) == 39  # no rounding beyond the cut


@pytest.mark.parametrize("bad", [{"least": 0}, {"full": 0.0}, {"keep": 1.5}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Merit(**bad)
