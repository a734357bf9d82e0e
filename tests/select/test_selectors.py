"""Selectors: who carries loss. Each rule against a slow definition in plain Python that shares no code with it."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import online_runs
import pytest
import torch

from rocktokens import Selector, SelectorBatch, TokenMonitor, make_selector
from rocktokens.detect.measures import run_starts_lengths
from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.select.interface import Adaptive, high_divergence_window, selector_kinds, selector_of
from rocktokens.select.settings import SelectorConfig

DOCS = Path(__file__).parents[2] / "docs" / "selectors.md"


def batch(lengths=(6, 4, 9, 1), *, step=1, seed=0, vocabulary=30, limit=16, scale=1.0):
    """Rollouts with everything measured, from two random models over a small vocabulary."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    p, q = (torch.tensor(rng.normal(size=(n, vocabulary)) * scale).log_softmax(1) for _ in range(2))
    token = torch.tensor(rng.integers(vocabulary, size=n))
    rows = torch.arange(n)
    student_top, student_id = p.topk(20)
    return SelectorBatch(
        token,
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        torch.cat([torch.arange(length) for length in lengths]),
        step=step,
        length_limit=limit,
        value_N=(p.exp() * (p - q)).sum(1),
        student_entropy_N=-(p.exp() * p).sum(1),
        teacher_entropy_N=-(q.exp() * q).sum(1),
        student_logprob_N=p[rows, token],
        teacher_logprob_N=q[rows, token],
        student_top_id_Nk=student_id,
        student_top_Nk=student_top,
        teacher_at_student_top_Nk=q.gather(1, student_id),
        teacher_top_id_Nk=q.topk(20).indices,
    )


def bare(tokens, value=None) -> SelectorBatch:
    """One rollout of these tokens with nothing measured but, perhaps, its losses."""
    token_N = torch.as_tensor(tokens)
    return SelectorBatch(token_N, token_N * 0, torch.arange(len(token_N)), 1, 8, value)


# ---------------------------------------------------------------- the basic rules


def test_freeze_and_soft_weigh_the_predicted_token():
    rows = bare([3, 7, 7, 1, 3])
    assert make_selector("freeze", rocks=[7]).weights(rows).tolist() == [1, 0, 0, 1, 1]
    assert make_selector("soft", rocks=[3, 1], lam=0.25).weights(rows).tolist() == [0.25, 1, 1, 0.25, 0.25]


@pytest.mark.parametrize("seed", range(8))
def test_windows_equal_the_definition_written_out(seed):
    rows = batch((30, 1, 25, 3), seed=seed, vocabulary=20)
    hit = rows.token_N % 4 == 1
    width, tau = 3, float(rows.value_N.median())
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
    assert len(wanted) > int(hit.sum())


@pytest.mark.parametrize("seed", range(4))
def test_random_matches_number_and_run_lengths_and_spares_rocks(seed):
    rows = batch((40,) * 12, seed=seed)
    rock = torch.isin(rows.token_N, torch.tensor([1, 2, 3, 4]))
    frozen = make_selector("random", rocks=[1, 2, 3, 4]).weights(rows) == 0
    assert int(frozen.sum()) == int(rock.sum())
    assert not (frozen & rock).any()
    lengths = [sorted(run_starts_lengths(mask.numpy(), rows.rollout_N.numpy())[1]) for mask in (rock, frozen)]
    assert lengths[0] == lengths[1]


def test_random_is_drawn_from_seed_and_step():
    drawn = [
        make_selector("random", rocks=[1, 2], seed=seed).weights(batch((30,) * 5, step=step))
        for seed, step in ((3, 1), (3, 1), (3, 2), (4, 1))
    ]
    assert [torch.equal(drawn[0], other) for other in drawn] == [True, True, False, False]


def test_ties_are_broken_by_order_and_nan_comes_last():
    rows = bare([0] * 4, torch.tensor([1.0, torch.nan, 1.0, 1.0]))
    assert make_selector("divergence", keep=0.5).weights(rows).tolist() == [1, 0, 1, 0]


