"""Settings of detection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.settings import Settings, require

Definition = Literal["certified", "burden", "context", "excess"]


Signal = Literal["kl", "log_ratio"]


LONGEST_WINDOW = 512  # a context of a thousand tokens; memory grows with it


@dataclass(frozen=True, kw_only=True)
class DetectConfig(Settings):
    """Which token types are called rocks, and by which thresholds."""

    definition: Definition = "certified"
    """The rock set that later stages use; all four are computed and shown. certified: declared by tests."""
    signal: Signal = "kl"
    """The loss that is ranked: exact reverse KL, or the sampled token's log-ratio."""
    kappa: float = 0.75
    """For certified: a rock's loss after OPD is more than this share of its loss before."""
    q: float = 0.10
    """For certified: the share of false rocks among those declared that is accepted (Benjamini-Hochberg)."""
    consistent: bool = False
    """For certified: keep only rocks whose persistent occurrences recur in similar contexts."""
    positions: int = 100
    """How many of the costliest positions are listed one by one."""
    k: int | Literal["auto"] = "auto"
    """Rocks to keep by burden, context and excess; auto: the largest number whose choice is stable, 0 if none is."""
    stability: float = 0.7
    """For k=auto: least mean Jaccard of the top K of some prompts with the top K of all."""
    tau_quantile: float = 0.8
    """An occurrence persists if its loss is at or above this quantile, and the mean loss, at both checkpoints."""
    tau_pre: float | None = None
    """Threshold on the loss before OPD in nats, in place of the quantile."""
    tau_post: float | None = None
    """Threshold on the loss after OPD in nats, in place of the quantile."""
    window: int = 4
    """Tokens on either side that make up an occurrence's context."""
    gamma_share: float = 0.05
    """Contexts are similar above the cosine that this share of pairs of different types exceeds."""
    gamma: float | None = None
    """Similarity threshold as a cosine, in place of the share."""
    eta: float = 0.10
    """Least share of a type's other persistent occurrences in similar contexts."""
    max_others: int = 2048
    """Others that an occurrence is compared with; more are sampled."""
    context_dims: int = 64
    """Width of the random vectors that stand for tokens where no embedding is at hand."""
    resamples: int = 1000
    """Bootstrap resamples of prompts."""
    level: float = 0.95
    """Coverage of intervals; 1 - level is the chance of any false rock by `excess`."""
    num_rare: int = 100
    """Size of the group of rare high-loss types that rocks are set beside."""
    seed: int = 0
    """Seed of the split into halves, of samples and of resamples."""

    def __post_init__(self) -> None:
        require(self.k == "auto" or self.k >= 1, f"k must be at least 1 or auto, got {self.k}")
        for name in ("kappa", "q", "stability", "tau_quantile", "gamma_share", "eta", "level"):
            value = getattr(self, name)
            require(0 < value < 1, f"{name} must lie between 0 and 1, got {value}")
        require(self.gamma is None or -1 <= self.gamma <= 1, f"gamma is a cosine, got {self.gamma}")
        for name in ("window", "max_others", "context_dims", "num_rare"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.window <= LONGEST_WINDOW, f"window must be at most {LONGEST_WINDOW}, got {self.window:,}")
        require(self.positions >= 0, f"positions must not be negative, got {self.positions}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")
