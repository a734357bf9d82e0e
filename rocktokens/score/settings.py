"""Settings of scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from rocktokens.settings import Count, CountOrZero, Settings, immaterial


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Settings, section="score"):
    """How rollouts are scored."""

    checkpoints: str = "all"
    """all kept checkpoints of the run, or their steps as a comma-separated list."""
    token_budget: Count = immaterial(8192)
    """Padded tokens in one forward pass; sets the memory scoring takes."""
    gradients: Annotated[bool, Doc("Do not gather the gradients per token type that `geometry` needs.")] = True
    """Gather the last checkpoint's gradients per token type on the way, for `geometry`."""
    top: CountOrZero = 5
    """Most probable tokens of both models to keep at every position of the rollouts that the report shows; 0: none."""
