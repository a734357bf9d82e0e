"""Selectors: who carries loss. Known answers, a window by brute force, matched controls, a planted rock."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import online_runs
import pytest
import torch

from rocktokens import Selector, SelectorBatch, TokenMonitor, make_selector
from rocktokens.detect.measures import run_starts_lengths
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.select.adaptive import weighted_median
from rocktokens.select.by_name import selector_kinds, selector_of
from rocktokens.select.interface import high_divergence_window, overlap
from rocktokens.select.settings import SelectorConfig

DOCS = Path(__file__).parents[2] / "docs" / "selectors.md"


def batch(lengths=(6, 4, 9), *, step=1, seed=0, vocabulary=12, limit=16, losses=True):
    """Rollouts of the given lengths with random tokens and losses."""
    g = torch.Generator().manual_seed(seed)
    rollout = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    token = torch.randint(vocabulary, (len(rollout),), generator=g)
    value, entropy = (torch.rand(2, len(rollout), generator=g) * 3) if losses else (None, None)
    return SelectorBatch(token, rollout, position, step, limit, value, entropy)


def test_freeze_and_soft_weigh_the_predicted_token():
    tokens = torch.tensor([3, 7, 7, 1, 3])
    rows = SelectorBatch(tokens, torch.zeros(5, dtype=torch.long), torch.arange(5), 1, 8)
    assert make_selector("freeze", rocks=[7]).weights(rows).tolist() == [1, 0, 0, 1, 1]
    assert make_selector("soft", rocks=[3, 1], lam=0.25).weights(rows).tolist() == [0.25, 1, 1, 0.25, 0.25]


@pytest.mark.parametrize("seed", range(8))
def test_windows_equal_the_definition_written_out(seed):
    rows = batch((7, 1, 12, 3), seed=seed)
    hit = rows.token_N == 5
    width, tau = 3, 1.4
    found = high_divergence_window(hit, rows.value_N, rows.rollout_N, width=width, tau=tau)

    value, rollout = rows.value_N.tolist(), rows.rollout_N.tolist()

    def smooth(i):
        near = [value[j] for j in (i - 1, i, i + 1) if 0 <= j < len(value) and rollout[j] == rollout[i]]
        return sum(near) / len(near)

    wanted = set()
    for i in hit.nonzero().flatten().tolist():
        wanted.add(i)
        for direction in (1, -1):
            if smooth(i) < tau:
                continue
            for distance in range(1, width + 1):
                j = i + direction * distance
                if not 0 <= j < len(value) or rollout[j] != rollout[i] or smooth(j) < tau:
                    break
                wanted.add(j)
    assert set(found.nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("seed", range(4))
def test_random_matches_number_and_run_lengths_and_spares_rocks(seed):
    rows = batch((40,) * 12, seed=seed, vocabulary=30)
    rock = torch.isin(rows.token_N, torch.tensor([1, 2, 3, 4]))
    frozen = make_selector("random", rocks=[1, 2, 3, 4]).weights(rows) == 0
    assert int(frozen.sum()) == int(rock.sum())
    assert not (frozen & rock).any()
    lengths = [sorted(run_starts_lengths(mask.numpy(), rows.rollout_N.numpy())[1]) for mask in (rock, frozen)]
    assert lengths[0] == lengths[1]


def test_random_is_drawn_from_seed_and_step():
    control = make_selector("random", rocks=[1, 2], seed=3)
    first, again, later = (control.weights(batch((30,) * 5, step=step)) for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    other = make_selector("random", rocks=[1, 2], seed=4).weights(batch((30,) * 5, step=1))
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("name", "column"), [("entropy", "student_entropy_N"), ("divergence", "value_N")])
def test_top_share_keeps_the_largest_of_the_whole_step(name, column):
    rows = batch()
    weight = make_selector(name, keep=0.3).weights(rows)
    score = getattr(rows, column)
    assert int(weight.sum()) == 6  # 0.3 of 19, rounded up
    assert score[weight == 1].min() > score[weight == 0].max()


def test_ties_are_broken_by_order_and_nan_comes_last():
    value = torch.tensor([1.0, torch.nan, 1.0, 1.0])
    zeros = torch.zeros(4, dtype=torch.long)
    rows = SelectorBatch(zeros, zeros, torch.arange(4), 1, 8, value, value)
    assert make_selector("divergence", keep=0.5).weights(rows).tolist() == [1, 0, 1, 0]


def test_prefix_says_where_sampling_stops():
    prefix = make_selector("prefix", keep=0.3)
    assert prefix.length(10) == 3
    assert prefix.length(1) == 1
    assert make_selector("uniform").length(10) == 10
    rows = batch(limit=10)
    assert torch.equal(prefix.weights(rows), (rows.position_N < 3).float())


def test_overlap_of_kept_positions():
    assert overlap(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])) == pytest.approx(1 / 3)
    assert overlap(torch.ones(3), torch.ones(3)) == 1
    assert overlap(torch.zeros(3), torch.zeros(3)) == 1


# Adaptive

ROCK, LEARNER, CHEAP = 1, 2, 3


def train(adaptive, monitor, steps, losses, *, start=0, rng=None, rows=60):
    """Feed a monitor what a run would: every type's rows, frozen ones only where audited."""
    rng, seen = rng or np.random.default_rng(0), []
    for step in range(start, start + steps):
        token = torch.from_numpy(rng.choice([ROCK, LEARNER, CHEAP], size=rows, p=[0.2, 0.2, 0.6]))
        mean = torch.tensor([losses[int(t)](step) for t in token])
        value = mean * torch.from_numpy(rng.gamma(20, 1 / 20, size=rows)).float()
        kept = adaptive.weights(SelectorBatch(token, token * 0, torch.arange(rows), step, 99)) > 0
        monitor.update(token[kept], value[kept])
        adaptive.observe(monitor)
        seen.append(adaptive.frozen)
    return seen


