"""Settings of grafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from rocktokens.detect.settings import Definition
from rocktokens.settings import Count, Pair, Resamples, Settings, Share


@dataclass(frozen=True, kw_only=True)
class GraftConfig(Settings, section="graft"):
    """Which tokens the student draws again from the teacher."""

    problems: Pair = 1000
    """Prompts at most, the first of the baseline's."""
    definition: Definition | None = None
    """Whose rock set is grafted; unset: the one `detect` chose."""
    rocks: tuple[str, ...] = ()
    """The set itself, as text, or as ids like #17; unset: the run's rocks."""
    top: Count = 200
    """Where no rocks are declared: how many token types, by burden, are grafted in their place."""
    clusters: Annotated[bool, Doc("Do not graft each cluster of token types by itself.")] = True
    """Also graft each cluster of token types by itself."""
    level: Share = 0.95
    """Coverage of intervals."""
    resamples: Resamples = 10_000
    """Bootstrap resamples of prompts."""
