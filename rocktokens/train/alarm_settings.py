"""When a training run raises an alarm."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class AlarmConfig(Settings):
    """Limits of the alarms that the trainer raises while it runs."""

    window: int = 10
    """Steps that are averaged, at the start and at the end."""
    length_growth: float = 2.0
    """Alarm when rollouts have grown by this factor and many are cut at the length limit."""
    truncated: float = 0.2
    """Share of rollouts cut at the limit that counts as many."""
    entropy_left: float = 0.1
    """Alarm when the student's mean entropy has fallen below this share of what it was."""
    entropy: float = 0.05
    """And below so many nats."""
    invalid: float = 0.001
    """Alarm when this share of a step's tokens has a divergence that is not a number."""
    stop: bool = False
    """Stop training at the first alarm."""

    def __post_init__(self) -> None:
        require(self.window >= 1, f"window must be at least 1, got {self.window}")
        require(self.length_growth > 1, f"length_growth must be > 1, got {self.length_growth}")
        for name in ("truncated", "entropy_left", "invalid"):
            require(0 < getattr(self, name) <= 1, f"{name} must lie in (0, 1], got {getattr(self, name)}")
        require(self.entropy > 0, f"entropy must be > 0, got {self.entropy}")
