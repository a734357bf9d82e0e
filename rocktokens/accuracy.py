"""Accuracy: the share of right rollouts of each prompt, and the interval of its mean over prompts.

Every accuracy of the package is counted and given its interval here: evaluations during training, the comparison of
regimes, the baseline of the census, the built-in worlds, the report. This module is given texts and answers; who
sampled the texts is not known here.

Shapes: P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rocktokens.errors import DataError
from rocktokens.stats import Estimate, bootstrap_estimate, wilson_interval


def right_shares(
    texts: Sequence[str], answers: Sequence[str], check: Callable[[str, str], bool], *, rollouts: int = 1
) -> NDArray[np.float64]:
    """Share of right rollouts of each prompt.

    Args:
        texts: the rollouts, prompt by prompt, `rollouts` of each.
        answers: the reference answer of each prompt.
        check: `check(text, answer)` says whether a rollout is right.
        rollouts: rollouts per prompt.
    """
    if len(texts) != len(answers) * rollouts:
        raise DataError(f"{len(answers)} prompts with {rollouts} rollouts each cannot have {len(texts)} rollouts")
    right = [bool(check(text, answers[at // rollouts])) for at, text in enumerate(texts)]
    return np.asarray(right, np.float64).reshape(len(answers), rollouts).mean(1)


def accuracy_estimate(
    share_P: ArrayLike, *, rng: np.random.Generator, resamples: int = 2000, level: float = 0.95
) -> Estimate:
    """Mean share of right rollouts with its interval over prompts.

    Bootstrap-t over prompts; Wilson's interval where every prompt has one outcome (0 or 1) or all prompts have the
    same share: a resample could then not show how far the accuracy may lie from 0, from 1 or from that share.

    Args:
        share_P: share of right rollouts of each prompt.
        rng: draws the resamples.
        resamples: how many.
        level: coverage of the interval.
    """
    shares = np.asarray(share_P, float)
    if len(shares) == 0:
        raise DataError("no prompt has an answer that can be checked: accuracy cannot be measured")
    if np.isin(shares, (0.0, 1.0)).all() or np.ptp(shares) == 0:
        found = wilson_interval(round(float(shares.sum())), len(shares), level=level)
        return found._replace(value=float(shares.mean())).within(0.0, 1.0)
    columns = [shares, np.ones_like(shares)]
    found = bootstrap_estimate(lambda s, n: s / n, columns, rng=rng, resamples=resamples, level=level)
    return found.within(0.0, 1.0)
