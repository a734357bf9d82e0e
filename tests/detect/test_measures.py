"""What is measured of a rock set: controls, persistence, concentration, positions, clusters; known answers."""

import corpora
import numpy as np
import oracles_detect as oracle
import pyarrow as pa
import pytest
from scipy import stats

from rocktokens import detect_rocks
from rocktokens.detect.measures import (
    cluster_of,
    costliest_positions,
    make_groups,
    matched_control,
    smallest_shares,
    variance_by_type,
)
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.settings import DetectConfig

QUICK = DetectConfig(resamples=200)
CONTEXT = DetectConfig(definition="context", k=8, resamples=300)


# Controls


def rocks(rng, rollouts=50, length=60, share=0.12):
    rock_N = rng.random(rollouts * length) < share
    rock_N[1:] |= rock_N[:-1] & (rng.random(rollouts * length - 1) < 0.4)
    return rock_N, np.repeat(np.arange(rollouts), length)


def test_loss_mass_is_matched_where_there_is_enough_and_neared_where_not(rng):
    rock_N, rollout_N = rocks(rng, rollouts=400, share=0.05)
    loss_N = np.where(rock_N, 1.5, 1.0) * rng.exponential(size=len(rock_N))
    wanted = loss_N[rock_N].sum()
    for match_loss, share, slack in ((False, 1 / 1.5, 0.05), (True, 1, 0.03)):
        chosen_N = matched_control(rock_N, rollout_N, loss_N, rng=rng, match_loss=match_loss)
        assert loss_N[chosen_N].sum() / wanted == pytest.approx(share, abs=slack)
    short_N = matched_control(rock_N, rollout_N, np.where(rock_N, 100.0, 1.0), rng=rng, match_loss=True)
    assert short_N.sum() == rock_N.sum()


def test_places_are_uniform(rng):
    rock_N, rollout_N = np.zeros(3000, bool), np.repeat(np.arange(30), 100)
    rock_N[50::100] = True
    drawn = sum(matched_control(rock_N, rollout_N, np.ones(3000), rng=rng).reshape(30, 100).sum(0) for _ in range(300))
    assert drawn[50] == 0
    assert abs(drawn[:50].sum() / drawn.sum() - 50 / 99) < 0.03


def test_too_little_room_places_what_fits(rng):
    rock_N = np.tile([True] * 6 + [False] * 3, 40)
    chosen_N = matched_control(rock_N, np.zeros(360, int), np.ones(360), rng=rng)
    assert 0 < chosen_N.sum() < rock_N.sum()
    assert not (chosen_N & rock_N).any()


# Persistence


@pytest.fixture(scope="module")
def still():
    """A run in which nothing learns: the same mean loss for every type before and after."""
    return oracle.simulate(np.random.default_rng(8), learning=1.0, num_prompts=80, num_types=400)[0]


def arms(occurrences):
    found = detect_rocks(occurrences, config=CONTEXT).tables["persistence"].to_pylist()
    return {(row["group"], row["arm"], row["step"]): row for row in found}


def test_regression_to_the_mean_is_not_called_learning(still):
    """Chosen by loss and measured again elsewhere, a group seems to fall; on fixed contexts it does not."""
    rows = arms(still)
    unchanged = [("rare high-loss", "aa_fresh", None)]
    for group in ("rocks", "rare high-loss", "random others"):
        unchanged.append((group, "checkpoint", 1))
        assert abs(rows[unchanged[-1]]["change"]) < 0.05 * rows[unchanged[-1]]["before"]
    assert all(rows[key]["change_low"] <= 0 <= rows[key]["change_high"] for key in unchanged)
    assert rows["rare high-loss", "aa_selected", None]["change"] < 0  # one checkpoint, no training at all
    chosen, measured = (half.pairs() for half in Occurrences.from_table(still).halves(0))
    before_V, after_V = (
        half.by_type(loss_S) / np.maximum(half.by_type(half.n_S), 1)
        for half, loss_S in ((chosen, chosen.pre_S), (measured, measured.loss_S))
    )
    twice_V = (chosen.by_type(chosen.n_S) >= 2) & (measured.prompts_V > 0)
    naive = np.argsort(-np.where(twice_V, before_V, -1))[8:108]
    assert after_V[naive].mean() < 0.8 * before_V[naive].mean()
    assert stats.wilcoxon(before_V[naive], after_V[naive]).pvalue < 1e-4


def test_learning_is_seen_in_those_that_learn():
    rows = arms(oracle.simulate(np.random.default_rng(9), learning=0.5)[0])
    own, other = (rows[group, "checkpoint", 1] for group in ("rocks", "random others"))
    assert own["change_low"] <= 0 <= own["change_high"]
    assert other["change_high"] < 0
    assert other["after"] / other["before"] == pytest.approx(0.5, abs=0.03)


