"""The selector that finds rocks while the model trains, from losses that were computed anyway.

It freezes a token type when the type's share of the loss is high, its loss no longer falls, and the run as a whole has
slowed; it keeps a seeded share of the frozen positions in the loss, so that a type that moves again is seen and thawed.
It knows a TokenMonitor and nothing else: no forward pass of its own, no list of rocks.

Shapes: N occurrences of one optimiser step, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocktokens.core.monitor import HALF_LIFE, TokenMonitor
from rocktokens.core.seeds import derive_seed
from rocktokens.core.selection.selectors import Selector, SelectorBatch
from rocktokens.errors import ConfigError

# Standard errors on the safe side of a comparison: one-sided 97.5 %.
Z = 1.96


def least_updates(half_life: float = HALF_LIFE) -> int:
    """Updates that `Adaptive` watches before it can freeze anything."""
    return 2 * _span(half_life) + 1


def _span(half_life: float) -> int:
    return max(1, round(half_life))


class Adaptive(Selector):
    """Freezes what is expensive and no longer falls; thaws what moves again."""

    name = "adaptive"

    def __init__(
        self,
        *,
        budget: float = 0.005,
        max_fall: float = 0.15,
        slow_fall: float = 0.10,
        audit: float = 0.05,
        max_positions: float = 0.5,
        seed: int = 0,
    ) -> None:
        """`budget`: least share of the recent loss that makes a type worth freezing. `max_fall`: a type whose mean
        has fallen by more than this share still learns. `slow_fall`: the run has slowed when its mean loss falls by
        less than this share in one half-life of the monitor. `audit`: share of frozen positions left in the loss.
        `max_positions`: largest share of positions ever frozen at once."""
        for option, value in (("max_fall", max_fall), ("slow_fall", slow_fall), ("audit", audit)):
            if not 0 < value < 1:
                raise ConfigError(f"{option} must lie between 0 and 1, got {value}")
        if not 0 < budget < 1 or not 0 < max_positions < 1:
            raise ConfigError(f"budget and max_positions are shares between 0 and 1, got {budget} and {max_positions}")
        self.budget, self.max_fall, self.slow_fall = budget, max_fall, slow_fall
        self.audit, self.max_positions, self.seed = audit, max_positions, seed
        self.slowed = False
        self._frozen: dict[int, tuple[float, float, float]] = {}  # type: mean, loss share, position share when frozen
        self._thawed: dict[int, tuple[float, int]] = {}  # type: mean and number of updates when thawed
        self._trend: list[float] = []  # recent mean loss of the run after each update, until it has slowed

    @property
    def frozen(self) -> tuple[int, ...]:
        """Token types frozen now."""
        return tuple(sorted(self._frozen))

    def weights(self, batch: SelectorBatch) -> Tensor:
        frozen_N = torch.isin(batch.token_N, torch.tensor(self.frozen, dtype=torch.long))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "audit", batch.step))
        audited_N = torch.rand(len(batch), generator=generator) < self.audit
        return torch.where(frozen_N & ~audited_N, 0.0, 1.0)

    def observe(self, monitor: TokenMonitor) -> None:
        weight_V, value_V = monitor.sums("recent", "weight"), monitor.sums("recent", "value")
        if not weight_V.sum() or not value_V.sum() > 0:
            return
        if not self.slowed:
            self._trend.append(float(value_V.sum() / weight_V.sum()))
            self.slowed = self._has_slowed(monitor.half_life)
            return
        self._thaw(monitor)
        self._freeze(monitor, weight_V, value_V)

    def _has_slowed(self, half_life: float) -> bool:
        """Two half-lives at least: one that the early means rest on, one to compare with the one before."""
        if len(self._trend) < least_updates(half_life):
            return False
        return self._trend[-1] >= (1 - self.slow_fall) * self._trend[-1 - _span(half_life)]

    def _thaw(self, monitor: TokenMonitor) -> None:
        """Let go of types whose audited mean has moved, either way, by more than `max_fall` and its error."""
        mean_V, error_V = monitor.mean("recent"), _standard_error(monitor, "recent")
        for token, (reference, _, _) in list(self._frozen.items()):
            # An unknown error (too few audited rows) compares as False: what is not known to move stays.
            if abs(mean_V[token] - reference) > self.max_fall * reference + Z * error_V[token]:
                del self._frozen[token]
                self._thawed[token] = (float(mean_V[token]), monitor.num_updates)

    def _freeze(self, monitor: TokenMonitor, weight_V: np.ndarray, value_V: np.ndarray) -> None:
        open_V = np.ones(len(weight_V), bool)
        open_V[list(self._frozen)] = False
        # Frozen types are seen only where audited; what they carried when frozen stands for what they carry now.
        loss_left = 1.0 - sum(loss for _, loss, _ in self._frozen.values())
        rows_left = 1.0 - sum(rows for _, _, rows in self._frozen.values())
        loss_share_V = loss_left * value_V / max(value_V[open_V].sum(), np.finfo(float).tiny)
        rows_share_V = rows_left * weight_V / max(weight_V[open_V].sum(), np.finfo(float).tiny)

        mean_V, error_V = monitor.mean("recent"), _standard_error(monitor, "recent")
        early_V, early_error_V = monitor.mean("early").copy(), _standard_error(monitor, "early")
        kept = 1.0 - self.max_fall
        for token, (mean, updates) in list(self._thawed.items()):
            early_V[token], early_error_V[token] = mean, 0.0
            open_V[token] &= monitor.num_updates - updates >= monitor.half_life
            if open_V[token] and not mean_V[token] >= kept * mean:  # still on its way: compare with where it is now
                self._thawed[token] = (float(mean_V[token]), monitor.num_updates)
        slack_V = Z * np.hypot(error_V, kept * early_error_V)
        with np.errstate(invalid="ignore"):
            stayed_V = mean_V - slack_V >= kept * early_V
            enriched_V = mean_V - Z * error_V > value_V.sum() / weight_V.sum()
        chosen = np.flatnonzero(open_V & (loss_share_V > self.budget) & stayed_V & enriched_V)
        for token in sorted(chosen.tolist(), key=lambda v: (-loss_share_V[v], v)):
            if 1.0 - rows_left + rows_share_V[token] > self.max_positions:
                break
            self._frozen[token] = (float(mean_V[token]), float(loss_share_V[token]), float(rows_share_V[token]))
            self._thawed.pop(token, None)
            rows_left -= rows_share_V[token]

    def state_dict(self) -> dict[str, Any]:
        return {
            "slowed": self.slowed,
            "frozen": dict(self._frozen),
            "thawed": dict(self._thawed),
            "trend": list(self._trend),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slowed = bool(state["slowed"])
        self._frozen, self._thawed = dict(state["frozen"]), dict(state["thawed"])
        self._trend = list(state["trend"])


def _standard_error(monitor: TokenMonitor, window: str) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(monitor.variance(window) / monitor.effective_rows(window))
