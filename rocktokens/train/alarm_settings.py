"""When a training run raises an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from rocktokens.settings import Count, Positive, Settings, ShareOrAll


@dataclass(frozen=True, kw_only=True)
class AlarmConfig(Settings, section="alarm"):
    """Limits of the alarms that the trainer raises while it runs."""

    window: Count = 10
    """Steps that are averaged, at the start and at the end."""
    length_growth: Annotated[float, Meta(gt=1, le=1e12)] = 2.0
    """Alarm when rollouts have grown by this factor and many are cut at the length limit."""
    truncated: ShareOrAll = 0.2
    """Share of rollouts cut at the limit that counts as many."""
    entropy_left: ShareOrAll = 0.1
    """Alarm when the student's mean entropy has fallen below this share of what it was."""
    entropy: Positive = 0.05
    """And below so many nats."""
    invalid: ShareOrAll = 0.001
    """Alarm when this share of a step's tokens has a divergence that is not a number."""
    stop: bool = False
    """Stop training at the first alarm."""
