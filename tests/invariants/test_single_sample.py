"""`certified` on the single-sample signal that other trainers record: does it hold its error rate and find the truth?

Corpora are simulated from two policies. At every position a token is drawn from the student's p and its cost recorded
as log p - log q, as a dump holds it; over many positions its mean is KL(p || q), at one it is noise of both signs.
"""

from __future__ import annotations

import numpy as np
import pytest

from rocktokens.detect.certified import p_above_mean, p_above_neighbours
from rocktokens.detect.occurrences import Occurrences
from rocktokens.stats import benjamini_hochberg

TYPES, PROMPTS, LENGTH, CORPORA, Q = 40, 150, 40, 40, 0.10


def corpus(seed: int, planted: int) -> tuple[Occurrences, float, float]:
    """A corpus in which the student draws the first `planted` types too often; and its mean cost and mean KL."""
    rng = np.random.default_rng(seed)
    frequent_V, too_often_V = rng.normal(0, 1, TYPES), np.where(np.arange(TYPES) < planted, 1.0, 0.0)
    frequent_V[:planted] = 1.0
    shape = (PROMPTS * LENGTH, TYPES)
    student_NV = frequent_V + rng.normal(0, 1.5, shape)
    teacher_NV = student_NV - too_often_V + rng.normal(0, 0.6, shape)
    log_p, log_q = (own - np.log(np.exp(own).sum(1, keepdims=True)) for own in (student_NV, teacher_NV))
    token_N = (log_p + rng.gumbel(size=shape)).argmax(1)
    cost_N = np.take_along_axis(log_p - log_q, token_N[:, None], 1)[:, 0]
    rollout_N = np.repeat(np.arange(PROMPTS), LENGTH)
    table = {
        "rollout_id": rollout_N,
        "position": np.tile(np.arange(LENGTH), PROMPTS),
        "token_id": token_N,
        "loss": cost_N,
    }
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(1).mean())
    return Occurrences.from_table(table), float(cost_N.mean()), kl


def declared(occurrences: Occurrences) -> set[int]:
    """Costly types: both tests, Benjamini-Hochberg over observed types."""
    sums = occurrences.pairs()
    p_V = np.maximum(p_above_neighbours(sums), p_above_mean(sums))
    return set(occurrences.token_ids_V[benjamini_hochberg(p_V) <= Q].tolist())


@pytest.mark.parametrize("planted", [0, 4])
def test_certified_holds_its_error_rate_on_single_samples(planted):
    false_share, recall, gaps = [], [], []
    for seed in range(CORPORA):
        occurrences, cost, kl = corpus(seed, planted)
        found = declared(occurrences)
        false_share.append(len({v for v in found if v >= planted}) / max(len(found), 1))
        recall.append(len({v for v in found if v < planted}) / max(planted, 1))
        gaps.append(cost - kl)
    # Binomial slack on the nominal rate over so many corpora.
    assert np.mean(false_share) <= Q + 2 * np.sqrt(Q * (1 - Q) / CORPORA)
    assert planted == 0 or np.mean(recall) > 0.9
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / np.sqrt(CORPORA)  # unbiased for the KL
