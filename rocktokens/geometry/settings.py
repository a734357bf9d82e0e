"""Settings of gradient geometry."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Count, Seed, Settings


@dataclass(frozen=True, kw_only=True)
class GeometryConfig(Settings, section="geometry"):
    """How gradients per token type are kept in bounded memory."""

    exact_vocab: Count = 8192
    """Up to this many token types in the vocabulary, gradients are kept exactly."""
    sketch_dims: Count = 16384
    """Width of the sketch of a gradient above that; cosines err by about 2 / sqrt(width) at 95 %."""
    max_types: Count = 8192
    """Token types with a gradient of their own; later ones count in the totals only."""
    seed: Seed = 0
    """Seed of the sketch and of the group of random others."""
