"""Settings of detection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rocktokens.settings import Count, Resamples, Seed, Settings, Share

Definition = Literal["certified", "burden", "context"]
Signal = Literal["kl", "log_ratio"]


@dataclass(frozen=True, kw_only=True)
class DetectConfig(Settings, section="detect"):
    """Which token types are called rocks, and by which thresholds."""

    definition: Definition = "certified"
    """The rock set that later stages use; all are computed and shown. certified: declared by tests."""
    signal: Signal = "kl"
    """The loss that types are ordered by: exact reverse KL, or the sampled token's log-ratio."""
    kappa: Share = 0.75
    """For certified: a rock's loss after OPD is more than this share of its loss before."""
    q: Share = 0.10
    """For certified: the share of false rocks among those declared that is accepted (Benjamini-Hochberg)."""
    consistent: bool = False
    """For certified: keep only rocks whose persistent occurrences recur in similar contexts."""
    k: Count = 100
    """Rocks to keep by burden and context."""
    tau_quantile: Share = 0.8
    """An occurrence persists if its loss is at or above this quantile, and the mean loss, at both checkpoints."""
    window: Annotated[int, Meta(ge=1, le=512)] = 4
    """Tokens on either side that make up an occurrence's context."""
    resamples: Resamples = 1000
    """Bootstrap resamples of prompts."""
    seed: Seed = 0
    """Seed of the split into halves, of samples and of resamples."""
