"""A run with a tiny random pair over the world's vocabulary: what the causal stages need, made in a second."""

from __future__ import annotations

from pathlib import Path

from tiny import save_model, tiny_model
from transformers import AutoTokenizer

from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run
from rocktokens.settings import to_mapping
from rocktokens.world import get_world


def save_tiny_pair(folder: Path, *, width: int = 16) -> PairConfig:
    """Student and teacher of random weights that speak the world's vocabulary."""
    world = get_world("arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(world.student_path)
    shape = {"intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": width // 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    names = {}
    for seed, who in enumerate(("student", "teacher")):
        model = tiny_model(
            seed=seed, width=width, vocabulary=len(world.vocabulary), initializer_range=0.3, **shape, **ends
        )
        names[who] = save_model(folder / who, model, tokenizer)
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
