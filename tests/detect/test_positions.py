"""Types or positions, and enough data: known answers."""

import corpora
import numpy as np
import pytest

from rocktokens import detect_rocks
from rocktokens.detect.certified import TypeTests, declare
from rocktokens.detect.enough import enough_data
from rocktokens.detect.pair_sums import PairSums
from rocktokens.detect.positions import costliest_positions, smallest_shares, variance_by_type
from rocktokens.detect.rocks import Occurrences
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.terminal import enough_lines, spread_lines

QUICK = {"resamples": 200}
KAPPA, Q = 0.75, 0.10


def test_smallest_shares_of_positions():
    loss = np.array([1.0] * 95 + [19.0] * 5)  # 5 positions hold half of the loss
    assert smallest_shares(loss, (0.5, 0.8, 0.95)) == [0.05, 0.62, 0.91]
    assert smallest_shares(np.ones(10), (0.5,)) == [0.5]
    assert np.isnan(smallest_shares(np.zeros(3), (0.5,))).all()
    assert smallest_shares(np.array([-5.0, 1.0]), (0.95,)) == [0.5]  # a negative log-ratio is no cost


@pytest.mark.parametrize(("by_type", "truth"), [(True, 1.0), (False, 0.0)])
def test_variance_explained_by_the_type(by_type, truth):
    rng = np.random.default_rng(0)
    columns, _ = corpora.null(rng, 60)
    level = rng.exponential(size=columns["token_id"].max() + 1)
    loss = level[columns["token_id"]] if by_type else rng.exponential(size=len(columns["token_id"]))
    occurrences = Occurrences.from_table({**columns, "loss_post": loss})
    even = occurrences.prompt_N % 2 == 0
    halves = [occurrences.take(np.flatnonzero(half)) for half in (even, ~even)]
    found = variance_by_type(*halves, rng=rng, resamples=200, level=0.95)
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
    occurrences = Occurrences.from_table(table)
    texts = ["A", "B", "C", "D", "E"]
    found = costliest_positions(occurrences, texts, 2)
    assert found["prompt_id"] == ["b", "a"]
    assert found["rollout_id"] == ["b/0", "a/0"]
    assert found["position"].tolist() == [0, 1]
    assert found["token"] == ["A", "B"]
    assert found["before"] == ["", "A"]
    assert found["after"] == ["BE", "CD"]
    assert found["share_loss"] == pytest.approx([9 / 14.6, 5 / 14.6])
    assert len(costliest_positions(occurrences, texts, 100)["token"]) == 5  # a loss of 0 or NaN costs nothing
    assert costliest_positions(occurrences, texts, 0)["token"] == []


def test_a_report_says_whether_types_or_positions_matter():
    rng = np.random.default_rng(1)
    columns, _ = corpora.null(rng, 60)
    columns["loss_post"] = np.where(rng.random(len(columns["loss_post"])) < 0.02, 5.0, 0.0)
    report = detect_rocks(columns, config=DetectConfig(**QUICK))
    assert report.concentration.a_matter_of_positions
    assert report.concentration.positions_50 == pytest.approx(0.01, abs=0.004)
    assert "single positions" in spread_lines(report)[0]
    assert any("only 30 prompts were measured" in note and "too short" in note for note in report.notes)
    assert report.positions_table().num_rows == 100
    assert len(report.facts()["concentration"]["variance_by_type"]) == 3


def halves_at(fall, num_prompts, seed):
    """One costly type that has fallen by so much; losses before and after vary independently."""
    rng = np.random.default_rng(seed)
    corpus = corpora.Corpus(rng, num_prompts)
    corpus.place(np.array([0]), 0.05)
    mean, ratio = corpus.constant(0.2), corpus.constant(0.4)
    mean[0], ratio[0] = 2.0, 1 - fall
    level = mean[corpus.type_N] * corpus.hard_P[corpus.prompt_N]
    size = len(level)
    pre = level / ratio[corpus.type_N] * rng.standard_exponential(size)
    return PairSums.of(Occurrences.from_table(corpus.columns(level * rng.standard_exponential(size), pre)))


def test_prompts_needed_are_about_what_settles_it():
    """A type that has fallen by 10 %: unclear at 30 prompts a half; at the number foretold it is mostly declared."""
    told = []
    for seed in range(30):
        halves = [halves_at(0.1, 30, [seed, half]) for half in (0, 1)]
        certified = declare(TypeTests.of(halves[0], KAPPA), Q)
        found = enough_data(*halves, certified, kappa=KAPPA, q=Q)
        if len(certified.unclear) and found.prompts_needed is not None:
            assert found.num_unclear >= found.num_in_reach >= 1
            assert found.prompts_needed > 60
            told.append(found.prompts_needed)
    assert len(told) >= 10
    enough = int(np.median(told)) // 2
    declared = [0 in declare(TypeTests.of(halves_at(0.1, enough, [99, seed]), KAPPA), Q).rocks for seed in range(20)]
    assert 0.5 <= np.mean(declared) <= 1.0


def test_a_fall_at_the_limit_is_out_of_reach():
    for seed in range(20):
        halves = [halves_at(0.25, 30, [seed, half]) for half in (0, 1)]
        certified = declare(TypeTests.of(halves[0], KAPPA), Q)
        found = enough_data(*halves, certified, kappa=KAPPA, q=Q)
        if len(certified.unclear) == 1 and found.prompts_needed is None:
            assert found.num_in_reach == 0
            return
    raise AssertionError("no corpus whose fall lies at the limit")


def test_the_command_stands_beside_the_number():
    columns, _ = corpora.at_the_boundary(np.random.default_rng(0), 60)
    report = detect_rocks(columns, config=DetectConfig(**QUICK))
    assert report.enough.num_unclear > 0
    line = enough_lines(report, "rocktokens sample RUN")[0]
    assert "unclear" in line
    assert ("rocktokens sample RUN" in line) == (report.enough.prompts_needed is not None)
