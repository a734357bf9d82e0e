"""Settings of the baseline rollouts, of knock-outs, of grafts, and of the bypass list that rests on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta
from typing_extensions import Doc

from rocktokens.settings import (
    Count,
    Length,
    Pair,
    Positive,
    Resamples,
    Seed,
    Settings,
    Share,
    ShareOrAll,
    ShareOrNone,
    immaterial,
    require,
)


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Settings, section="baseline"):
    """The rollouts that knock-outs and grafts start from, on prompts that detection did not use."""

    problems: Pair = 2000
    """Prompts at most; fewer where the source has fewer."""
    rollouts: Count = 2
    """Rollouts sampled per prompt."""
    source: str | None = None
    """Where the prompts come from; unset: the run's own prompts that detection did not use."""
    split: str | None = None
    """Split of a hub dataset; unset: the run's own, and `causal` of a built-in task."""
    reuse_prompts: bool = False
    """Use the prompts that detection used, too. Rocks were chosen on them: effects may look larger than they are."""
    checkpoint: str = "last"
    """Which model samples: last (kept checkpoint, else the student), student, or a step."""
    max_new_tokens: Length | None = None
    """Length limit of a response; unset: that of the run's rollouts, else 512."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    top_k: Count | None = None
    """Sample only among the k most probable tokens. Knock-outs are then generated in full: resuming is not exact."""
    top_p: ShareOrAll | None = None
    """Sample only among the most probable tokens that together hold this probability. As with top_k."""
    batch_size: Count = immaterial(256)
    """Rollouts in flight at once."""
    seed: Seed = 0
    """Every rollout's and every resumption's own seed derives from this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.greedy or self.rollouts == 1, "greedy responses are all alike; set baseline.rollouts to 1")


SetKind = Literal["token", "window", "family"]


@dataclass(frozen=True, kw_only=True)
class KnockoutConfig(Settings, section="knockout"):
    """Which token types are banned, how often, and what counts as an effect."""

    candidates: tuple[str, ...] = ()
    """Token types to test, as text, or as ids like #17; unset: the top by burden, and every declared rock."""
    top: Count = 200
    """How many token types, by burden, where none are named. Declared rocks are tested, too."""
    kinds: Annotated[tuple[SetKind, ...], Meta(min_length=1)] = ("token",)
    """What is banned together: token (the type alone), window (with the candidates in its high-divergence windows),
    family (with its other surface forms: leading space, case)."""
    wider_sets_of: Literal["candidates", "rocks"] = "candidates"
    """Whose windows and families are banned: every candidate's, or, at a fraction of the work, only declared rocks'."""
    controls: Annotated[bool, Doc("Do not ban, for every rock, a non-rock that is as frequent.")] = True
    """For every rock also ban a non-rock that is as frequent."""
    until: Literal["decided", "budget"] = "decided"
    """decided: prompts are added look by look and a set stops when its verdict is in; budget: all prompts for all."""
    rounds: Count = 4
    """Looks at most, each at twice the prompts of the one before; they share alpha."""
    placebo_share: ShareOrNone = 0.125
    """Share of the prompts on which every resumption is also done with nothing banned: the noise floor."""
    epsilon: Share = 0.01
    """Smallest change of accuracy that matters."""
    alpha: Share = 0.05
    """Error rate of each verdict."""
    power: Share = 0.8
    """Power at which the smallest detectable effect is stated."""
    resamples: Resamples = 10_000
    """Bootstrap resamples of prompts, and sign flips."""


@dataclass(frozen=True, kw_only=True)
class GraftConfig(Settings, section="graft"):
    """Which tokens the student draws again from the teacher."""

    problems: Pair = 1000
    """Prompts at most, the first of the baseline's."""
    rocks: tuple[str, ...] = ()
    """The set itself, as text, or as ids like #17; unset: the run's rocks."""
    top: Count = 200
    """Where no rocks are declared: how many token types, by burden, are grafted in their place."""
    clusters: Annotated[bool, Doc("Do not graft each cluster of token types by itself.")] = True
    """Also graft each cluster of token types by itself."""
    resamples: Resamples = 10_000
    """Bootstrap resamples of prompts."""


@dataclass(frozen=True, kw_only=True)
class BypassConfig(Settings, section="bypass"):
    """What a costly token type must have proven before training may skip it."""

    epsilon: Share | None = None
    """Largest gain of accuracy by a graft that does not matter, as a share; unset: the census's epsilon."""
