"""What a pair needs before anything runs: sizes from the models' configurations, no weights loaded.

Times are lower bounds: floating-point operations over the rate that this machine reaches on one large product.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rocktokens.check.findings import Finding, judge
from rocktokens.divergence.fused import CHUNK_BYTES, CHUNK_ELEMENTS
from rocktokens.models.devices import choose_device, free_memory
from rocktokens.models.pair import model_config
from rocktokens.models.settings import PairConfig
from rocktokens.sample.settings import RolloutConfig


@dataclass(frozen=True)
class Needs:
    """What a pair needs; memory in bytes, both at least."""

    student_parameters: int
    teacher_parameters: int
    score_bytes: int
    distill_bytes: int
    sample_seconds: float
    """For 1,000 response tokens, at least."""


def needs_of(config: PairConfig, rollouts: RolloutConfig) -> Needs:
    """Memory of sampling, scoring and distilling with a pair, and the time that sampling takes."""
    described = [model_config(name, config) for name in (config.student, config.teacher)]
    with torch.device("meta"):
        code = config.trust_remote_code
        student, teacher = (AutoModelForCausalLM.from_config(own, trust_remote_code=code) for own in described)
    own, theirs = (sum(p.numel() for p in model.parameters()) for model in (student, teacher))
    text: Any = described[0].get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 4 if config.dtype == "float32" or (config.dtype == "auto" and choose_device(config.device) == "cpu") else 2
    weights = width * (own + theirs)
    cache_per_token = 2 * text.num_hidden_layers * heads * head_width  # numbers in the KV cache
    cache = width * rollouts.batch_size * cache_per_token * (rollouts.max_new_tokens + 256)
    chunk = CHUNK_BYTES * CHUNK_ELEMENTS
    # What is trained is float32 whatever the dtype: the weights' second half, gradient, Adam's two moments, and the
    # gradient of the head while it is summed.
    trained = (4 - width + 4 + 8) * own + 4 * student.get_output_embeddings().weight.numel()  # type: ignore[union-attr, operator]
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a @ b
    start = time.perf_counter()
    for _ in range(3):
        a @ b
    rate = 3 * 2 * 1024**3 / (time.perf_counter() - start)  # floating-point operations a second on this machine
    return Needs(
        own,
        theirs,
        score_bytes=weights + max(cache, chunk),
        distill_bytes=weights + max(cache, chunk + trained),
        sample_seconds=2 * own * 1000 / rate,
    )


def memory_and_time(config: PairConfig, rollouts: RolloutConfig) -> Finding:
    """Does the pair fit into this machine, and how long will it take at least?"""
    needs, free = needs_of(config, rollouts), free_memory(torch.device(choose_device(config.device)))
    sentence = (
        f"{needs.student_parameters / 1e6:,.1f} M parameters (student) and {needs.teacher_parameters / 1e6:,.1f} M "
        f"(teacher). 1,000 response tokens take at least {needs.sample_seconds:.2g} s to sample."
    )
    return judge(
        "memory and time",
        needs.distill_bytes > free,
        f"{needs.score_bytes / 1e9:.2f} GB to sample and score, {needs.distill_bytes / 1e9:.2f} GB to distil, "
        f"{free / 1e9:.1f} GB free",
        sentence,
        f"There is too little memory to distil. {sentence}",
        "Use smaller models, --pair.dtype bfloat16, a served teacher, or a machine with more memory.",
    )
