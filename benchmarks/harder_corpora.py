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


def costly_types(corpus, number=8):
    """Some types of 2 nats at a tenth of the positions, the others at 0.2 and fallen by 60 %."""
    costly = corpus.rng.choice(corpus.num_types, number, replace=False)
    corpus.place(costly, 0.1)
    mean_V, ratio_V = corpus.constant(0.2), corpus.constant(0.4)
    mean_V[costly] = 2.0
    return costly, mean_V, ratio_V


def rare_spikes(rng, num_prompts, unequal=False):
    """Eight costly types have fallen by half, but all of the fall lies in one occurrence in fifty.

    `unequal`: of each type in another share of its occurrences, from one in ten to one in a hundred.
    """
    corpus = Corpus(rng, num_prompts)
    costly, mean_V, ratio_V = costly_types(corpus)
    ratio_V[costly] = 1.0
    columns = corpus.losses(mean_V, ratio_V)
    chance_V = corpus.constant(0)
    chance_V[costly] = np.geomspace(0.1, 0.01, 8) if unequal else 0.02
    chance_N = chance_V[corpus.type_N]
    spike_N = np.divide(2.0 * (rng.random(len(chance_N)) < chance_N), chance_N, where=chance_N > 0, out=0 * chance_N)
    columns["loss_pre"] = (columns["loss_pre"] + spike_N * corpus.hard_P[corpus.prompt_N]).astype(np.float32)
    return columns, []


def unequal_spikes(rng, num_prompts):
    """The same, of each type in another share of its occurrences."""
    return rare_spikes(rng, num_prompts, unequal=True)


def heavy_pre(noise):
    """Eight costly types have fallen by 40 %; their loss before varies by a factor with heavy tails and mean 1."""

    def make(rng, num_prompts):
        corpus = Corpus(rng, num_prompts)
        costly, mean_V, ratio_V = costly_types(corpus)
        ratio_V[costly] = 0.6
        columns = corpus.losses(mean_V, ratio_V)
        factor_N = np.where(np.isin(corpus.type_N, costly), noise(rng, len(corpus.type_N)), 1.0)
        columns["loss_pre"] = (columns["loss_pre"] * factor_N).astype(np.float32)
        return columns, []

    return make


def near_copies(rng, num_prompts, grouped=True, copies=20):
    """As correlated rollouts, but what a type costs is the template's, and each template has twenty copies.

    `num_prompts` templates would be too slow: there are a twentieth as many, 20 at least.
    """
    templates = max(20, num_prompts // copies)
    corpus = Corpus(rng, templates * copies, num_rollouts=1, hard_sd=0.1)
    template_N = corpus.prompt_N // copies
    level_VT = np.exp(rng.normal(0, 1, (corpus.num_types, templates)) - 0.5)
    noise_N = rng.standard_exponential(len(template_N)) * level_VT[corpus.type_N, template_N]
    columns = corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1), noise_N)
    return columns | ({"group_id": template_N} if grouped else {}), []


def near_copies_apart(rng, num_prompts):
    """The same without groups."""
    return near_copies(rng, num_prompts, grouped=False)


def positions(rng, num_prompts):
    """The last fifth of a rollout costs five times as much; thirty types stand there often; nothing learns."""
    corpus = Corpus(rng, num_prompts)
    late_N = corpus.position_N >= 0.8 * (corpus.position_N.max() + 1)
    dwellers = rng.choice(corpus.num_types, 30, replace=False)
    here_N = rng.random(len(late_N)) < np.where(late_N, 0.5, 0.05)
    corpus.type_N[here_N] = rng.choice(dwellers, int(here_N.sum()))
    noise_N = rng.standard_exponential(len(late_N)) * np.where(late_N, 5.0, 1.0)
    return corpus.losses(corpus.constant(PLAIN_LOSS), corpus.constant(1), noise_N), []


def many_types(rng, num_prompts):
    """Four rocks among 20,000 types."""
    corpus = Corpus(rng, num_prompts, num_types=20_000)
    rocks = rng.choice(corpus.num_types, 4, replace=False)
    corpus.place(rocks, 0.1)
    mean_V, ratio_V = rng.uniform(0.1, 0.3, corpus.num_types), rng.uniform(0.1, 0.5, corpus.num_types)
    mean_V[rocks], ratio_V[rocks] = 2.0, 1.0
    return corpus.losses(mean_V, ratio_V), rocks.tolist()


CURVES = [
    (shape, time, floor)
    for shape in ("exponential", "power law")
    for time in (0.1, 0.3, 1.0, 3.0, 10.0)
    for floor in (0.0, 0.5, 0.9)
]


def left_at(curve, times):
    """Loss at times in run lengths, relative to the start."""
    shape, time, floor = curve
    t = np.asarray(times, float) / time
    return floor + (1 - floor) * (np.exp(-t) if shape == "exponential" else 1 / (1 + t))


def learning_curves(rng, num_prompts, tails=0.0, steps=(0, 100, 200, 300)):
    """Thirty costly types, one for each curve; a rock loses less than a quarter in the run and in three more.

    Losses at two checkpoints vary independently within a tenth. `tails`: unequal spikes, log-normal levels of that σ.
    """
    corpus = Corpus(rng, num_prompts)
    costly = rng.choice(corpus.num_types, len(CURVES), replace=False)
    corpus.place(costly, 0.3)
    mean_V = corpus.constant(0.1)
    mean_V[costly] = 2.0
    size = len(corpus.type_N)
    noise_N = np.exp(rng.normal(0, tails, size) - tails**2 / 2) if tails else rng.standard_exponential(size)
    level_N = mean_V[corpus.type_N] * corpus.hard_P[corpus.prompt_N] * noise_N
    curve_VT = np.tile(left_at(("exponential", 0.5, 0.1), np.asarray(steps) / steps[-1]), (corpus.num_types, 1))
    for v, curve in zip(costly, CURVES):
        curve_VT[v] = left_at(curve, np.asarray(steps) / steps[-1])
    keys = {name: column for name, column in corpus.columns(level_N, level_N).items() if not name.startswith("loss")}
    by_step = {
        step: {**keys, "kl": (level_N * curve_VT[corpus.type_N, t] * rng.uniform(0.9, 1.1, size)).astype(np.float32)}
        for t, step in enumerate(steps)
    }
    ends = [left_at(curve, (0, 1, 4)) for curve in CURVES]
    rocks = [v for v, (start, end, later) in zip(costly.tolist(), ends) if min(end / start, later / end) > 0.75]
    return by_step, rocks


def curves_with_spikes(rng, num_prompts):
    """Learning curves with unequal spikes."""
    return learning_curves(rng, num_prompts, tails=1.2)


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
    "unequal spikes": unequal_spikes,
    "log-normal loss before": heavy_pre(lambda rng, size: np.exp(rng.normal(0, 1.5, size) - 1.125)),
    "Pareto loss before": heavy_pre(lambda rng, size: 0.5 * rng.pareto(1.5, size)),
    "near-copies, groups given": near_copies,
    "near-copies, no groups": near_copies_apart,
    "positions": positions,
    "20,000 types": many_types,
}
TAILS = ("rare spikes", "unequal spikes", "log-normal loss before", "Pareto loss before")
CURVED = {"learning curves": learning_curves, "learning curves, unequal spikes": curves_with_spikes}
