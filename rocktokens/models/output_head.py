"""A model's output head alone, read from its weights: what a served teacher's states are multiplied with here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file

from rocktokens.divergence.fused import Head
from rocktokens.errors import ConfigError
from rocktokens.models.pair import _dtype, _named_errors, _source, head_from, head_of, load_model, model_config
from rocktokens.models.settings import PairConfig


def read_head(name: str, config: PairConfig) -> Head:
    """A model's output head alone, read from its safetensors; of a GGUF file the whole model is read and let go."""
    described = model_config(name, config)
    source, options = _source(name, config)
    if "gguf_file" in options:
        head = head_of(load_model(name, config))
        return Head(head.weight_VH.detach().clone(), head.bias_V, head.softcap, head.scale)
    with _named_errors(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    layer: Any = model.get_output_embeddings()
    named = list(model.named_parameters(remove_duplicate=False))
    wanted = {"weight": layer.weight, "bias": getattr(layer, "bias", None)}
    found: dict[str, Tensor | None] = {"bias": None}
    for part, parameter in wanted.items():
        if parameter is not None:
            keys = [key for key, value in named if value is parameter]
            if getattr(described.get_text_config(), "tie_word_embeddings", False) and part == "weight":
                keys += [key for key, value in named if value is model.get_input_embeddings().weight]  # type: ignore[union-attr]
            with _named_errors(name):
                found[part] = _read_tensor(source, keys, tuple(parameter.shape))
    dtype = _dtype(config)
    weight = found["weight"]
    assert weight is not None
    return head_from(described, weight if dtype == "auto" else weight.to(dtype), found["bias"])


def _read_tensor(source: str, keys: list[str], shape: tuple[int, ...]) -> Tensor:
    """One tensor of a checkpoint, by any of its names; of several files only the one that holds it is opened."""
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    files: dict[str, str] = {}
    if index is not None:
        files = json.loads(Path(index).read_text())["weight_map"]
    else:
        single = cached_file(source, "model.safetensors")
        with safe_open(str(single), "pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    endings = {".".join(key.split(".")[-2:]) for key in keys}
    for key in [*keys, *(key for key in files if ".".join(key.split(".")[-2:]) in endings)]:
        if key in files:
            with safe_open(str(cached_file(source, files[key])), "pt") as file:
                if tuple(file.get_slice(key).get_shape()) == shape:
                    return file.get_tensor(key)
    raise ConfigError(f"the weights of {source} hold no {keys[0]} of shape {shape}; the output head cannot be read")
