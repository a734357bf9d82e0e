"""Simulated corpora with a known truth for the calibration of detection. Imports nothing of ours.

Each kind returns columns of occurrences and the ids of its rocks. benchmarks/harder_corpora.py has harder ones.
"""

from __future__ import annotations

import numpy as np

NUM_TYPES, NUM_ROLLOUTS, LENGTH = 300, 2, 100
PLAIN_LOSS = 0.3  # nats


class Corpus:
    """Types and prompts of one corpus, before losses are drawn: Zipf frequencies and a topic for every prompt."""

    def __init__(self, rng, num_prompts, *, num_types=NUM_TYPES, num_rollouts=NUM_ROLLOUTS, hard_sd=0.5, topics=0.3):
        self.rng, self.num_prompts, self.num_types = rng, num_prompts, num_types
        size = num_rollouts * LENGTH
        self.prompt_N = np.repeat(np.arange(num_prompts), size)
        self.rollout_N = np.repeat(np.arange(num_prompts * num_rollouts), LENGTH)
        self.position_N = np.tile(np.arange(LENGTH), num_prompts * num_rollouts)
        weight = 1.0 / np.arange(1, num_types + 1)
        self.type_N = rng.choice(num_types, len(self.prompt_N), p=weight / weight.sum())
        topic_P = rng.integers(0, num_types, (num_prompts, 5))
        inside_N = rng.random(len(self.type_N)) < topics
        self.type_N[inside_N] = topic_P[self.prompt_N[inside_N], rng.integers(0, 5, int(inside_N.sum()))]
        self.hard_P = np.exp(rng.normal(0, hard_sd, num_prompts) - hard_sd**2 / 2)

    def place(self, types, share):
        """Let some types stand at a share of the positions, each as often as the others."""
        here_N = self.rng.random(len(self.type_N)) < share
        others = np.setdiff1d(np.arange(self.num_types), types)
        own_N = np.isin(self.type_N, types)
        self.type_N[own_N] = self.rng.choice(others, int(own_N.sum()))
        self.type_N[here_N] = self.rng.choice(types, int(here_N.sum()))

    def columns(self, post_N, pre_N):
        """The table that detection reads."""
        return {
            "prompt_id": self.prompt_N,
            "rollout_id": self.rollout_N,
            "position": self.position_N,
            "token_id": self.type_N,
            "loss_pre": pre_N.astype(np.float32),
            "loss_post": post_N.astype(np.float32),
        }

    def losses(self, mean_V, ratio_V, noise_N=None):
        """Loss after: mean × difficulty of the prompt × noise of mean 1. Loss before: that ÷ ratio, within a fifth."""
        noise_N = self.rng.standard_exponential(len(self.type_N)) if noise_N is None else noise_N
        post_N = mean_V[self.type_N] * self.hard_P[self.prompt_N] * noise_N
        return self.columns(post_N, post_N / ratio_V[self.type_N] * self.rng.uniform(0.8, 1.2, len(post_N)))

    def constant(self, value):
        """One number for every type."""
        return np.full(self.num_types, float(value))


def null(rng, num_prompts):
    """No type costs more than another, and nothing learns."""
    corpus = Corpus(rng, num_prompts)
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1)), []


def _learners(rng, corpus, rocks, loss_of_rocks):
    """Types other than the rocks cost 0.1 to 0.3 nats and have fallen by 50 to 90 %; rocks have not fallen."""
    mean_V, ratio_V = rng.uniform(0.1, 0.3, corpus.num_types), rng.uniform(0.1, 0.5, corpus.num_types)
    mean_V[rocks], ratio_V[rocks] = loss_of_rocks, 1.0
    return corpus.losses(mean_V, ratio_V), rocks.tolist()


def four_rocks(rng, num_prompts):
    """Four rocks of 2 nats at a tenth of the positions; everything else is cheap and learns."""
    corpus = Corpus(rng, num_prompts)
    rocks = rng.choice(corpus.num_types, 4, replace=False)
    corpus.place(rocks, 0.1)
    return _learners(rng, corpus, rocks, 2.0)


def graded_rocks(rng, num_prompts):
    """Thirty rocks of 0.6 to 3 nats at 15 % of the positions; everything else is cheap and learns."""
    corpus = Corpus(rng, num_prompts)
    rocks = rng.choice(corpus.num_types, 30, replace=False)
    corpus.place(rocks, 0.15)
    return _learners(rng, corpus, rocks, np.geomspace(0.6, 3.0, 30))


def other_shapes(rng, num_prompts):
    """Equal means, other shapes (nearly constant, exponential, one in twenty, log-normal); nothing learns."""
    corpus = Corpus(rng, num_prompts)
    size = len(corpus.type_N)
    shapes = np.stack(
        [
            rng.uniform(0.9, 1.1, size),
            rng.standard_exponential(size),
            20.0 * (rng.random(size) < 0.05),
            np.exp(rng.normal(0, 1.2, size) - 1.2**2 / 2),
        ]
    )
    shape_V = rng.integers(0, len(shapes), corpus.num_types)
    noise_N = shapes[shape_V[corpus.type_N], np.arange(size)]
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1), noise_N), []


def hard_prompts(rng, num_prompts):
    """Thirty types live in the hardest fifth of the prompts and cost no more than their neighbours; nothing learns."""
    corpus = Corpus(rng, num_prompts, hard_sd=1.0)
    hard_P = corpus.hard_P >= np.quantile(corpus.hard_P, 0.8)
    dwellers = rng.choice(corpus.num_types, 30, replace=False)
    others = np.setdiff1d(np.arange(corpus.num_types), dwellers)
    own_N = np.isin(corpus.type_N, dwellers)
    corpus.type_N[own_N] = rng.choice(others, int(own_N.sum()))
    here_N = hard_P[corpus.prompt_N] & (rng.random(len(own_N)) < 0.4)
    corpus.type_N[here_N] = rng.choice(dwellers, int(here_N.sum()))
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1)), []


def everything_learns(rng, num_prompts):
    """Types differ tenfold in cost, and all have fallen by 87 %."""
    corpus = Corpus(rng, num_prompts)
    mean_V = np.geomspace(0.1, 1.0, corpus.num_types)[rng.permutation(corpus.num_types)]
    return corpus.losses(mean_V, corpus.constant(0.13)), []


def at_the_boundary(rng, num_prompts):
    """Eight costly types have fallen by exactly a quarter, and losses before and after vary independently."""
    corpus = Corpus(rng, num_prompts)
    costly = rng.choice(corpus.num_types, 8, replace=False)
    corpus.place(costly, 0.1)
    mean_V, ratio_V = corpus.constant(0.2), corpus.constant(0.4)
    mean_V[costly], ratio_V[costly] = 2.0, 0.75
    level_N = mean_V[corpus.type_N] * corpus.hard_P[corpus.prompt_N]
    size = len(level_N)
    pre_N = level_N / ratio_V[corpus.type_N] * rng.standard_exponential(size)
    return corpus.columns(level_N * rng.standard_exponential(size), pre_N), []


KINDS = {
    "null": null,
    "four rocks": four_rocks,
    "other shapes": other_shapes,
    "hard prompts": hard_prompts,
    "everything learns": everything_learns,
    "graded rocks": graded_rocks,
}
