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
class ModelSize:
    """Sizes of one model, from its configuration."""

    parameters: int
    width: int
    vocabulary: int
    cache_per_token: int
    """Numbers that one token leaves in the KV cache."""


@dataclass(frozen=True)
class Needs:
    """What a pair needs; memory in bytes, time in seconds for 1,000 response tokens, both at least."""

    student: ModelSize
    teacher: ModelSize
    score_bytes: int
    distill_bytes: int
    sample_seconds: float
    score_seconds: float
    distill_seconds: float


def needs_of(config: PairConfig, rollouts: RolloutConfig) -> Needs:
    """Memory and time of sampling, scoring and distilling with a pair."""
    student, teacher = model_size(config.student, config), model_size(config.teacher, config)
    width = 4 if config.dtype == "float32" or (config.dtype == "auto" and choose_device(config.device) == "cpu") else 2
    weights = width * (student.parameters + teacher.parameters)
    cache = width * rollouts.batch_size * student.cache_per_token * (rollouts.max_new_tokens + 256)
    chunk = CHUNK_BYTES * CHUNK_ELEMENTS
    # What is trained is float32 whatever the dtype: the weights' second half, gradient, Adam's two moments, and the
    # gradient of the head while it is summed.
    trained = (4 - width + 4 + 8) * student.parameters + 4 * student.width * student.vocabulary
    rate = _multiply_rate()
    forward = 2 * (student.parameters + teacher.parameters) * 1000
    return Needs(
        student,
        teacher,
        score_bytes=weights + max(cache, chunk),
        distill_bytes=weights + max(cache, chunk + trained),
        sample_seconds=2 * student.parameters * 1000 / rate,
        score_seconds=forward / rate,
        distill_seconds=(forward + 2 * student.parameters * 1000 * 3) / rate,
    )


def memory_and_time(config: PairConfig, rollouts: RolloutConfig) -> Finding:
    """Does the pair fit into this machine, and how long will it take at least?"""
    needs, free = needs_of(config, rollouts), free_memory(torch.device(choose_device(config.device)))
    sentence = (
        f"{needs.student.parameters / 1e6:,.1f} M parameters (student) and {needs.teacher.parameters / 1e6:,.1f} M "
        f"(teacher). 1,000 response tokens take at least {needs.sample_seconds:.2g} s to sample, "
        f"{needs.score_seconds:.2g} s to score, {needs.distill_seconds:.2g} s to train on."
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


def model_size(name: str, config: PairConfig) -> ModelSize:
    """Parameters and shape of a model without its weights."""
    described = model_config(name, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    text: Any = described.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelSize(
        sum(p.numel() for p in model.parameters()),
        text.hidden_size,
        model.get_output_embeddings().weight.shape[0],  # type: ignore[union-attr, arg-type]
        2 * text.num_hidden_layers * heads * head_width,
    )


def _multiply_rate(size: int = 1024) -> float:
    """Floating-point operations a second of a square product on this machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    start = time.perf_counter()
    for _ in range(3):
        a @ b
    return 3 * 2 * size**3 / (time.perf_counter() - start)
