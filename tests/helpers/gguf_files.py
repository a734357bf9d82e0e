"""Tiny GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import VOCABULARY
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

GGUF_WORDS = ["<bos>", "<eos>", "<pad>", "a", "b", "ab", *(f"w{number}" for number in range(6, VOCABULARY))]
# The letters by which byte-level tokenizers write the 256 bytes.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = [chr(byte) for byte in _PLAIN] + [chr(256 + place) for place in range(256 - len(_PLAIN))]
QWEN2_WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_LETTERS, "ab"]
QWEN2_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_gguf(path: Path, model: LlamaForCausalLM, words: list[str]) -> str:
    """A Llama: llama.cpp's order of rotary halves, a vocabulary of words."""
    writer = _writer(path, "llama", model, words, merges=True, ends=(0, 1, 2))
    writer.add_rope_dimension_count(model.config.head_dim)
    writer.add_vocab_size(model.config.vocab_size)
    writer.add_tokenizer_pre("default")
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    return _written(writer, path, model, heads=heads)


def write_qwen2_gguf(path: Path, model: Qwen2ForCausalLM, kind: str | None = None, *, merges: bool = True) -> str:
    """A Qwen2 model with QWEN2_WORDS, its matrices packed as `kind` (Q8_0, Q4_0, …)."""
    writer = _writer(path, "qwen2", model, QWEN2_WORDS, merges=merges, ends=(0, 2, 0))
    from gguf import TokenType

    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(QWEN2_WORDS) - 3))
    writer.add_chat_template(QWEN2_TEMPLATE)
    return _written(writer, path, model, kind=kind)


def _writer(path: Path, name: str, model: PreTrainedModel, words: list[str], *, merges: bool, ends: tuple[int, ...]):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed; runs with the dev dependencies")
    config, writer = model.config, gguf.GGUFWriter(str(path), name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    if merges:
        writer.add_token_merges(["a b"])
    for add, token in zip((writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id), ends):
        add(token)
    return writer


def _written(writer, path: Path, model: PreTrainedModel, *, heads: dict[str, int] | None = None, kind=None) -> str:
    import gguf

    arch = gguf.MODEL_ARCH.LLAMA if heads else gguf.MODEL_ARCH.QWEN2
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array, (stem, _, ending) = tensor.float().numpy(), name.rpartition(".")
        if own := (heads or {}).get(stem.rpartition(".")[2]):
            halves = array.reshape(own, 2, len(array) // own // 2, array.shape[1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        packed = gguf.GGMLQuantizationType[kind] if kind and array.ndim == 2 and array.shape[1] % 32 == 0 else None
        values = array if packed is None else gguf.quants.quantize(array, packed)
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", values, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
