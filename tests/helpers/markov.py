"""A "language model" whose every law can be written down: the next token depends on the last one only.

`MarkovEngine` and `MarkovGrafter` answer the engine interface in numpy; `paths`, `law` and `graft_law` are closed
forms that share nothing with them. Token 0 ends a response; prompts are the single token 0.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import stats as sps

from rocktokens.causal.grafters import graft_numbers
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Continuation, GraftRequest, Request

EOS = 0


def chain(seed: int, size: int = 5) -> np.ndarray:
    """A random transition matrix, no probability tiny."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(size, 2.0), size) * 0.9 + 0.1 / size


def numbers(seeds: Sequence[int], skips: Sequence[int], count: int, salt: int = 0) -> np.ndarray:
    """(row, count) uniforms of streams keyed by seed, from number `skip` on (splitmix64)."""
    with np.errstate(over="ignore"):
        index = np.asarray(skips, np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
        x = np.asarray(seeds, np.uint64)[:, None] * np.uint64(0xD1342543DE82EF95) + np.uint64(salt)
        x = x + index * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(float) / 2.0**53


class MarkovEngine:
    """Continues prefixes by a transition matrix; all rows at once. Counts its requests."""

    def __init__(self, matrix: np.ndarray, *, exact_resume: bool = True) -> None:
        self.matrix, self.exact_resume, self.num_requests = matrix, exact_resume, 0

    def generate(self, requests: Sequence[Request], *, progress=None) -> list[Continuation]:
        if not requests:
            return []
        room_B = np.array([request.max_new_tokens for request in requests])
        draw_BT = numbers([r.seed for r in requests], [r.skip for r in requests], room_B.max())
        own = [row for row, request in enumerate(requests) if request.first_seed is not None]
        if own:
            draw_BT[own, 0] = numbers([requests[row].first_seed for row in own], [0] * len(own), 1)[:, 0]
        allowed_BV = np.ones((len(requests), len(self.matrix)))
        for row, request in enumerate(requests):
            if request.banned:
                allowed_BV[row, list(request.banned)] = 0.0
        last_B = np.array([request.prefix[-1] for request in requests])
        live_B = np.ones(len(requests), bool)
        token_BT = np.full((len(requests), room_B.max()), EOS)
        length_B = np.zeros(len(requests), int)
        for step in range(room_B.max()):
            weight_BV = self.matrix[last_B] * allowed_BV
            last_B = self.draw(weight_BV, draw_BT[:, step], requests, step)
            token_BT[:, step] = last_B
            length_B += live_B
            live_B &= (last_B != EOS) & (room_B > step + 1)
        self.num_requests += len(requests)
        rows = [tuple(row[:length]) for row, length in zip(token_BT.tolist(), length_B.tolist())]
        return [Continuation(row, truncated=row[-1] != EOS) for row in rows]

    def draw(self, weight_BV: np.ndarray, uniform_B: np.ndarray, requests, step: int) -> np.ndarray:
        cumulative_BV = weight_BV.cumsum(1)
        return (cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]).sum(1)


class MarkovGrafter(MarkovEngine):
    """The same, with some tokens drawn again from a teacher's matrix."""

    def __init__(self, student: np.ndarray, teacher: np.ndarray, rules: np.ndarray, own=None) -> None:
        super().__init__(student)
        self.teacher, self.rules = teacher, np.asarray(rules)
        self.own = np.zeros(len(rules), bool) if own is None else np.asarray(own)

    def generate(self, requests: Sequence[GraftRequest], *, progress=None) -> list[Continuation]:
        room = max(request.max_new_tokens for request in requests)
        self.graft_BT2 = np.stack([graft_numbers(r.graft_seed, r.skip, room) for r in requests])
        self.last_B = np.array([request.prefix[-1] for request in requests])
        return super().generate(requests)

    def draw(self, weight_BV, uniform_B, requests, step):
        chosen_B = super().draw(weight_BV, uniform_B, requests, step)
        rule_B = np.array([request.rule for request in requests])
        again_B = self.graft_BT2[:, step, 0] < self.rules[rule_B, chosen_B]
        if step == 0:
            again_B |= np.array([request.forced for request in requests])
        asked_BV = np.where(self.own[rule_B][:, None], weight_BV, self.teacher[self.last_B])
        theirs_B = super().draw(asked_BV, self.graft_BT2[:, step, 1], requests, step)
        self.last_B = np.where(again_B, theirs_B, chosen_B)
        return self.last_B


def prompts(count: int) -> list[Prompt]:
    """The same prompt many times, under different names."""
    return [Prompt(f"p{index}", (EOS,), "", "yes") for index in range(count)]


def paths(size: int, limit: int) -> list[tuple[int, ...]]:
    """Every response of at most `limit` tokens: ended, or cut."""
    words = range(1, size)
    ended = [(*body, EOS) for length in range(limit) for body in itertools.product(words, repeat=length)]
    return ended + list(itertools.product(words, repeat=limit))


def law(matrix: np.ndarray, limit: int, banned: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    """Probability of every response when some types are banned from the start."""
    allowed = np.array(matrix)
    allowed[:, list(banned)] = 0.0
    allowed /= allowed.sum(1, keepdims=True)
    return _law(allowed, limit)


def graft_law(student: np.ndarray, teacher: np.ndarray, redraw: np.ndarray, limit: int) -> dict[tuple[int, ...], float]:
    """Probability of every response when a drawn token is drawn again from the teacher with its own probability."""
    mixed = student * (1 - redraw) + (student * redraw).sum(1, keepdims=True) * teacher
    return _law(mixed, limit)


def _law(matrix: np.ndarray, limit: int) -> dict[tuple[int, ...], float]:
    found = {}
    for path in paths(len(matrix), limit):
        steps = zip((EOS, *path), path)
        found[path] = float(np.prod([matrix[before, after] for before, after in steps]))
    return {path: p for path, p in found.items() if p > 0}


def fit_p(samples: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square p of samples against a law; cells expected fewer than 5 times are taken together."""
    counts = Counter(samples)
    assert set(counts) <= set(expected), "a sample that the law makes impossible"
    cells = [(counts[path], p * len(samples)) for path, p in expected.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if small:
        large.append((sum(c for c, _ in small), sum(e for _, e in small)))
    seen, want = np.array(large, float).T
    return float(sps.chisquare(seen, want * seen.sum() / want.sum()).pvalue)


def same_p(first: Sequence[tuple[int, ...]], second: Sequence[tuple[int, ...]]) -> float:
    """Chi-square p of "two samples of one law"; rare cells are taken together."""
    one, two = Counter(first), Counter(second)
    cells = [(one[path], two[path]) for path in set(one) | set(two)]
    large = [cell for cell in cells if sum(cell) >= 20]
    small = [cell for cell in cells if sum(cell) < 20]
    if small:
        large.append((sum(a for a, _ in small), sum(b for _, b in small)))
    return float(sps.chi2_contingency(np.array(large).T).pvalue)
