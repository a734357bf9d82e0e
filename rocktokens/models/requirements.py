"""What a run will need before it starts: sizes from the models' configurations, no weights loaded.

Times are lower bounds: floating-point operations over the rate this machine reaches on one large product.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rocktokens.divergence.fused import CHUNK_BYTES, CHUNK_ELEMENTS
from rocktokens.models.devices import choose_device
from rocktokens.models.pair import _named_errors, _source, check_tokenizers, load_tokenizer
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.chat_templates import what_templates_do
from rocktokens.sample.settings import RolloutConfig


@dataclass(frozen=True)
class ModelSize:
    """Sizes of one model, from its configuration."""

    model_type: str
    parameters: int
    layers: int
    width: int
    vocabulary: int
    context: int | None
    cache_per_token: int
    """Numbers that one token leaves in the KV cache."""


@dataclass(frozen=True)
class Needs:
    """What a pair needs; memory in bytes, time in seconds for 1,000 response tokens, both at least."""

    student: ModelSize
    teacher: ModelSize
    num_types: int
    score_bytes: int
    distill_bytes: int
    sample_seconds: float
    score_seconds: float
    distill_seconds: float
    templates: str
    """Whose chat template is used, and what that does."""


def needs_of(config: PairConfig, rollouts: RolloutConfig) -> Needs:
    """Check the tokenizers and say what sampling, scoring and distilling will take."""
    tokenizers = load_tokenizer(config.student, config), load_tokenizer(config.teacher, config)
    _, num_types = check_tokenizers(config, tokenizers)
    student, teacher = model_size(config.student, config), model_size(config.teacher, config)
    width = 4 if config.dtype == "float32" or (config.dtype == "auto" and choose_device(config.device) == "cpu") else 2
    weights = width * (student.parameters + teacher.parameters)
    cache = width * rollouts.batch_size * student.cache_per_token * (rollouts.max_new_tokens + 256)
    chunk = CHUNK_BYTES * CHUNK_ELEMENTS
    # What is trained is float32 whatever the dtype: the weights' second half, gradient, Adam's two moments, and the
    # gradient of the head while it is summed.
    trained = (4 - width + 4 + 8) * student.parameters + 4 * student.width * student.vocabulary
    rate = multiply_rate()
    forward = 2 * (student.parameters + teacher.parameters) * 1000
    return Needs(
        student,
        teacher,
        num_types,
        score_bytes=weights + max(cache, chunk),
        distill_bytes=weights + max(cache, chunk + trained),
        sample_seconds=2 * student.parameters * 1000 / rate,
        score_seconds=forward / rate,
        distill_seconds=(forward + 2 * student.parameters * 1000 * 3) / rate,
        templates=what_templates_do(*tokenizers),
    )


def model_size(name: str, config: PairConfig) -> ModelSize:
    """Parameters and shape of a model without its weights."""
    source, options = _source(name, config)
    with _named_errors(name):
        described = AutoConfig.from_pretrained(source, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    text: Any = described.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelSize(
        described.model_type,
        sum(p.numel() for p in model.parameters()),
        text.num_hidden_layers,
        text.hidden_size,
        model.get_output_embeddings().weight.shape[0],  # type: ignore[union-attr, arg-type]
        getattr(text, "max_position_embeddings", None),
        2 * text.num_hidden_layers * heads * head_width,
    )


def multiply_rate(size: int = 1024) -> float:
    """Floating-point operations a second of a square product on this machine."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    start = time.perf_counter()
    for _ in range(3):
        a @ b
    return 3 * 2 * size**3 / (time.perf_counter() - start)


def total_memory() -> int:
    """Bytes of the device that models are loaded on: a GPU's own, the machine's otherwise."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total)
