"""TRL's configuration for the machine at hand, and the few moments in which ours differs from what the user wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from trl import DistillationConfig
from trl.trainer.utils import get_config_model_id

from rocktokens.errors import ConfigError
from rocktokens.select.interface import Selector

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def processes() -> PartialState:
    """The processes that train together, before a trainer exists; without a GPU accelerate must be told so."""
    return PartialState(cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available())


def device_arguments(output_dir: str, **settings: Any) -> DistillationConfig:
    """TRL's configuration with defaults for this machine: bfloat16 and gradient checkpointing only where CUDA is."""
    on_cuda = torch.cuda.is_available() and not settings.get("use_cpu", False)
    defaults = {
        "bf16": on_cuda and torch.cuda.is_bf16_supported(),
        "gradient_checkpointing": on_cuda,
        "use_cpu": not on_cuda and not torch.backends.mps.is_available(),
        "report_to": "none",
    }
    return DistillationConfig(output_dir, **{**defaults, **settings})


def default_directory(model: str | PreTrainedModel) -> str:
    """The output directory that TRL chooses where no configuration is given."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-Distillation"


@contextmanager
def length_limited(args: DistillationConfig, limit: int | None) -> Iterator[None]:
    """Inside the block the configuration has another length limit; afterwards it is the user's again."""
    own = args.max_completion_length
    args.max_completion_length = limit
    try:
        yield
    finally:
        args.max_completion_length = own


def sampled_length(selector: Selector, limit: int | None) -> int | None:
    """Tokens that are sampled at most: TRL's limit, or less where the selector never uses later positions."""
    if limit is not None:
        return selector.length(limit)
    if type(selector).length is not Selector.length:
        raise ConfigError(f"selector {selector.name} takes a share of the length; set max_completion_length")
    return None


def named_selectors(shadows: Mapping[str, Selector] | Sequence[Selector]) -> dict[str, Selector]:
    """Shadow selectors by name; a sequence is named by the selectors' own names."""
    if isinstance(shadows, Mapping):
        return dict(shadows)
    found = {shadow.name: shadow for shadow in shadows}
    if len(found) < len(shadows):
        raise ConfigError("several shadow selectors share a name; pass a mapping from names of your own to selectors")
    return found
