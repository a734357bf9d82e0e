"""The results page of a real pair: whether the loss levels off is a test over prompts, paired."""

import numpy as np
import pyarrow as pa
import pytest
from pair_facts import levels


class Table:
    """A run that holds occurrences only: `loss_EC`, one position per prompt, at the given steps."""

    def __init__(self, steps, loss_EC):
        places = [(step, prompt) for step in range(len(steps)) for prompt in range(loss_EC.shape[1])]
        self.rows = [
            {"step": steps[e], "prompt_id": c, "loss": float(loss_EC[e, c]), "positions": 1} for e, c in places
        ]

    def query(self, _):
        return pa.Table.from_pylist(self.rows)


def curve(means, noise=0.02, prompts=60):
    rng = np.random.default_rng(0)
    return np.array(means)[:, None] + rng.gamma(2.0, 0.05, prompts) + noise * rng.normal(size=(len(means), prompts))


def test_a_loss_that_levels_off_is_told_from_one_that_falls_evenly():
    steps = [0, 6, 12, 18, 24, 30]
    level = levels(Table(steps, curve([0.5, 0.35, 0.25, 0.22, 0.21, 0.205])))
    assert level["fall_per_step"]["slowing"][1] > 0
    assert level["fall_per_step"]["first_third"][:2] == [0, 12]
    assert level["fall_per_step"]["last_third"][:2] == [18, 30]
    even = levels(Table(steps, curve([0.5, 0.44, 0.38, 0.32, 0.26, 0.20])))
    assert even["fall_per_step"]["slowing"][1] < 0 < even["fall_per_step"]["slowing"][2]


def test_losses_and_changes_are_means_over_positions():
    loss = curve([0.5, 0.4])
    found = levels(Table([0, 30], loss))
    assert [row["loss"][0] for row in found["checkpoints"]] == pytest.approx(list(loss.mean(1)))
    assert "change" not in found["checkpoints"][0]
    assert found["checkpoints"][1]["change"][0] == pytest.approx(loss[1].mean() - loss[0].mean())
    assert found["fall_per_step"] is None  # two checkpoints have no thirds