def falling(step):
    return 0.1 + 2.0 * 0.97**step


LOSSES = {ROCK: lambda step: 1.0, LEARNER: falling, CHEAP: lambda step: 0.05 * (0.2 + 0.8 * 0.97**step)}


def test_adaptive_freezes_what_is_expensive_and_stays_and_nothing_else():
    adaptive, monitor = make_selector("adaptive"), TokenMonitor(8, half_life=20)
    train(adaptive, monitor, 40, LOSSES)
    assert adaptive.frozen == ()  # one half-life early, one late: nothing is known before
    train(adaptive, monitor, 160, LOSSES, start=40)
    assert adaptive.median_fall > 0.3
    assert adaptive.frozen == (ROCK,)


def test_adaptive_freezes_nothing_where_the_run_itself_hardly_learns():
    """The fall of most rows is the measure: where it is below 30 %, a type that stays says nothing."""
    adaptive, monitor = make_selector("adaptive"), TokenMonitor(8, half_life=20)
    slow = {**LOSSES, CHEAP: lambda step: 0.05 * (0.8 + 0.2 * 0.97**step)}
    train(adaptive, monitor, 250, slow)
    assert 0.1 < adaptive.median_fall < 0.3
    assert adaptive.frozen == ()


def test_adaptive_freezes_only_what_it_is_allowed_to():
    for allowed, expected in (((ROCK,), (ROCK,)), ((LEARNER,), ()), ((), ()), (None, (ROCK,))):
        adaptive, monitor = make_selector("adaptive", allowed=allowed), TokenMonitor(8, half_life=20)
        train(adaptive, monitor, 200, LOSSES)
        assert adaptive.frozen == expected
    assert make_selector("adaptive", allowed=[ROCK, 5]).token_ids == (ROCK, 5)


@pytest.mark.parametrize("scenario", online_runs.ADAPTIVE[:6:2], ids=lambda scenario: scenario.name)
def test_adaptive_never_freezes_what_learns(scenario):
    """A small version of benchmarks/online.py: everything learns, slowly or fast."""
    found = online_runs.simulate_adaptive(scenario, 1, types=60, steps=260, rows=300, half_life=25)
    assert found.false_freezes == 0


def test_adaptive_finds_rocks_where_the_rest_learns():
    found = online_runs.simulate_adaptive(online_runs.ADAPTIVE[6], 2, types=60, steps=260, rows=1000, half_life=25)
    assert found.false_freezes == 0
    assert found.found_rocks >= 3


def test_the_median_is_by_rows():
    falls, rows = np.array([0.9, 0.1, np.nan, 0.5]), np.array([3.0, 4.0, 100.0, 2.0])
    assert weighted_median(falls, rows) == 0.5
    assert np.isnan(weighted_median(falls[2:3], rows[2:3]))


