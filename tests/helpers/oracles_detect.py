"""Slow float64 definitions of detection in plain numpy and Python, and simulated corpora. Imports nothing of ours.

Loops over occurrences, one at a time, straight from docs/method.md §3 and §4; only for small data.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np


def burden(token_N, loss_N):
    """R(v) = Σ loss over v's occurrences, as a dictionary."""
    total = defaultdict(float)
    for token, loss in zip(token_N, loss_N):
        total[int(token)] += float(loss)
    return dict(total)


def encode_context(tokens, positions, at, vectors, window):
    """Distance-weighted mean of the vectors of the tokens within ±window positions, centre left out, unit length."""
    total = np.zeros(len(next(iter(vectors.values()))))
    for token, position in zip(tokens, positions):
        distance = abs(position - positions[at])
        if 0 < distance <= window:
            total += np.asarray(vectors[int(token)], float) / distance
    length = np.linalg.norm(total)
    return total / length if length > 0 else total


def consistency(rollout_N, position_N, token_N, persistent_N, vectors, window, gamma):
    """ρ(o): share of the type's other persistent occurrences whose context has a cosine >= γ; 0 when alone."""
    rows_of = defaultdict(list)
    for row, rollout in enumerate(rollout_N):
        rows_of[rollout].append(row)
    encoded = {}
    for row in np.flatnonzero(persistent_N):
        rows = rows_of[rollout_N[row]]
        tokens = [token_N[r] for r in rows]
        positions = [int(position_N[r]) for r in rows]
        encoded[row] = encode_context(tokens, positions, rows.index(row), vectors, window)
    rho = np.zeros(len(token_N))
    for row in encoded:
        others = [o for o in encoded if o != row and token_N[o] == token_N[row]]
        if others:
            rho[row] = sum(float(encoded[row] @ encoded[o]) >= gamma - 1e-5 for o in others) / len(others)
    return rho


def ccr(token_N, rock_N):
    """Rock occurrences ÷ occurrences, per type."""
    total, rocks = defaultdict(int), defaultdict(int)
    for token, rock in zip(token_N, rock_N):
        total[int(token)] += 1
        rocks[int(token)] += int(rock)
    return {token: rocks[token] / total[token] for token in total}


def geometry(token_N, grad_NV):
    """Per type: norm of the mean gradient, its cosines, contrib and share of gradient norm, by dense matrices."""
    grads = np.asarray(grad_NV, float)
    types = sorted(set(map(int, token_N)))
    mean = {v: grads[np.asarray(token_N) == v].mean(0) for v in types}
    count = {v: int((np.asarray(token_N) == v).sum()) for v in types}
    balanced, everything = sum(mean.values()), grads.sum(0)
    norm_N = np.linalg.norm(grads, axis=1)

    def cosine(a, b):
        scale = np.linalg.norm(a) * np.linalg.norm(b)
        return float(a @ b / scale) if scale > 0 else float("nan")

    return {
        v: {
            "mean_grad_norm": float(np.linalg.norm(mean[v])),
            "cos_balanced": cosine(mean[v], balanced),
            "cos_global": cosine(mean[v], everything),
            "cos_others": cosine(mean[v], balanced - mean[v]),
            "contrib": count[v] * float(np.linalg.norm(mean[v])) * cosine(mean[v], balanced),
            "grad_share": float(norm_N[np.asarray(token_N) == v].sum() / norm_N.sum()),
        }
        for v in types
    }


def hall_p(values):
    """One-sided p of "the mean is not above 0": Student's t after Hall's transformation, value by value."""
    from scipy import stats

    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    third = math.fsum((v - mean) ** 3 for v in values) / n
    if mean <= 0:
        return 1.0
    ratio, skew = mean / math.sqrt(variance), third / variance**1.5
    hall = ratio + skew * ratio**2 / 3 + skew**2 * ratio**3 / 27 + skew / (6 * n)
    return max(float(stats.t.sf(hall * math.sqrt(n), n - 1)), 0.5**n)


