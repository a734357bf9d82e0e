"""Settings of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Count, Length, Positive, Seed, Settings, ShareOrAll, immaterial, require


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Settings, section="rollouts"):
    """How responses are sampled."""

    num_rollouts: Count = 4
    """Responses sampled per prompt."""
    max_new_tokens: Length = 512
    """Length limit of a response; a rollout that meets it is marked truncated."""
    temperature: Positive = 1.0
    """Sampling temperature; divergences are always scored at 1.0."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    top_k: Count | None = None
    """Sample only among the k most probable tokens."""
    top_p: ShareOrAll | None = None
    """Sample only among the most probable tokens that together hold this probability."""
    batch_size: Count = immaterial(64)
    """Rollouts in flight at once."""
    seed: Seed = 0
    """Every rollout's own seed derives from this, its prompt and its number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.greedy or self.num_rollouts == 1,
            "greedy rollouts of a prompt are all alike; set rollouts.num_rollouts to 1",
        )
