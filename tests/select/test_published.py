"""The published selectors against slow definitions in plain Python that share no code with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rocktokens import SelectorBatch, make_selector
from rocktokens.errors import ConfigError


def batch(lengths=(6, 4, 9, 1), *, seed=0, vocabulary=30, limit=16, scale=1.0):
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
        step=1,
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


def lists(rows):
    """A batch's columns as Python lists."""
    names = ("value_N", "student_entropy_N", "teacher_entropy_N", "student_logprob_N", "teacher_logprob_N")
    return {name[:-2]: getattr(rows, name).tolist() for name in names} | {"rollout": rows.rollout_N.tolist()}


def scaled(values):
    low, high = min(values), max(values)
    return [(value - low) / (high - low) for value in values]


def top(scores, share):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return set(order[: math.ceil(share * len(scores))])


@pytest.mark.parametrize("seed", range(3))
def test_tip_is_the_soft_or_of_entropy_and_divergence(seed):
    rows = batch(seed=seed)
    known = lists(rows)
    h, d = scaled(known["student_entropy"]), scaled(known["value"])
    wanted = [x + y - x * y for x, y in zip(h, d)]
    found = make_selector("tip", keep=0.3).weights(rows)
    assert set(found.nonzero().flatten().tolist()) == top(wanted, 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_teachable_is_the_product_of_disagreement_and_compatibility(seed):
    rows = batch((30, 20), seed=seed)
    scores = []
    for p, q in zip(rows.student_top_Nk.tolist(), rows.teacher_at_student_top_Nk.tolist()):
        p, q = [math.exp(x) for x in p[:16]], [math.exp(x) for x in q[:16]]
        divergence = sum(b / sum(q) * math.log(b / sum(q) / (a / sum(p))) for a, b in zip(p, q))
        scores.append((divergence, sum(q)))

    def clipped(values):
        low, high = np.quantile(values, [0.05, 0.95])
        return [min(max((value - low) / (high - low), 0), 1) for value in values]

    wanted = [a * b for a, b in zip(clipped([s[0] for s in scores]), clipped([s[1] for s in scores]))]
    found = make_selector("teachable", keep=0.2).weights(rows)
    assert set(found.nonzero().flatten().tolist()) == top(wanted, 0.2)


def test_iw_starts_each_rollout_at_one_plus_gamma_and_falls():
    rows = batch()
    known, wanted = lists(rows), []
    advantage = [abs(q - p) for p, q in zip(known["student_logprob"], known["teacher_logprob"])]
    for i, rollout in enumerate(known["rollout"]):
        own = [a for a, r in zip(advantage, known["rollout"]) if r == rollout]
        before = [a for j, (a, r) in enumerate(zip(advantage, known["rollout"])) if r == rollout and j < i]
        wanted.append(1 + 0.5 * (1 - sum(before) / sum(own)))
    found = make_selector("iw").weights(rows)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)
    assert found[0] == 1.5
    same = SelectorBatch(
        **{**rows.__dict__, "teacher_logprob_N": rows.student_logprob_N}
    )  # equal models: nothing lies before anything
    assert torch.equal(make_selector("iw").weights(same), torch.full((len(rows),), 1.5))


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_fire_drops_unlikely_rollouts_and_weighs_by_both_entropies(drop):
    rows = batch((6, 4, 9, 2, 5))
    known = lists(rows)
    means = {}
    for r in set(known["rollout"]):
        own = [x for x, s in zip(known["teacher_logprob"], known["rollout"]) if s == r]
        means[r] = sum(own) / len(own)
    dropped = set(sorted(means, key=means.get)[: math.floor(drop * len(means))])
    largest_t, largest_s = max(known["teacher_entropy"]), max(known["student_entropy"])
    raw = [
        (1 + 1 - t / largest_t) * (1 + s / largest_s)
        for t, s in zip(known["teacher_entropy"], known["student_entropy"])
    ]
    kept = [x for x, r in zip(raw, known["rollout"]) if r not in dropped]
    wanted = [0 if r in dropped else x / (sum(kept) / len(kept)) for x, r in zip(raw, known["rollout"])]
    found = make_selector("fire", drop=drop).weights(rows)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)
    assert len(dropped) == (1 if drop else 0)
    assert float(found.max()) <= make_selector("fire").bound


def test_selectkd_asks_whether_the_teacher_would_consider_it():
    rows = batch((40,), scale=0.3)
    p_first, q_top = rows.student_top_id_Nk[:, 0].tolist(), rows.teacher_top_id_Nk.tolist()
    wanted = [1.0 if first in best[:5] else 0.01 for first, best in zip(p_first, q_top)]
    found = make_selector("selectkd").weights(rows)
    np.testing.assert_allclose(found.numpy(), wanted)
    assert 0 < sum(w == 1 for w in wanted) < len(wanted)


def test_position_follows_its_logistic_curve():
    found = make_selector("position").weights(batch((10, 2)))
    wanted = [0.25 + 0.75 / (1 + math.exp(-(t / n - 0.3) / 0.1)) for n in (10, 2) for t in range(n)]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)


def test_adakd_keeps_less_as_the_loss_falls_and_goes_on_from_its_state():
    def step(selector, level):
        rows = batch((40,))
        return float(selector.weights(SelectorBatch(**{**rows.__dict__, "value_N": rows.value_N * level})).mean())

    selector = make_selector("adakd", keep=0.5)
    first = step(selector, 1.0)
    assert step(selector, 1.0) == first == 0.5
    falling = [step(selector, 0.5) for _ in range(8)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.45
    other = make_selector("adakd", keep=0.5)
    other.load_state_dict(selector.state_dict())
    rising = [step(other, 5.0) for _ in range(6)]
    assert rising[-1] > falling[-1]
    assert step(selector, 5.0) == rising[0]


@pytest.mark.parametrize("name", ["tip", "teachable", "iw", "fire", "selectkd", "adakd"])
def test_a_step_without_the_measures_is_refused_in_words(name):
    bare = SelectorBatch(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.long), torch.arange(2), 1, 8)
    with pytest.raises(ConfigError, match="did not measure"):
        make_selector(name).weights(bare)
