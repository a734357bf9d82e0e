"""Do rocks learn? Regression to the mean is not learning; learning is seen; A/A shows the noise."""

import numpy as np
import oracles_detect as oracle
import pytest

from rocktokens.detect.halves import split_halves
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.persistence import make_groups, persistence, type_means
from rocktokens.detect.rocks import detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError
from rocktokens.stats import wilcoxon

CONFIG = DetectConfig(definition="context", k=8, resamples=300)


def arms(report):
    return {(row.group, row.arm): row for row in report.persistence}


@pytest.fixture(scope="module")
def still():
    """A run in which nothing learns: the same mean loss for every type before and after."""
    columns, _, _ = oracle.simulate(np.random.default_rng(8), learning=1.0, num_prompts=80, num_types=400)
    return columns


def test_the_naive_comparison_sees_learning_where_there_is_none(still):
    """Select by loss at the first checkpoint, measure again at the last on other texts: regression to the mean."""
    halves = split_halves(Occurrences.from_table(still), CONFIG)
    before, after = halves.selection, halves.measurement
    size = len(before.token_ids_V)
    count_V = np.bincount(before.type_N, minlength=size)
    first_V = type_means(before.type_N, before.loss_pre_N, size)
    second_V = type_means(after.type_N, after.loss_post_N, size)
    chosen = np.argsort(-np.where(count_V >= 2, np.nan_to_num(first_V), -1))[8:108]
    chosen = chosen[np.isfinite(second_V[chosen])]
    assert second_V[chosen].mean() < 0.8 * first_V[chosen].mean()
    assert wilcoxon(first_V[chosen], second_V[chosen]) < 1e-4


def test_ours_does_not(still):
    rows = arms(detect_rocks(still, config=CONFIG))
    for group in ("rocks", "rare high-loss", "random others"):
        row = rows[group, "checkpoint"]
        assert row.change.low <= 0 <= row.change.high
        assert row.p_value > 0.01
        assert abs(row.change.value) < 0.05 * row.before.value
    apparent = rows["rare high-loss", "aa_selected"]  # one checkpoint, no training at all
    assert apparent.type_after < 0.8 * apparent.type_before
    assert apparent.p_value < 1e-4
    fresh = rows["rare high-loss", "aa_fresh"]
    assert fresh.change.low <= 0 <= fresh.change.high


def test_learning_is_seen_in_those_that_learn():
    columns, _, _ = oracle.simulate(np.random.default_rng(9), learning=0.5)
    rows = arms(detect_rocks(columns, config=CONFIG))
    assert rows["rocks", "checkpoint"].change.low <= 0 <= rows["rocks", "checkpoint"].change.high
    other = rows["random others", "checkpoint"]
    assert other.change.high < 0
    assert other.p_value < 1e-4
    assert other.share_fallen > 0.9
    assert other.after.value / other.before.value == pytest.approx(0.5, abs=0.03)


def test_every_checkpoint_is_compared_with_the_first(still):
    import pyarrow as pa

    keys = {name: still[name] for name in ("prompt_id", "rollout_id", "position", "token_id")}
    by_step = {
        step: pa.table({**keys, "kl": still["loss_post"] * scale}) for step, scale in ((0, 1), (10, 0.9), (20, 0.6))
    }
    report = detect_rocks(Occurrences.from_checkpoints(by_step), config=CONFIG)
    found = {row.step: row for row in report.persistence if row.group == "rocks" and row.arm == "checkpoint"}
    assert sorted(found) == [10, 20]
    assert found[20].change.value == pytest.approx(-0.4 * found[20].before.value, rel=1e-3)
    assert found[10].type_after == pytest.approx(0.9 * found[10].type_before, rel=1e-3)


def test_groups_do_not_overlap(rng):
    count_V, mean_V = rng.integers(1, 50, 300), rng.exponential(size=300)
    groups = make_groups(np.arange(20), count_V, mean_V, num_rare=100, rng=rng)
    members = np.concatenate(list(groups.values()))
    assert len(members) == len(np.unique(members))
    assert len(groups["rare high-loss"]) == 100
    assert count_V[groups["rare high-loss"]].min() >= 2
    assert mean_V[groups["rare high-loss"]].min() >= mean_V[groups["random others"]].max()


def test_one_checkpoint_is_refused(still):
    columns = {name: column for name, column in still.items() if name != "loss_pre"}
    occurrences = Occurrences.from_table(columns)
    unit_N = occurrences.prompt_N.astype(np.int64)
    groups = {"rocks": np.arange(4)}
    with pytest.raises(DataError, match="two checkpoints"):
        persistence(
            occurrences, occurrences, unit_N, unit_N, groups, rng=np.random.default_rng(0), resamples=100, level=0.95
        )
