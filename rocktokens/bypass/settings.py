"""Settings of the bypass list."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Settings, Share


@dataclass(frozen=True, kw_only=True)
class BypassConfig(Settings, section="bypass"):
    """What a costly token type must have proven before training may skip it."""

    epsilon: Share | None = None
    """Largest gain of accuracy by a graft that does not matter, as a share; unset: the census's epsilon."""
