"""What several texts begin with: a system message or an instruction that need be computed only once.

This module knows token ids and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

# One forward pass more costs something, too: below these the shared beginning is not worth one.
LEAST_LENGTH = 8
LEAST_TOKENS = 256


def common_start(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens all texts begin with."""
    first, last = min(map(tuple, texts)), max(map(tuple, texts))  # in order: whatever these two share, all share
    return next((place for place, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))


def worth_sharing(texts: Sequence[Sequence[int]], most: int | None = None) -> int:
    """Tokens at the beginning of all texts that are better computed once; 0 where it does not pay.

    Args:
        texts: Token ids.
        most: No more than so many; every text keeps at least one token of its own anyway.
    """
    if len(texts) < 2:
        return 0
    longest = max(map(len, texts))
    common = min(common_start(texts), longest - 1, longest if most is None else most)
    return common if common >= LEAST_LENGTH and common * (len(texts) - 1) >= LEAST_TOKENS else 0