def contrasts(prompt_N, position_N, token_N, loss_N, token, length=100):
    """Per prompt that holds the token: mean of (its loss − mean loss of other tokens of the prompt in that fifth)."""
    found = []
    for prompt in sorted(set(prompt_N.tolist())):
        rows = [
            (5 * int(at) // length, int(t), float(loss))
            for p, at, t, loss in zip(prompt_N, position_N, token_N, loss_N)
            if p == prompt
        ]
        above = []
        for fifth, kind, loss in rows:
            if kind == token:
                near = [other for own, t, other in rows if t != token and own == fifth]
                near = near or [other for _, t, other in rows if t != token]
                above.append(loss - sum(near) / len(near))
        if above:
            found.append(sum(above) / len(above))
    return found


def leftovers(prompt_N, token_N, pre_N, post_N, token, kappa):
    """Per prompt that holds the token: Σ (loss after − κ · loss before)."""
    found = defaultdict(float)
    for prompt, other, pre, post in zip(prompt_N, token_N, pre_N, post_N):
        if other == token:
            found[int(prompt)] += float(post) - kappa * float(pre)
    return list(found.values())


def simulate(
    rng,
    *,
    num_prompts=60,
    num_rollouts=2,
    length=100,
    num_types=200,
    vocab=1000,
    num_rocks=8,
    rock_loss=2.0,
    rock_share=0.15,
    learning=0.5,
    prompt_sd=0.5,
    topics=0.3,
    types_rng=None,
):
    """A corpus with planted rocks: columns, the rocks' ids, and the mean loss of every type.

    Zipf-distributed types; rocks come in fixed surroundings (two templates each) and cost `rock_loss` before and after;
    other types cost 0.1 to 0.3 after and 1 / learning times that before. Prompts differ in how hard they are by a
    log-normal factor, and a share `topics` of each prompt's tokens comes from a topic of its own. `types_rng` draws
    what belongs to types, so that several corpora can come from one population.
    """
    types_rng = rng if types_rng is None else types_rng
    rows = num_prompts * num_rollouts * length
    token_id = np.sort(types_rng.choice(vocab, num_types, replace=False))
    rocks, common = np.arange(num_rocks), np.arange(num_rocks, num_types)
    mean = np.where(np.arange(num_types) < num_rocks, rock_loss, types_rng.uniform(0.1, 0.3, num_types))
    template = types_rng.choice(common, (num_rocks, 2, 9))
    weight = 1.0 / np.arange(1, len(common) + 1)
    kind = rng.choice(common, rows, p=weight / weight.sum()).astype(np.int32)
    prompt = np.repeat(np.arange(num_prompts, dtype=np.int32), num_rollouts * length)
    topic = rng.choice(common, (num_prompts, 5))
    from_topic = rng.random(rows, dtype=np.float32) < topics
    kind[from_topic] = topic[prompt[from_topic], rng.integers(0, 5, int(from_topic.sum()))]
    position = np.tile(np.arange(length, dtype=np.int32), num_prompts * num_rollouts)
    if num_rocks:
        _plant(rng, kind, position, length, rocks, common, rock_share, template)
    hard = np.exp(rng.normal(0, prompt_sd, num_prompts) - prompt_sd**2 / 2)
    level = mean[kind] * hard[prompt]
    post = (level * rng.standard_exponential(rows, dtype=np.float32)).astype(np.float32)
    fallen = np.where(kind < num_rocks, 1.0, 1.0 / learning)
    pre = (post * fallen * rng.uniform(0.8, 1.2, rows)).astype(np.float32)
    columns = {
        "prompt_id": prompt,
        "rollout_id": np.repeat(np.arange(num_prompts * num_rollouts, dtype=np.int32), length),
        "position": position,
        "token_id": token_id[kind],
        "loss_pre": pre,
        "loss_post": post,
        "grad_norm": np.sqrt(post),
    }
    return columns, token_id[rocks], dict(zip(token_id.tolist(), mean.tolist()))


def _plant(rng, kind, position, length, rocks, common, rock_share, template):
    """Overwrite stretches of nine tokens with a rock in the middle of one of its two templates."""
    starts = np.arange(0, len(kind) - 9, 9)
    starts = starts[position[starts] + 9 <= length]
    starts = starts[rng.random(len(starts)) < rock_share * 9 / 2]
    which = rng.integers(0, len(rocks), len(starts))
    stretch = template[which, rng.integers(0, 2, len(starts))]
    stretch[:, 4] = rocks[which]
    noisy = rng.random(stretch.shape) < 0.2
    noisy[:, 4] = False
    stretch[noisy] = rng.choice(common, int(noisy.sum()))
    kind[starts[:, None] + np.arange(9)] = stretch


def shuffle_within_prompts(rng, columns):
    """The same corpus with losses exchanged among the occurrences of each prompt: no type costs more than another."""
    order = np.lexsort((rng.random(len(columns["prompt_id"])), columns["prompt_id"]))
    target = np.argsort(columns["prompt_id"], kind="stable")
    changed = dict(columns)
    for name in ("loss_pre", "loss_post", "grad_norm"):
        column = np.empty_like(columns[name])
        column[target] = columns[name][order]
        changed[name] = column
    return changed
