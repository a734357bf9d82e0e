"""Tiny random models and a word tokenizer, made on the spot: real Hugging Face classes, no downloads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 64
CONTEXT = 96
FAMILIES = ("llama", "qwen3", "gemma2", "mistral")


def tiny_model(
    family: str = "llama", *, seed: int = 0, width: int = 32, vocabulary: int = VOCABULARY, **options
) -> PreTrainedModel:
    """A random causal model whose logits spread over several nats, so that choices are clear and caps matter."""
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
    made = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
        # A window shorter than the tests' texts, and a cap that the logits meet.
        "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0, "sliding_window": 6}),
        "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    }
    kind, config, extra = made[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config(**{**shape, **extra, **options}))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=2.5 * width**-0.5)
    return model.eval()


def tiny_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """One word one token: <bos>, <eos>, <pad>, w3, w4 and so on."""
    words = ["<bos>", "<eos>", "<pad>", *(f"w{number}" for number in range(3, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )


CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant: {% endif %}"
)


def letter_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One character one token, with a chat template; 99 types: three of its own, a start mark, and printable ASCII."""
    characters = [chr(code) for code in range(32, 127)]
    words = ["<bos>", "<eos>", "<pad>", "<start>", *characters]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=["<start>"],
    )
    made.chat_template = template
    return made


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
