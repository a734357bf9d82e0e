"""Settings of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Settings, immaterial, require


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Settings):
    """How responses are sampled."""

    num_rollouts: int = 4
    """Responses sampled per prompt."""
    max_new_tokens: int = 512
    """Length limit of a response; a rollout that meets it is marked truncated."""
    temperature: float = 1.0
    """Sampling temperature; divergences are always scored at 1.0."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    top_k: int | None = None
    """Sample only among the k most probable tokens."""
    top_p: float | None = None
    """Sample only among the most probable tokens that together hold this probability."""
    batch_size: int = immaterial(64)
    """Rollouts in flight at once."""
    seed: int = 0
    """Every rollout's own seed derives from this, its prompt and its number."""

    def __post_init__(self) -> None:
        require(self.num_rollouts >= 1, f"num_rollouts must be at least 1, got {self.num_rollouts}")
        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        require(
            self.temperature > 0,
            f"temperature must be > 0, got {self.temperature}; for greedy decoding pass greedy=True",
        )
        require(
            not self.greedy or self.num_rollouts == 1,
            "greedy rollouts of a prompt are all alike; set num_rollouts to 1",
        )
        require(self.top_k is None or self.top_k >= 1, f"top_k must be at least 1, got {self.top_k}; unset it instead")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
