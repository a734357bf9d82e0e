"""Settings of grafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from rocktokens.detect.settings import Definition
from rocktokens.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class GraftConfig(Settings):
    """Which tokens the student draws again from the teacher."""

    problems: int = 1000
    """Prompts at most, the first of the baseline's."""
    definition: Definition | None = None
    """Whose rock set is grafted; unset: the one `detect` chose."""
    rocks: tuple[str, ...] = ()
    """The set itself, as text, or as ids like #17; unset: the run's rocks."""
    top: int = 200
    """Where no rocks are declared: how many token types, by burden, are grafted in their place."""
    clusters: Annotated[bool, Doc("Do not graft each cluster of token types by itself.")] = True
    """Also graft each cluster of token types by itself."""
    level: float = 0.95
    """Coverage of intervals."""
    resamples: int = 10_000
    """Bootstrap resamples of prompts."""

    def __post_init__(self) -> None:
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        require(self.top >= 1, f"top must be at least 1, got {self.top}")
        require(0 < self.level < 1, f"level must lie between 0 and 1, got {self.level}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")