def test_prefix_says_where_sampling_stops():
    prefix, rows = make_selector("prefix", keep=0.3), batch(limit=10)
    assert (prefix.length(10), prefix.length(1), make_selector("uniform").length(10)) == (3, 1, 10)
    assert torch.equal(prefix.weights(rows), (rows.position_N < 3).float())


# ---------------------------------------------------------------- the published rules


def scaled(values, low=0.0, high=1.0):
    """Values from one quantile to another, clipped, as shares of the way between."""
    low, high = np.quantile(values, [low, high])
    return [min(max((value - low) / (high - low), 0), 1) for value in values]


def top(scores, share=0.3):
    """Weight 1 for the largest of the whole step."""
    kept = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: math.ceil(share * len(scores))]
    return [float(i in kept) for i in range(len(scores))]


def entropy(rows, known):
    return top(known["student_entropy"])


def divergence(rows, known):
    return top(known["value"])


def tip(rows, known):
    """The soft or of entropy and divergence."""
    return top([h + d - h * d for h, d in zip(scaled(known["student_entropy"]), scaled(known["value"]))])


def teachable(rows, known):
    """The product of disagreement and compatibility."""
    disagreement, belief = [], []
    for p, q in zip(rows.student_top_Nk.tolist(), rows.teacher_at_student_top_Nk.tolist()):
        p, q = [math.exp(x) for x in p[:16]], [math.exp(x) for x in q[:16]]
        disagreement.append(sum(b / sum(q) * math.log(b / sum(q) / (a / sum(p))) for a, b in zip(p, q)))
        belief.append(sum(q))
    return top([d * c for d, c in zip(scaled(disagreement, 0.05, 0.95), scaled(belief, 0.05, 0.95))])


def iw(rows, known):
    """Each rollout starts at one plus gamma and falls."""
    advantage, weights = [abs(q - p) for p, q in zip(known["student_logprob"], known["teacher_logprob"])], []
    for i, rollout in enumerate(known["rollout"]):
        own = [(j, a) for j, (a, r) in enumerate(zip(advantage, known["rollout"])) if r == rollout]
        weights.append(1 + 0.5 * (1 - sum(a for j, a in own if j < i) / sum(a for _, a in own)))
    return weights


def fire(rows, known):
    """Unlikely rollouts are dropped, the others weighed by both entropies."""
    means = {}
    for r in set(known["rollout"]):
        own = [x for x, s in zip(known["teacher_logprob"], known["rollout"]) if s == r]
        means[r] = sum(own) / len(own)
    dropped = set(sorted(means, key=means.get)[: math.floor(0.2 * len(means))])
    h_t, h_s = known["teacher_entropy"], known["student_entropy"]
    raw = [(1 + 1 - t / max(h_t)) * (1 + s / max(h_s)) for t, s in zip(h_t, h_s)]
    kept = [x for x, r in zip(raw, known["rollout"]) if r not in dropped]
    return [0 if r in dropped else x / (sum(kept) / len(kept)) for x, r in zip(raw, known["rollout"])]


def selectkd(rows, known):
    """Would the teacher consider the student's first choice?"""
    p_first, q_top = rows.student_top_id_Nk[:, 0].tolist(), rows.teacher_top_id_Nk.tolist()
    return [1.0 if first in best[:5] else 0.01 for first, best in zip(p_first, q_top)]


def position(rows, known):
    """A logistic curve of the place."""
    lengths = [known["rollout"].count(r) for r in known["rollout"]]
    return [0.25 + 0.75 / (1 + math.exp(-(t / n - 0.3) / 0.1)) for t, n in zip(rows.position_N.tolist(), lengths)]


DEFINITIONS = (entropy, divergence, tip, teachable, iw, fire, selectkd, position)


