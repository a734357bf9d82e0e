"""Settings of gradient geometry."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class GeometryConfig(Settings):
    """How gradients per token type are kept in bounded memory."""

    exact_vocab: int = 8192
    """Up to this many token types in the vocabulary, gradients are kept exactly."""
    sketch_dims: int = 16384
    """Width of the sketch of a gradient above that; cosines err by about 2 / sqrt(width) at 95 %."""
    max_types: int = 8192
    """Token types with a gradient of their own; later ones count in the totals only."""
    seed: int = 0
    """Seed of the sketch and of the group of random others."""

    def __post_init__(self) -> None:
        for name in ("exact_vocab", "sketch_dims", "max_types"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
