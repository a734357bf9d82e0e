"""SmolLM2's weights as a plain Llama directory, and a smaller model out of it by leaving out layers.

The rule for layers: those that change the hidden state least go, measured as the mean over positions of one minus the
cosine between what enters a layer and what leaves it. This module knows one model at a time and trains nothing.

Shapes: T positions, H width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from rocktokens.errors import ConfigError
from rocktokens.models.pair import load_model, load_tokenizer, no_bars
from rocktokens.models.settings import PairConfig

# What transformers adds to a model read from GGUF and then cannot save.

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
NOT_KEPT = ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures", "dtype")
PADDING = "<|endoftext|>"
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def convert(weights: Path, out: Path) -> None:
    """Copy a GGUF file, or a Llama directory, into a clean Llama directory with its tokenizer."""
    model, tokenizer = load_model(str(weights), PairConfig(device="cpu")), load_tokenizer(str(weights), PairConfig())
    if tokenizer.pad_token_id == tokenizer.eos_token_id and PADDING in tokenizer.get_vocab():
        # The end token stands inside every chat prompt, so it cannot tell where padding is.
        tokenizer.pad_token = PADDING
        model.config.pad_token_id = tokenizer.pad_token_id
    save(clean_copy(model, range(model.config.num_hidden_layers)), tokenizer, out)


def layer_changes(model: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> list[float]:
    """How much each layer turns the hidden state on these token ids."""
    total, positions = torch.zeros(model.config.num_hidden_layers), 0
    with torch.inference_mode():
        for ids in texts:
            states = _states(model, torch.tensor([list(ids)]))
            for layer, (before_TH, after_TH) in enumerate(pairwise(states)):
                total[layer] += (1 - torch.cosine_similarity(before_TH, after_TH, dim=-1)).sum()
            positions += len(ids)
    return (total / positions).tolist()


def _states(model: LlamaForCausalLM, input_1T: torch.Tensor) -> list[torch.Tensor]:
    """The embedding and every layer's output; transformers' own list has the final norm in its last entry."""
    seen: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [module.register_forward_hook(note) for module in (model.model.embed_tokens, *model.model.layers)]
    try:
        model.model(input_ids=input_1T, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def least_changing(changes: Sequence[float], count: int) -> tuple[int, ...]:
    """The layers to leave out, in order; the first and the last always stay."""
    inner = range(1, len(changes) - 1)
    if count > len(inner):
        raise ConfigError(f"cannot leave out {count} of {len(changes)} layers: the first and the last stay")
    return tuple(sorted(sorted(inner, key=lambda layer: changes[layer])[:count]))


def without_layers(model: LlamaForCausalLM, left_out: Sequence[int]) -> LlamaForCausalLM:
    """The same model without some of its layers."""
    return clean_copy(model, [n for n in range(model.config.num_hidden_layers) if n not in set(left_out)])


def clean_copy(model: PreTrainedModel, layers: Sequence[int]) -> LlamaForCausalLM:
    """A Llama that transformers can save: these layers of the model, renumbered, and everything else."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in NOT_KEPT}
    config = LlamaConfig(**(settings | {"num_hidden_layers": len(layers)}))
    place = {old: new for new, old in enumerate(layers)}
    weights = {}
    for name, tensor in model.state_dict().items():
        found = LAYER.match(name)
        if found is None:
            weights[name] = tensor
        elif int(found[1]) in place:
            weights[LAYER.sub(f"model.layers.{place[int(found[1])]}.", name)] = tensor
    with torch.random.fork_rng(devices=[]):  # the random start is thrown away
        copy = LlamaForCausalLM(config)
    copy.load_state_dict(weights)
    ends = {key: settings.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    copy.generation_config = GenerationConfig(**ends)
    return copy.eval()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write a model directory, whole or not at all."""
    draft = out.with_name(f".{out.name}.draft")
    with no_bars():
        model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.replace(out)
