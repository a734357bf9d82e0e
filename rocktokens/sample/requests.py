"""What is asked of an engine that generates text: continue these token prefixes.

An engine may be a model in this process (sampler.py) or a server elsewhere (servers/vllm.py); this interface knows
neither torch nor transport. Token ids go in and token ids come out; text is never re-tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Rollout:
    """One sampled response as token ids."""

    prompt_id: str
    rollout_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """Continue one prefix (prompt and, when resuming, the rollout so far)."""

    prefix: tuple[int, ...]
    max_new_tokens: int
    seed: int
    """Which stream of random numbers the row consumes, one number a token."""
    banned: tuple[int, ...] = ()
    """Token types that may not be emitted."""
    skip: int = 0
    """Numbers of the stream to pass over: a resumed rollout continues with the numbers it would have had."""
    first_seed: int | None = None
    """Another stream for the first number alone: where a rollout is resumed, its own has chosen the banned token."""

    name: str = field(default="a rollout", compare=False)
    """How messages call the rollout."""

    # An engine that cannot skip numbers derives a fresh seed from all three: `seed` alone would repeat the numbers that
    # wrote the prefix, and the law would be wrong. Pairs of rollouts are then less alike, but each one's law is exact.


@dataclass(frozen=True)
class GraftRequest(Request):
    """Continue a prefix with the student, drawing tokens again from the teacher as a rule says."""

    graft_seed: int = 0
    """Stream of the coins and of the teacher's draws, two numbers a position; `skip` counts for it too."""
    rule: int = 0
    forced: bool = False
    """The first token is the teacher's: the student's draw, on record, was one that the rule draws again."""


@dataclass(frozen=True)
class Continuation:
    """What was generated after the prefix, the end token included."""

    token_ids: tuple[int, ...]
    truncated: bool
    """The length limit came before an end token."""
    invalid: bool = False
    """The model gave NaN logits; generation stopped there."""


class Engine(Protocol):
    """Anything that continues prefixes, each with its own ban, seed and length."""

    exact_resume: bool
    """Whether resuming a rollout at a banned token has exactly the law of banning it from the start
    (docs/method.md §5); false with top-k or top-p."""

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its rollout may have together; None where no limit is known."""
        ...

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a request, in the order of the requests; `progress` is told of rows as they finish."""
        ...
