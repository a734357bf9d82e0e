"""Tiny GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model
from transformers import PreTrainedModel

# The letters by which byte-level tokenizers write the 256 bytes.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = [chr(byte) for byte in _PLAIN] + [chr(256 + place) for place in range(256 - len(_PLAIN))]
QWEN2_WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_LETTERS, "ab"]
QWEN2_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen2(seed: int = 0) -> PreTrainedModel:
    """A Qwen2 model with QWEN2_WORDS."""
    return tiny_model("qwen2", seed=seed, vocabulary=len(QWEN2_WORDS), width=64, max_position_embeddings=256)


def write_gguf(path: Path, model: PreTrainedModel, kind: str | None = None, *, merges: bool = True) -> str:
    """That model as a file, its matrices packed as `kind` (Q8_0, Q4_0, …)."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed; runs with the dev dependencies")
    config, writer = model.config, gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(QWEN2_WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(QWEN2_WORDS) - 3))
    if merges:
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(QWEN2_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array, (stem, _, ending) = tensor.float().numpy(), name.rpartition(".")
        packed = gguf.GGMLQuantizationType[kind] if kind and array.ndim == 2 and array.shape[1] % 32 == 0 else None
        values = array if packed is None else gguf.quants.quantize(array, packed)
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", values, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
