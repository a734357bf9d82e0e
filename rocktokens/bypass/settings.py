"""Settings of the bypass list."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class BypassConfig(Settings):
    """What a costly token type must have proven before training may skip it."""

    epsilon: float | None = None
    """Largest gain of accuracy by a graft that does not matter, as a share; unset: the census's epsilon."""

    def __post_init__(self) -> None:
        epsilon = self.epsilon
        require(epsilon is None or 0 < epsilon < 1, f"epsilon must lie between 0 and 1, got {epsilon}")
