"""Corpora that break an assumption which makes testing convenient; the plain ones are tests/helpers/corpora.py's."""

from __future__ import annotations

import numpy as np
from corpora import PLAIN_LOSS, Corpus, at_the_boundary


def heavy_tails(rng, num_prompts):
    """As null, with log-normal losses of σ = 2: one occurrence in a hundred holds nearly half of the loss."""
    corpus = Corpus(rng, num_prompts)
    noise_N = np.exp(rng.normal(0, 2, len(corpus.type_N)) - 2)
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1), noise_N), []


def rare_types(rng, num_prompts):
    """As null, but half of the positions belong to types that occur in 5 to 12 prompts only, in all."""
    corpus = Corpus(rng, num_prompts, num_types=600)
    rare_of = [[] for _ in range(num_prompts)]
    for v, number in enumerate(rng.integers(5, 13, 500)):
        for p in rng.choice(num_prompts, min(num_prompts, int(number)), replace=False):
            rare_of[p].append(100 + v)
    here_N = rng.random(len(corpus.type_N)) < 0.5
    corpus.type_N = np.where(corpus.type_N >= 100, corpus.type_N % 100, corpus.type_N)
    size = len(corpus.type_N) // num_prompts
    for p in range(num_prompts):
        chosen = p * size + np.flatnonzero(here_N[p * size : (p + 1) * size])
        if rare_of[p]:
            corpus.type_N[chosen] = rng.choice(rare_of[p], len(chosen))
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1)), []


def correlated_rollouts(rng, num_prompts):
    """As null over all prompts, but a type has a level of its own in every prompt, which eight rollouts repeat."""
    corpus = Corpus(rng, num_prompts, num_rollouts=8)
    level_VP = np.exp(rng.normal(0, 1, (corpus.num_types, num_prompts)) - 0.5)
    noise_N = rng.standard_exponential(len(corpus.type_N)) * level_VP[corpus.type_N, corpus.prompt_N]
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1), noise_N), []


def rare_spikes(rng, num_prompts):
    """Eight costly types have fallen by half, but all of the fall lies in one occurrence in fifty."""
    corpus = Corpus(rng, num_prompts)
    costly = rng.choice(corpus.num_types, 8, replace=False)
    corpus.place(costly, 0.1)
    mean_V, ratio_V = corpus.constant(0.2), corpus.constant(0.4)
    mean_V[costly], ratio_V[costly] = 2.0, 1.0
    columns = corpus.losses(mean_V, ratio_V)
    spike_N = np.isin(corpus.type_N, costly) & (rng.random(len(corpus.type_N)) < 0.02)
    columns["loss_pre"] = (columns["loss_pre"] + spike_N * 100.0 * corpus.hard_P[corpus.prompt_N]).astype(np.float32)
    return columns, []


def concentrated(rng, num_prompts, rarity=1, spread=0.7):
    """Losses of which one position in fifty carries nearly all: columns, four types, and the truth about them.

    Log-normal spikes stand at one position in fifty, at one in ten of the four types, which are a tenth of the
    positions; elsewhere the loss is 0.01. With `rarity` there are so many times fewer. Everything has fallen by 60 %,
    in independent spikes.
    """
    corpus = Corpus(rng, num_prompts, hard_sd=0.5)
    own = np.arange(4)
    corpus.place(own, 0.1)
    size = len(corpus.type_N)
    own_N = np.isin(corpus.type_N, own)
    chance, other_chance = 0.1 / rarity, 0.011 / rarity
    chance_N = np.where(own_N, chance, other_chance)

    def spikes():
        height_N = np.exp(rng.normal(1.0, spread, size)) * corpus.hard_P[corpus.prompt_N]
        return 0.01 + (rng.random(size) < chance_N) * height_N

    columns = corpus.columns(spikes(), spikes() / 0.4)
    height = float(np.exp(1.0 + spread**2 / 2))
    mean_own, mean_other = 0.01 + chance * height, 0.01 + other_chance * height
    share = 0.1 * mean_own / (0.1 * mean_own + 0.9 * mean_other)
    truths = {
        "share_positions": 0.1,
        "share_loss": share,
        "enrichment": share / 0.1,
        "fall": 0.6,
    }
    return columns, own, truths


HARDER = {
    "heavy tails": heavy_tails,
    "rare types": rare_types,
    "correlated rollouts": correlated_rollouts,
    "at the boundary": at_the_boundary,
    "rare spikes": rare_spikes,
}
