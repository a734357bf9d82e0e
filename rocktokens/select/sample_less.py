"""Savings where the time goes: sample less of what has nothing left to teach.

Generation is most of a step, and dropping positions at the output head does not touch it. What the token record tells
is used instead: where along a rollout the loss of everything but the rocks ends (`prefix_cut`), and which prompts have
little of it left (`Fewer`). Rocks are left out of both, for their loss never falls and would hide that the rest is
done. The third saving, to stop when that loss is saturated, is a setting of the trainer. `Merit` does all it can in
one selector. This module knows positions, losses and prompt names; it knows no model, trainer or file.

Shapes: N occurrences, K measured rows of one optimiser step, L positions of a response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rocktokens.errors import ConfigError, DataError
from rocktokens.seeds import derive_seed
from rocktokens.select.basic import Selector, SelectorBatch

# Steps in which every rollout is sampled; their mean non-rock loss is what later losses are set against.
from rocktokens.values import Row

REFERENCE_STEPS = 10
# Prior weight of the run's mean loss, in rollouts.
PRIOR_ROLLOUTS = 4.0
# Steps after which half of the weight in the run's recent mean is newer.
HALF_LIFE = 10.0


class Cut(NamedTuple):
    """Where sampling may stop, and what lies beyond."""

    length: int
    """Positions kept of a response."""
    covered: float
    """Share of the non-rock loss that lies within them."""
    positions: float
    """Share of the positions that lie within them."""


def prefix_cut(
    position_N: ArrayLike, loss_N: ArrayLike, rest_N: ArrayLike, *, limit: int, coverage: float = 0.95
) -> Cut:
    """The shortest prefix that holds `coverage` of the loss outside the rocks; `rest_N` marks what is no rock."""
    position, rest = np.asarray(position_N, np.int64), np.asarray(rest_N, bool)
    loss = np.nan_to_num(np.asarray(loss_N, float)).clip(min=0) * rest
    if not len(position) or not 0 < coverage <= 1 or limit < 1:
        raise DataError(f"a cut needs occurrences, a coverage in (0, 1] and a limit, got {coverage} and {limit}")
    loss_L = np.bincount(position, weights=loss, minlength=limit)
    count_L = np.bincount(position, minlength=limit)
    if not loss_L.sum() > 0:
        raise DataError("there is no loss outside the rocks: nothing tells where to cut")
    reached_L = np.cumsum(loss_L) / loss_L.sum()
    length = min(int(np.argmax(reached_L >= coverage - 1e-12)) + 1, limit)
    return Cut(length, float(reached_L[length - 1]), float(count_L[:length].sum() / count_L.sum()))


class RandomRollouts(Selector):
    """The control of whatever samples fewer rollouts: as many, drawn at random; every sampled token keeps its loss."""

    name = "random_rollouts"

    def __init__(self, *, share: float = 0.5, counts: Sequence[int] = (), seed: int = 0) -> None:
        """`share` of each step's rollouts is sampled; or `counts` of them, by step, the last number for later steps."""
        if not 0 < share <= 1:
            raise ConfigError(f"share must lie in (0, 1], got {share}")
        if any(count < 1 for count in counts):
            raise ConfigError("counts must be at least 1 rollout per step")
        self.share, self.counts, self.seed = float(share), tuple(counts), seed

    def weights(self, batch: SelectorBatch) -> Tensor:
        return torch.ones(len(batch))

    def rollouts(self, prompts: Sequence[str], step: int) -> list[int]:
        wanted = round(self.share * len(prompts))
        if self.counts:
            wanted = self.counts[min(step, len(self.counts)) - 1]
        rng = np.random.default_rng(derive_seed(self.seed, "random_rollouts", step))
        places = rng.choice(len(prompts), min(max(wanted, 1), len(prompts)), replace=False)
        return sorted(int(place) for place in places)


