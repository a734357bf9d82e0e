"""A run with a tiny random pair over the world's vocabulary: what the causal stages need, made in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run
from rocktokens.settings import to_mapping
from rocktokens.world import get_world


def save_tiny_pair(folder: Path, *, width: int = 16) -> PairConfig:
    """Student and teacher of random weights that speak the world's vocabulary."""
    world = get_world("arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(world.student_path)
    names = {}
    for seed, who in enumerate(("student", "teacher")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(world.vocabulary),
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(folder / who)
        tokenizer.save_pretrained(folder / who)
        names[who] = str(folder / who)
    return PairConfig(**names)


def response_has_a_seven(text: str, answer: str) -> bool:
    """An answer checker under which random responses are sometimes right."""
    return "7" in text


def make_tiny_run(folder: Path) -> Path:
    """A run that names the pair and its prompts, and has no stage done."""
    pair = save_tiny_pair(folder / "pair")
    prompts = PromptsConfig(source="arithmetic", checker="causal_runs:response_has_a_seven")
    Run.create(folder / "run", {"pair": to_mapping(pair), "prompts": to_mapping(prompts)})
    return folder / "run"
