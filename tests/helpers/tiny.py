"""Tiny random models and a word tokenizer, made on the spot: real Hugging Face classes, no downloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rocktokens.score.scoring import score

VOCABULARY = 64
CONTEXT = 96
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What each family has of its own: windows shorter than the tests' texts, caps that the logits meet, scales, tied heads,
# projections, experts, and layers that are no attention (convolution, linear attention, state space).
ALL_FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "qwen2": {},
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4},
    "gemma": {},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "olmo2": {},
    "smollm3": {"tie_word_embeddings": True},
    "stablelm": {},
    "starcoder2": {},
    "glm4": {},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32, **MOE,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}  # fmt: skip
FAMILIES = ("llama", "qwen3", "gemma2", "mistral")


def tiny_model(
    family: str = "llama", *, seed: int = 0, width: int = 32, vocabulary: int = VOCABULARY, **options
) -> PreTrainedModel:
    """A random causal model of any family that transformers knows.

    Its logits spread over several nats, so that choices are clear and caps matter; with `initializer_range` its weights
    are as transformers draws them.
    """
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **{**shape, **ALL_FAMILIES.get(family, {}), **options})
        )
        if "initializer_range" in options:
            return model.eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=2.5 * width**-0.5)
    return model.eval()


WORDS = ("<bos>", "<eos>", "<pad>", *(f"w{number}" for number in range(3, VOCABULARY)))
CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant: {% endif %}"
)


def tiny_tokenizer(words: Sequence[str] = WORDS, splitter: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """One word one token: <bos>, <eos>, <pad>, w3, w4 and so on."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<pad>", **options}
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One character one token, with a chat template; 99 types: three of its own, a start mark, and printable ASCII."""
    words = ["<bos>", "<eos>", "<pad>", "<start>", *map(chr, range(32, 127))]
    options = {"additional_special_tokens": ["<start>"], "chat_template": CHAT_TEMPLATE}
    return tiny_tokenizer(words, pre_tokenizers.Split("", "isolated"), **options)


def save_model(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """A model directory as save_pretrained leaves it."""
    model.save_pretrained(path)
    (tokenizer or tiny_tokenizer()).save_pretrained(path)
    return str(path)


def prompts(count: int, *, vocabulary: int = VOCABULARY, shortest: int = 1, longest: int = 14, seed: int = 0) -> list:
    """Prompts of mixed length, as tuples of ids that are no special tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=g).tolist()
    return [tuple(torch.randint(3, vocabulary, (length,), generator=g).tolist()) for length in lengths]


def generated(model, prefix, limit: int, eos_ids, **options) -> tuple[int, ...]:
    """What `generate` gives for this prompt alone, without padding."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prefix]),
            attention_mask=torch.ones(1, len(prefix), dtype=torch.long),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=list(eos_ids),
            pad_token_id=2,
            **options,
        )
    return tuple(output[0, len(prefix) :].tolist())


def scored(rollouts, student, teacher, **options: Any) -> pa.Table:
    """Occurrences of these rollouts under one student, in the order of rollouts and positions."""
    parts: list[pa.Table] = []
    options = {"eos_ids": (1,), "vocabulary": VOCABULARY, **options}
    score(rollouts, {0: student}, teacher, write=lambda step, table: parts.append(table), **options)
    return pa.concat_tables(parts).sort_by([("rollout_id", "ascending"), ("position", "ascending")])
