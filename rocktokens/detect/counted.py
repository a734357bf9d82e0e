"""What can be said of token types from counts and mean losses alone: burden, coverage, enrichment.

There are no prompts here, so there are no intervals, no declared rocks and no context consistency; there is no loss
before distillation, so nothing can be said about what learns. A ranking by burden always has a top: enrichment says
whether its types cost more than their frequency explains, and it needs the totals of the whole corpus.

Shapes: V token types, K the first types by burden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rocktokens.detect.occurrences import Array
from rocktokens.errors import ConfigError, DataError
from rocktokens.stats import Floats

PAPER_K = 100
SWEPT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
# Totals that were rounded when they were written down may fall short of the sums by this share.
ROUNDING = 1e-3


@dataclass(frozen=True)
class TypeCounts:
    """One entry per token type: how often it occurs and what it costs on average."""

    token_id_V: Array
    count_V: Array
    mean_loss_V: Floats
    tokens: tuple[str, ...] | None = None
    """Texts, where the file has them."""

    @property
    def burden_V(self) -> Floats:
        """Total loss of each type, nats."""
        return self.count_V * self.mean_loss_V


@dataclass(frozen=True)
class CorpusTotals:
    """Totals of the corpus that the counts were taken from; None where they are not known."""

    positions: int | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("corpus_positions", self.positions), ("corpus_loss", self.loss)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a finite number above 0, got {value}")


@dataclass(frozen=True)
class Coverage:
    """What the first K types by burden hold."""

    k: int
    positions: int
    loss: float
    share_of_listed: float | None
    """Share of the loss of the types that are listed; None where that is not above 0."""
    share_positions: float | None
    share_loss: float | None
    """Shares of the corpus; None where its total is not given."""
    enrichment: float | None
    """Share of the loss ÷ share of the positions; None unless both totals are given."""
    mean_loss: float | None
    """Nats; None where the types do not occur."""


@dataclass(frozen=True)
class CountedReport:
    """Types by burden, the first K of them, and what they hold."""

    counts: TypeCounts
    totals: CorpusTotals
    order_V: Array
    """Places in `counts`, largest burden first; types that do not occur come last."""
    k: int
    chosen: Coverage
    sweep: tuple[Coverage, ...]

    @property
    def listed_loss(self) -> float:
        """Loss of all types that are listed, nats."""
        return float(self.counts.burden_V.sum())

    @property
    def rocks(self) -> Array:
        """Token ids of the first K by burden, largest first."""
        return self.counts.token_id_V[self.order_V[: self.k]]


def detect_counted(counts: TypeCounts, totals: CorpusTotals, k: int | None = None) -> CountedReport:
    """Rank types by burden and measure what the first K hold; a type that does not occur is never among them.

    Args:
        counts: the types; at least one must occur.
        totals: positions and loss of the whole corpus, as far as they are known.
        k: how many types; None: the paper's 100.
    """
    _check_totals(counts, totals)
    order_V = np.lexsort((counts.token_id_V, -counts.burden_V, counts.count_V == 0))
    occurring = int((counts.count_V > 0).sum())
    k = min(k or PAPER_K, occurring)
    swept = sorted({size for size in (*SWEPT, k) if size <= occurring} | {occurring})
    covered = {size: _coverage(counts, totals, order_V[:size]) for size in swept}
    return CountedReport(counts, totals, order_V, k, covered[k], tuple(covered[size] for size in swept))


def _coverage(counts: TypeCounts, totals: CorpusTotals, own: Array) -> Coverage:
    positions, loss = int(counts.count_V[own].sum()), float(counts.burden_V[own].sum())
    listed = float(counts.burden_V.sum())
    share_positions = positions / totals.positions if totals.positions else None
    share_loss = loss / totals.loss if totals.loss else None
    enrichment = share_loss / share_positions if share_loss is not None and share_positions else None
    return Coverage(
        k=len(own),
        positions=positions,
        loss=loss,
        share_of_listed=loss / listed if listed > 0 else None,
        share_positions=share_positions,
        share_loss=share_loss,
        enrichment=enrichment,
        mean_loss=loss / positions if positions else None,
    )


def _check_totals(counts: TypeCounts, totals: CorpusTotals) -> None:
    listed, burden = int(counts.count_V.sum()), float(counts.burden_V.sum())
    if totals.positions is not None and totals.positions < listed:
        raise DataError(
            f"the corpus is said to have {totals.positions:,} positions, but the types listed have {listed:,}; give "
            "the number of all response positions"
        )
    signed = bool((counts.mean_loss_V < 0).any())
    if totals.loss is not None and totals.loss < burden * (1 - ROUNDING) and not signed:
        raise DataError(
            f"the corpus is said to have a loss of {totals.loss:,.6g} nats, but the types listed carry {burden:,.6g}; "
            "give the sum over all response positions, not their mean"
        )
