"""The selector that finds rocks while the model trains, from losses that were computed anyway.

It freezes a token type when the type's share of the loss is high and its loss does not fall while that of the others
does: "does not learn" is relative to what learns. It keeps a seeded share of the frozen positions in the loss, so that
a type that moves again is seen and thawed. It knows a TokenMonitor and, if given, the types it may freeze (a bypass
list); it makes no forward pass of its own.

Shapes: N occurrences of one optimiser step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy import stats as sps
from torch import Tensor

from rocktokens.divergence.monitor import HALF_LIFE, LEAST_ROWS, TokenMonitor
from rocktokens.seeds import derive_seed
from rocktokens.select.interface import Selector, SelectorBatch
from rocktokens.settings import require
from rocktokens.values import Row

# Standard errors on the safe side of a comparison: one-sided 97.5 %.
Z = 1.96


def least_updates(half_life: float = HALF_LIFE) -> int:
    """Updates that `Adaptive` watches before it can freeze anything: one half-life early, one late."""
    return 2 * max(1, round(half_life)) + 1


class Adaptive(Selector):
    """Freezes what is expensive and does not learn while the rest does; thaws what moves again."""

    name = "adaptive"

    def __init__(
        self,
        *,
        budget: float = 0.005,
        max_fall: float = 0.15,
        least_fall: float = 0.30,
        slower: float = 1 / 3,
        audit: float = 0.05,
        max_positions: float = 0.5,
        allowed: Iterable[int] | None = None,
        seed: int = 0,
    ) -> None:
        """Settings of the rule.

        Args:
            budget: least share of the recent loss that makes a type worth freezing.
            max_fall: a frozen type thaws when its audited mean has moved by more than this share.
            least_fall: nothing is frozen before the median fall of the run's own types, by rows, is this large.
            slower: a type is frozen if its fall, plus 1.96 standard errors (more where many types are tested), is below
                this share of the median fall.
            audit: share of frozen positions left in the loss.
            max_positions: largest share of positions ever frozen at once.
            allowed: the only types that may be frozen, e.g. a bypass list; None: any.
            seed: decides which frozen positions are audited.
        """
        shares = {"budget": budget, "max_fall": max_fall, "least_fall": least_fall, "slower": slower, "audit": audit}
        for option, value in (shares | {"max_positions": max_positions}).items():
            require(0 < value < 1, f"{option} must lie between 0 and 1, got {value}")
        self.budget, self.max_fall, self.least_fall, self.slower = budget, max_fall, least_fall, slower
        self.audit, self.max_positions, self.seed = audit, max_positions, seed
        self.allowed = None if allowed is None else tuple(sorted({int(token) for token in allowed}))
        self.median_fall = float("nan")
        self._frozen: dict[int, tuple[float, float, float]] = {}  # type: mean, loss share, position share when frozen
        self._thawed: dict[int, tuple[float, int]] = {}  # type: mean and number of updates when thawed

    @property
    def frozen(self) -> tuple[int, ...]:
        """Token types frozen now."""
        return tuple(sorted(self._frozen))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.allowed or ()

    def weights(self, batch: SelectorBatch) -> Tensor:
        frozen_N = torch.isin(batch.token_N, torch.tensor(self.frozen, dtype=torch.long))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "audit", batch.step))
        audited_N = torch.rand(len(batch), generator=generator) < self.audit
        return torch.where(frozen_N & ~audited_N, 0.0, 1.0)

    def observe(self, monitor: TokenMonitor) -> None:
        if monitor.num_updates < least_updates(monitor.half_life) or not monitor.sums("recent", "value").sum() > 0:
            return
        # Let go of types whose audited mean has moved, either way, by more than `max_fall` and its error.
        mean_V, mean_error_V = monitor.mean("recent"), monitor.standard_error("recent")
        for token, (reference, _, _) in list(self._frozen.items()):
            # An unknown error (too few audited rows) compares as False: what is not known to move stays.
            if abs(mean_V[token] - reference) > self.max_fall * reference + Z * mean_error_V[token]:
                del self._frozen[token]
                self._thawed[token] = (float(mean_V[token]), monitor.num_updates)
        fall_V, error_V = monitor.fall()
        self.median_fall = weighted_median(fall_V, monitor.sums("early", "weight"))
        if self.median_fall >= self.least_fall:
            self._freeze(monitor, fall_V.copy(), error_V.copy())

    def _freeze(self, monitor: TokenMonitor, fall_V: np.ndarray, error_V: np.ndarray) -> None:
        """Freeze the open types that are costly and stay; a thawed type's fall counts from where it was thawed."""
        rows_V = np.minimum(monitor.effective_rows("early"), monitor.effective_rows("late"))
        mean_V, mean_error_V = monitor.mean("recent"), monitor.standard_error("recent")
        open_V = rows_V >= LEAST_ROWS
        open_V[list(self._frozen)] = False
        if self.allowed is not None:
            open_V &= np.isin(np.arange(len(open_V)), self.allowed)
        for token, (mean, updates) in list(self._thawed.items()):
            fall_V[token], error_V[token] = 1.0 - mean_V[token] / mean, mean_error_V[token] / mean
            open_V[token] &= monitor.num_updates - updates >= monitor.half_life
            if open_V[token] and fall_V[token] > self.max_fall:  # still on its way: compare with where it is now
                self._thawed[token] = (float(mean_V[token]), monitor.num_updates)

        weight_V, value_V = monitor.sums("recent", "weight"), monitor.sums("recent", "value")
        unfrozen_V = np.ones(len(weight_V), bool)
        unfrozen_V[list(self._frozen)] = False
        # Frozen types are seen only where audited; what they carried when frozen stands for what they carry now.
        loss_left = 1.0 - sum(loss for _, loss, _ in self._frozen.values())
        rows_left = 1.0 - sum(rows for _, _, rows in self._frozen.values())
        loss_share_V = loss_left * value_V / max(value_V[unfrozen_V].sum(), np.finfo(float).tiny)
        rows_share_V = rows_left * weight_V / max(weight_V[unfrozen_V].sum(), np.finfo(float).tiny)

        worth_V = open_V & (loss_share_V > self.budget)
        # Standard errors on the safe side of a fall: 1.96 or, where that is more, Student's quantile for the rows of
        # each type with the 2.5 % shared among all types tested (Bonferroni). With 1.96 alone, about one type in forty
        # that learns would be frozen for its noise.
        tail = float(sps.norm.sf(Z)) / max(int(worth_V.sum()), 1)
        quantile_V = np.maximum(sps.t.isf(tail, np.maximum(rows_V - 1, 1)), Z)
        with np.errstate(invalid="ignore"):
            stayed_V = fall_V + quantile_V * error_V < self.slower * self.median_fall
            costly_V = mean_V - Z * mean_error_V > value_V.sum() / weight_V.sum()
        chosen = np.flatnonzero(worth_V & stayed_V & costly_V)
        for token in sorted(chosen.tolist(), key=lambda v: (-loss_share_V[v], v)):
            if 1.0 - rows_left + rows_share_V[token] > self.max_positions:
                break
            self._frozen[token] = (float(mean_V[token]), float(loss_share_V[token]), float(rows_share_V[token]))
            self._thawed.pop(token, None)
            rows_left -= rows_share_V[token]

    def state_dict(self) -> Row:
        return {"frozen": dict(self._frozen), "thawed": dict(self._thawed)}

    def load_state_dict(self, state: Row) -> None:
        self._frozen, self._thawed = dict(state["frozen"]), dict(state["thawed"])


def weighted_median(value_V: np.ndarray, weight_V: np.ndarray) -> float:
    """The value that half of the weight lies at or below; NaN values count for nothing, and NaN without any."""
    known_V = np.isfinite(value_V) & (weight_V > 0)
    if not known_V.any():
        return float("nan")
    order = np.argsort(value_V[known_V], kind="stable")
    reached = np.cumsum(weight_V[known_V][order])
    return float(value_V[known_V][order][np.searchsorted(reached, reached[-1] / 2)])