class Fewer(Selector):
    """Samples fewer rollouts of prompts whose non-rock loss is low; every sampled token keeps its loss.

    What is expected of a prompt is the run's recent mean, times how the prompt itself compared with that mean when it
    was last seen. From `full` of the first steps' mean upwards it gets all its rollouts; below, a proportional share.
    """

    name = "fewer"

    def __init__(self, *, rocks: Iterable[int] = (), least: int = 1, full: float = 0.5) -> None:
        """`rocks`: token types whose loss does not count. `least`: rollouts that every prompt gets."""
        if least < 1 or not 0 < full <= 1:
            raise ConfigError(f"least must be at least 1 and full a share in (0, 1], got {least} and {full}")
        self.rocks, self.least, self.full = tuple(sorted(rocks)), least, full
        self._steps = 0
        self._reference = 0.0
        self._recent: float | None = None
        self._prompts: dict[str, tuple[float, float]] = {}  # sum of losses over the run's mean, rollouts

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.rocks

    def weights(self, batch: SelectorBatch) -> Tensor:
        return torch.ones(len(batch))

    def rollouts(self, prompts: Sequence[str], step: int) -> list[int] | None:
        if self._steps < REFERENCE_STEPS or self._recent is None or self._reference <= 0:
            return None
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt, []).append(place)
        chosen = []
        for prompt, own in places.items():
            total, count = self._prompts.get(prompt, (0.0, 0.0))
            expected = self._recent * (total + PRIOR_ROLLOUTS) / (count + PRIOR_ROLLOUTS)
            wanted = math.ceil(len(own) * min(1.0, expected / (self.full * self._reference)) - 1e-9)
            chosen += own[: max(self.least, wanted)]
        return sorted(chosen)

    def remember(self, prompts: Sequence[str], rollout_K: Tensor, token_K: Tensor, value_K: Tensor) -> None:
        rest_K = ~torch.isin(token_K, torch.tensor(self.rocks, dtype=torch.long)) & torch.isfinite(value_K)
        at = rollout_K[rest_K].numpy()
        total_R = np.bincount(at, weights=value_K[rest_K].double().numpy(), minlength=len(prompts))
        count_R = np.bincount(at, minlength=len(prompts))
        if not count_R.sum() or not total_R.sum() > 0:
            return
        mean = float(total_R.sum() / count_R.sum())
        self._steps += 1
        if self._steps <= REFERENCE_STEPS:
            self._reference += (mean - self._reference) / self._steps
        new = 1.0 - 0.5 ** (1.0 / HALF_LIFE)
        self._recent = mean if self._recent is None else self._recent + new * (mean - self._recent)
        for prompt, total, count in zip(prompts, total_R, count_R):
            if count:
                known, seen = self._prompts.get(prompt, (0.0, 0.0))
                self._prompts[prompt] = (known + float(total) / float(count) / mean, seen + 1.0)

    def state_dict(self) -> Row:
        return {
            "steps": self._steps,
            "reference": self._reference,
            "recent": self._recent,
            "prompts": dict(self._prompts),
        }

    def load_state_dict(self, state: Row) -> None:
        self._steps, self._reference, self._recent = int(state["steps"]), state["reference"], state["recent"]
        self._prompts = {prompt: (float(total), float(count)) for prompt, (total, count) in state["prompts"].items()}


class Merit(Fewer):
    """`Fewer`, and every rollout stops at a share of the longest response allowed, chosen with `prefix_cut`."""

    name = "merit"

    def __init__(self, *, rocks: Iterable[int] = (), least: int = 1, full: float = 0.5, keep: float = 1.0) -> None:
        super().__init__(rocks=rocks, least=least, full=full)
        if not 0 < keep <= 1:
            raise ConfigError(f"keep must lie in (0, 1], got {keep}")
        self.keep = keep

    def length(self, limit: int) -> int:
        return max(1, math.ceil(self.keep * limit - 1e-9))

    def weights(self, batch: SelectorBatch) -> Tensor:
        return (batch.position_N < self.length(batch.length_limit)).float()
