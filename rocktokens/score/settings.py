"""Settings of scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from rocktokens.settings import Settings, immaterial, require


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Settings):
    """How rollouts are scored."""

    checkpoints: str = "all"
    """all kept checkpoints of the run, or their steps as a comma-separated list."""
    token_budget: int = immaterial(8192)
    """Padded tokens in one forward pass; sets the memory scoring takes."""
    chunk: int | None = immaterial(None)
    """Rows of logits that exist at once; unset: chosen for the vocabulary."""
    gradients: Annotated[bool, Doc("Do not gather the gradients per token type that `geometry` needs.")] = True
    """Gather the last checkpoint's gradients per token type on the way, for `geometry`."""
    top: int = 5
    """Most probable tokens of both models to keep at every position of the rollouts that the report shows; 0: none."""

    def __post_init__(self) -> None:
        require(self.token_budget >= 1, f"token_budget must be at least 1, got {self.token_budget}")
        require(self.top >= 0, f"top must be 0 or more, got {self.top}")