def test_adaptive_audits_a_seeded_share():
    adaptive = make_selector("adaptive", audit=0.05, seed=1)
    adaptive.load_state_dict({"frozen": {ROCK: (1.0, 0.6, 0.2)}, "thawed": {}})
    token = torch.full((20_000,), ROCK)
    rows = SelectorBatch(token, token * 0, torch.arange(20_000), 5, 99)
    kept = adaptive.weights(rows)
    assert float(kept.mean()) == pytest.approx(0.05, abs=0.005)
    assert torch.equal(kept, adaptive.weights(rows))
    assert make_selector("adaptive").weights(rows).all()


def test_adaptive_thaws_what_moves_again_and_may_freeze_it_later_at_its_new_level():
    adaptive, monitor = make_selector("adaptive", audit=0.2), TokenMonitor(8, half_life=20)
    train(adaptive, monitor, 200, LOSSES)
    assert adaptive.frozen == (ROCK,)
    moved = {**LOSSES, ROCK: lambda step: 0.5}
    frozen = train(adaptive, monitor, 150, moved, start=200)
    assert () in frozen[:60]
    assert adaptive.frozen == (ROCK,)
    assert adaptive.state_dict()["frozen"][ROCK][0] == pytest.approx(0.5, rel=0.15)


def test_adaptive_goes_on_where_its_state_was_saved():
    first, monitor = make_selector("adaptive"), TokenMonitor(8, half_life=20)
    train(first, monitor, 150, LOSSES)
    second, other = make_selector("adaptive"), TokenMonitor(8, half_life=20)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(monitor.state_dict())
    for adaptive, seen in ((first, monitor), (second, other)):
        train(adaptive, seen, 60, LOSSES, start=150, rng=np.random.default_rng(9))
    assert first.state_dict() == second.state_dict()
    assert first.frozen == (ROCK,)


def test_adaptive_never_freezes_more_positions_than_allowed():
    adaptive, monitor = make_selector("adaptive", max_positions=0.1), TokenMonitor(8, half_life=20)
    train(adaptive, monitor, 200, LOSSES)
    assert adaptive.frozen == ()  # the rock holds 20 % of the positions


# Making them


def test_the_documented_example_is_ten_lines_and_works(tmp_path, monkeypatch):
    source = re.search(r"## Write your own\n\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len(source.strip().splitlines()) <= 10
    (tmp_path / "my_selectors.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    skip = make_selector("my_selectors:SkipFirst", tokens=2)
    assert isinstance(skip, Selector)
    rows = batch()
    assert torch.equal(skip.weights(rows), (rows.position_N >= 2).float())
    assert isinstance(selector_of(SelectorConfig(name="my_selectors:SkipFirst")), Selector)
    sys.modules.pop("my_selectors")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("frezee", {}, "did you mean 'freeze'"),
        ("freeze", {"rock": [1]}, "takes: rocks"),
        ("freeze", {"rocks": []}, "needs a bypass list"),
        ("freeze_rocks", {"rocks": []}, "needs rocks"),
        ("soft", {"rocks": [1], "lam": 1.5}, "[0, 1]"),
        ("soft", {"rocks": [1], "window": -1}, "at least 0"),
        ("entropy", {"keep": 0}, "(0, 1]"),
        ("prefix", {"keep": 2}, "(0, 1]"),
        ("prefix", {"window": 2}, "no option 'window'"),
        ("adaptive", {"audit": 0}, "between 0 and 1"),
        ("tip", {"keep": float("nan")}, "keep"),
        ("teachable", {"top": 1}, "top"),
        ("iw", {"gamma": -1}, "gamma"),
        ("fire", {"drop": 1.0}, "drop"),
        ("selectkd", {"low": 2.0}, "low"),
        ("json:dumps", {}, "not a Selector"),
        ("no_such_module:Selector", {}, "cannot be loaded"),
    ],
)
def test_mistakes_are_named(name, options, says):
    with pytest.raises(ConfigError) as error:
        make_selector(name, **options)
    assert says.lower() in str(error.value).lower()


def test_a_configuration_makes_its_selector_and_takes_rocks_from_the_run():
    for name, kind in selector_kinds().items():
        assert type(selector_of(SelectorConfig(name=name), rocks=[4, 5], bypass=[4])) is kind
    with pytest.raises(RockTokensError, match="prefix has no window"):
        SelectorConfig(name="prefix", window=2)
    made = selector_of(SelectorConfig(name="soft", lam=0.1), rocks=[4, 5])
    assert made.token_ids == (4, 5)
    assert made.lam == 0.1
    assert selector_of(SelectorConfig(name="freeze", rocks=(9,)), rocks=[4]).token_ids == (9,)
    assert selector_of(SelectorConfig(name="random"), rocks=[4]).lam == 0