@pytest.mark.parametrize("lengths", [(6, 4, 9, 12, 5), (6, 4, 9, 1), (30, 20)], ids=str)
@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda rule: rule.__name__)
def test_every_published_rule_equals_its_definition(definition, lengths):
    rows = batch(lengths, seed=len(lengths), scale=0.5)
    names = ("value", "student_entropy", "teacher_entropy", "student_logprob", "teacher_logprob", "rollout")
    wanted = definition(rows, {name: getattr(rows, f"{name}_N").tolist() for name in names})
    takes_share = definition in (entropy, divergence, tip, teachable)
    selector = make_selector(definition.__name__, **({"keep": 0.3} if takes_share else {}))
    found = selector.weights(rows)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)
    assert len(set(wanted)) > 1
    assert float(found.max()) <= selector.bound


def test_iw_of_equal_models_has_nothing_before_anything():
    rows = batch()
    same = replace(rows, teacher_logprob_N=rows.student_logprob_N)
    assert torch.equal(make_selector("iw").weights(same), torch.full((len(rows),), 1.5))


def test_adakd_keeps_less_as_the_loss_falls_and_resumes_from_its_state():
    rows = batch((40,))

    def step(selector, level):
        return float(selector.weights(replace(rows, value_N=rows.value_N * level)).mean())

    selector, other = make_selector("adakd", keep=0.5), make_selector("adakd", keep=0.5)
    assert step(selector, 1.0) == step(selector, 1.0) == 0.5
    falling = [step(selector, 0.5) for _ in range(8)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.45
    other.load_state_dict(selector.state_dict())
    rising = [step(other, 5.0) for _ in range(6)]
    assert rising[-1] > falling[-1]
    assert step(selector, 5.0) == rising[0]


@pytest.mark.parametrize("name", ["tip", "teachable", "iw", "fire", "selectkd", "adakd"])
def test_a_step_without_the_measures_is_refused_in_words(name):
    with pytest.raises(ConfigError, match="did not measure"):
        make_selector(name).weights(bare([1, 2]))


# ---------------------------------------------------------------- adaptive

ROCK, LEARNER, CHEAP = 1, 2, 3
LOSSES = {
    ROCK: lambda step: 1.0,
    LEARNER: lambda step: 0.1 + 2.0 * 0.97**step,
    CHEAP: lambda step: 0.05 * (0.2 + 0.8 * 0.97**step),
}


def train(steps, losses=LOSSES, *, adaptive=None, monitor=None, start=0, seed=0, rows=60, **options):
    """Feed a monitor what a run would: every type's rows, frozen ones only where audited."""
    adaptive, monitor = adaptive or make_selector("adaptive", **options), monitor or TokenMonitor(8, half_life=20)
    rng, seen = np.random.default_rng(seed), []
    for step in range(start, start + steps):
        token = torch.from_numpy(rng.choice([ROCK, LEARNER, CHEAP], size=rows, p=[0.2, 0.2, 0.6]))
        mean = torch.tensor([losses[int(t)](step) for t in token])
        value = mean * torch.from_numpy(rng.gamma(20, 1 / 20, size=rows)).float()
        kept = adaptive.weights(SelectorBatch(token, token * 0, torch.arange(rows), step, 99)) > 0
        monitor.update(token[kept], value[kept])
        adaptive.observe(monitor)
        seen.append(adaptive.frozen)
    return adaptive, monitor, seen


def test_adaptive_freezes_nothing_where_the_run_itself_hardly_learns():
    """The fall of most rows is the measure: where it is below 30 %, a type that stays says nothing."""
    adaptive, _, _ = train(250, {**LOSSES, CHEAP: lambda step: 0.05 * (0.8 + 0.2 * 0.97**step)})
    assert 0.1 < adaptive.median_fall < 0.3
    assert adaptive.frozen == ()


def test_adaptive_freezes_only_what_and_as_much_as_it_is_allowed_to(monkeypatch):
    for allowed, expected in (((ROCK,), (ROCK,)), ((LEARNER,), ()), ((), ())):
        assert train(200, allowed=allowed)[0].frozen == expected
    assert make_selector("adaptive", allowed=[ROCK, 5]).token_ids == (ROCK, 5)
    monkeypatch.setattr(Adaptive, "MAX_POSITIONS", 0.1)
    assert train(200)[0].frozen == ()  # the rock holds 20 % of the positions


@pytest.mark.parametrize("scenario", online_runs.ADAPTIVE[:6:2], ids=lambda scenario: scenario.name)
def test_adaptive_never_freezes_what_learns(scenario):
    """A small version of benchmarks/online.py: everything learns, slowly or fast."""
    found = online_runs.simulate_adaptive(scenario, 1, types=60, steps=260, rows=300, half_life=25)
    assert found.false_freezes == 0


def test_adaptive_finds_rocks_where_the_rest_learns():
    found = online_runs.simulate_adaptive(online_runs.ADAPTIVE[6], 2, types=60, steps=260, rows=1000, half_life=25)
    assert found.false_freezes == 0
    assert found.found_rocks >= 3


def test_adaptive_audits_a_seeded_share():
    adaptive = make_selector("adaptive", audit=0.05, seed=1)
    adaptive.load_state_dict({"frozen": {ROCK: (1.0, 0.6, 0.2)}, "thawed": {}})
    rows = bare([ROCK] * 20_000)
    kept = adaptive.weights(rows)
    assert float(kept.mean()) == pytest.approx(0.05, abs=0.005)
    assert torch.equal(kept, adaptive.weights(rows))
    assert make_selector("adaptive").weights(rows).all()


def test_adaptive_thaws_what_moves_again_and_may_freeze_it_later_at_its_new_level():
    adaptive, monitor, seen = train(200, audit=0.2)
    assert not any(seen[:40])  # one half-life early, one late: nothing is known before
    assert adaptive.median_fall > 0.3
    assert adaptive.frozen == (ROCK,)
    moved = {**LOSSES, ROCK: lambda step: 0.5}
    _, _, frozen = train(150, moved, adaptive=adaptive, monitor=monitor, start=200)
    assert () in frozen[:60]
    assert adaptive.frozen == (ROCK,)
    assert adaptive.state_dict()["frozen"][ROCK][0] == pytest.approx(0.5, rel=0.15)


def test_adaptive_resumes_where_its_state_was_saved():
    first, monitor, _ = train(150)
    second, other = make_selector("adaptive"), TokenMonitor(8, half_life=20)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(monitor.state_dict())
    for adaptive, seen in ((first, monitor), (second, other)):
        train(60, adaptive=adaptive, monitor=seen, start=150, seed=9)
    assert first.state_dict() == second.state_dict()
    assert first.frozen == (ROCK,)


# ---------------------------------------------------------------- making them


def test_the_documented_example_is_ten_lines_and_works(tmp_path, monkeypatch):
    source = re.search(r"## Write your own\n\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len(source.strip().splitlines()) <= 10
    (tmp_path / "my_selectors.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    skip, rows = make_selector("my_selectors:SkipFirst", tokens=2), batch()
    assert torch.equal(skip.weights(rows), (rows.position_N >= 2).float())
    assert isinstance(selector_of(SelectorConfig(name="my_selectors:SkipFirst")), Selector)
    sys.modules.pop("my_selectors")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("frezee", {}, "did you mean 'freeze'"),
        ("freeze", {"rocks": []}, "needs a bypass list"),
        ("freeze_rocks", {"rocks": []}, "needs rocks"),
        ("soft", {"rocks": [1], "lam": 1.5}, "[0, 1]"),
        ("tip", {"keep": float("nan")}, "(0, 1]"),
        ("prefix", {"window": 2}, "no option 'window'"),
        ("adaptive", {"audit": 0}, "between 0 and 1"),
        ("teachable", {"top": 1}, "top"),
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
    assert (made.token_ids, made.lam) == ((4, 5), 0.1)
    assert selector_of(SelectorConfig(name="freeze", rocks=(9,)), rocks=[4]).token_ids == (9,)
    assert selector_of(SelectorConfig(name="random"), rocks=[4]).lam == 0
