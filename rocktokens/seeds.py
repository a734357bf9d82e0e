"""One integer seed from many parts, the same on every machine; so that no random stream depends on another's use."""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniforms(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers in [0, 1) of the stream that belongs to a seed."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