def test_every_checkpoint_is_compared_with_the_first(still):
    keys = {name: still[name] for name in ("prompt_id", "rollout_id", "position", "token_id")}
    scales = {0: 1.0, 10: 0.9, 20: 0.6}
    rows = arms(Occurrences.read({s: pa.table({**keys, "kl": still["loss_post"] * f}) for s, f in scales.items()}))
    assert sorted(step for group, arm, step in rows if (group, arm) == ("rocks", "checkpoint")) == [10, 20]
    for step in (10, 20):
        row = rows["rocks", "checkpoint", step]
        assert row["change"] == pytest.approx((scales[step] - 1) * row["before"], rel=1e-3)


def test_groups_do_not_overlap(rng):
    count_V, mean_V = rng.integers(1, 50, 300), rng.exponential(size=300)
    groups = make_groups(np.arange(20), count_V, mean_V, rng=rng)
    members = np.concatenate(list(groups.values()))
    assert len(members) == len(np.unique(members))
    assert len(groups["rare high-loss"]) == 100
    assert count_V[groups["rare high-loss"]].min() >= 2
    assert mean_V[groups["rare high-loss"]].min() >= mean_V[groups["random others"]].max()


# Types or positions?


def test_smallest_shares_of_positions():
    loss = np.array([1.0] * 95 + [19.0] * 5)  # 5 positions hold half of the loss
    assert smallest_shares(loss) == [0.05, 0.62, 0.91]
    assert smallest_shares(np.ones(10), (0.5,)) == [0.5]
    assert np.isnan(smallest_shares(np.zeros(3))).all()
    assert smallest_shares(np.array([-5.0, 1.0]), (0.95,)) == [0.5]  # a negative log-ratio is no cost


@pytest.mark.parametrize(("by_type", "truth"), [(True, 1.0), (False, 0.0)])
def test_variance_explained_by_the_type(by_type, truth):
    rng = np.random.default_rng(0)
    columns, _ = corpora.null(rng, 60)
    level = rng.exponential(size=columns["token_id"].max() + 1)
    loss = level[columns["token_id"]] if by_type else rng.exponential(size=len(columns["token_id"]))
    chosen, measured = Occurrences.from_table({**columns, "loss_post": loss}).halves(0)
    size = len(chosen.token_ids_V)
    total_V, count_V = (np.bincount(chosen.type_N, weights=w, minlength=size) for w in (chosen.loss_post_N, None))
    found = variance_by_type((total_V + loss.mean()) / (count_V + 1), measured, QUICK)
    assert found.value == pytest.approx(truth, abs=0.03)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_the_costliest_positions_are_named_with_their_context():
    table = {
        "prompt_id": ["a"] * 4 + ["b"] * 3,
        "rollout_id": ["a/0"] * 4 + ["b/0"] * 3,
        "position": [0, 1, 2, 3, 0, 1, 2],
        "token_id": [10, 11, 12, 13, 10, 11, 14],
        "loss": [0.1, 5.0, 0.2, 0.0, 9.0, 0.3, np.nan],
    }
    occurrences, texts = [Occurrences.from_table(table)], list("ABCDE")
    names = ("prompt_id", "rollout_id", "position", "token", "before", "after")
    found = costliest_positions(occurrences, texts, 2)
    assert [row["share_loss"] for row in found] == pytest.approx([9 / 14.6, 5 / 14.6])
    wanted = [("b", "b/0", 0, "A", "", "BE"), ("a", "a/0", 1, "B", "A", "CD")]
    assert [tuple(row[name] for name in names) for row in found] == wanted
    assert len(costliest_positions(occurrences, texts, 100)) == 5  # a loss of 0 or NaN costs nothing
    assert costliest_positions(occurrences, texts, 0) == []


KINDS = {
    "math": ("$", " $", "$$", "\\(", " \\[", "\\frac", "\\boxed{", "}", "^{", " =", "+="),
    "markdown": ("\n\n", " ", "###", " **", "```", "<|im_end|>", "</s>", ".\n\n", "-", "+"),
    "discourse": ("Wait", " therefore", "Let", " So"),
    "digits": ("7", " 42", "3.14"),
    "punctuation": (",", ".", " (", "?", "\ufffd"),
    "content": ("triangle", " the", "é", "数"),
}


def test_clusters_go_by_the_text():
    found = {kind: {text: cluster_of(text) for text in texts} for kind, texts in KINDS.items()}
    assert found == {kind: dict.fromkeys(texts, kind) for kind, texts in KINDS.items()}
