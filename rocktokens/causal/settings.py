"""Settings of the baseline rollouts and of knock-outs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typing_extensions import Doc

from rocktokens.detect.settings import Definition
from rocktokens.settings import Settings, immaterial, require


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Settings):
    """The rollouts that knock-outs and grafts start from, on prompts that detection did not use."""

    problems: int = 2000
    """Prompts at most; fewer where the source has fewer."""
    rollouts: int = 2
    """Rollouts sampled per prompt."""
    source: str | None = None
    """Where the prompts come from; unset: what the run's own prompts have besides those detection used."""
    split: str | None = None
    """Split of a hub dataset; unset: the run's own, and `causal` of a built-in task."""
    reuse_prompts: bool = False
    """Use the prompts that detection used, too. Rocks were chosen on them: effects may look larger than they are."""
    checkpoint: str = "last"
    """Which model samples: last (kept checkpoint, else the student), student, or a step."""
    max_new_tokens: int | None = None
    """Length limit of a response; unset: that of the run's rollouts, else 512."""
    temperature: float = 1.0
    """Sampling temperature."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    top_k: int | None = None
    """Sample only among the k most probable tokens. Knock-outs are then generated in full: resuming is not exact."""
    top_p: float | None = None
    """Sample only among the most probable tokens that together hold this probability. As with top_k."""
    batch_size: int = immaterial(256)
    """Rollouts in flight at once."""
    seed: int = 0
    """Every rollout's and every resumption's own seed derives from this."""

    def __post_init__(self) -> None:
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        require(self.rollouts >= 1, f"rollouts must be at least 1, got {self.rollouts}")
        limit = self.max_new_tokens
        require(limit is None or limit >= 1, f"max_new_tokens must be at least 1, got {limit}")
        require(self.temperature > 0, f"temperature must be > 0, got {self.temperature}; for greedy set greedy")
        require(self.top_k is None or self.top_k >= 1, f"top_k must be at least 1, got {self.top_k}; unset it instead")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        require(not self.greedy or self.rollouts == 1, "greedy responses are all alike; set rollouts to 1")


SetKind = Literal["token", "window", "family"]


@dataclass(frozen=True, kw_only=True)
class KnockoutConfig(Settings):
    """Which token types are banned, how often, and what counts as an effect."""

    candidates: tuple[str, ...] = ()
    """Token types to test, as text, or as ids like #17; unset: the top by burden, and every declared rock."""
    top: int = 200
    """How many token types, by burden, where none are named. Declared rocks are tested beside them."""
    definition: Definition | None = None
    """Whose rocks are tested beside them; unset: the definition that `detect` chose."""
    kinds: tuple[SetKind, ...] = ("token",)
    """What is banned together: token (the type alone), window (with the candidates in its high-divergence windows),
    family (with its other surface forms: leading space, case)."""
    wider_sets_of: Literal["candidates", "rocks"] = "candidates"
    """Whose windows and families are banned: every candidate's, or, at a fraction of the work, only declared rocks'."""
    window_share: float = 0.1
    """A candidate belongs to a window set if it stands in so many of the occurrences' windows, as a share of them."""
    controls: Annotated[bool, Doc("Do not ban, for every rock, a non-rock that is as frequent.")] = True
    """For every rock also ban a non-rock that is as frequent."""
    until: Literal["decided", "budget"] = "decided"
    """decided: prompts are added look by look and a set stops when its verdict is in; budget: all prompts for all."""
    rounds: int = 4
    """Looks at most, each at twice the prompts of the one before; they share alpha."""
    repeats: int = 1
    """Continuations per resumption, of the knock-out and of the rollout it is compared with."""
    placebo_share: float = 0.125
    """Share of the prompts on which every resumption is also done with nothing banned: the noise floor."""
    epsilon: float = 0.01
    """Smallest change of accuracy that matters."""
    alpha: float = 0.05
    """Error rate of each verdict."""
    power: float = 0.8
    """Power at which the smallest detectable effect is stated."""
    resamples: int = 10_000
    """Bootstrap resamples of prompts, and sign flips."""

    def __post_init__(self) -> None:
        require(self.top >= 1, f"top must be at least 1, got {self.top}")
        require(len(self.kinds) > 0, "kinds must name at least one of token, window, family")
        require(self.rounds >= 1, f"rounds must be at least 1, got {self.rounds}")
        require(self.repeats >= 1, f"repeats must be at least 1, got {self.repeats}")
        for name in ("epsilon", "alpha", "power"):
            require(0 < getattr(self, name) < 1, f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("placebo_share", "window_share"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")
