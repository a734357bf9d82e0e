"""Settings of detection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rocktokens.settings import Count, CountOrZero, Number, Resamples, Seed, Settings, Share

Definition = Literal["certified", "burden", "context", "excess"]


Signal = Literal["kl", "log_ratio"]


@dataclass(frozen=True, kw_only=True)
class DetectConfig(Settings, section="detect"):
    """Which token types are called rocks, and by which thresholds."""

    definition: Definition = "certified"
    """The rock set that later stages use; all four are computed and shown. certified: declared by tests."""
    signal: Signal = "kl"
    """The loss that is ranked: exact reverse KL, or the sampled token's log-ratio."""
    kappa: Share = 0.75
    """For certified: a rock's loss after OPD is more than this share of its loss before."""
    q: Share = 0.10
    """For certified: the share of false rocks among those declared that is accepted (Benjamini-Hochberg)."""
    consistent: bool = False
    """For certified: keep only rocks whose persistent occurrences recur in similar contexts."""
    positions: CountOrZero = 100
    """How many of the costliest positions are listed one by one."""
    k: Count | Literal["auto"] = "auto"
    """Rocks to keep by burden, context and excess; auto: the largest number whose choice is stable, 0 if none is."""
    stability: Share = 0.7
    """For k=auto: least mean Jaccard of the top K of some prompts with the top K of all."""
    tau_quantile: Share = 0.8
    """An occurrence persists if its loss is at or above this quantile, and the mean loss, at both checkpoints."""
    tau_pre: Number | None = None
    """Threshold on the loss before OPD in nats, in place of the quantile."""
    tau_post: Number | None = None
    """Threshold on the loss after OPD in nats, in place of the quantile."""
    window: Annotated[int, Meta(ge=1, le=512)] = 4
    """Tokens on either side that make up an occurrence's context."""
    gamma_share: Share = 0.05
    """Contexts are similar above the cosine that this share of pairs of different types exceeds."""
    gamma: Annotated[float, Meta(ge=-1, le=1)] | None = None
    """Similarity threshold as a cosine, in place of the share."""
    eta: Share = 0.10
    """Least share of a type's other persistent occurrences in similar contexts."""
    max_others: Count = 2048
    """Others that an occurrence is compared with; more are sampled."""
    context_dims: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Width of the random vectors that stand for tokens where no embedding is at hand."""
    resamples: Resamples = 1000
    """Bootstrap resamples of prompts."""
    level: Share = 0.95
    """Coverage of intervals; 1 - level is the chance of any false rock by `excess`."""
    num_rare: Count = 100
    """Size of the group of rare high-loss types that rocks are set beside."""
    seed: Seed = 0
    """Seed of the split into halves, of samples and of resamples."""
