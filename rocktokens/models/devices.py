"""Where a model computes: its device, and how many of the machine's cores this process takes."""

from __future__ import annotations

import logging
import os

import torch
from transformers import PreTrainedModel

from rocktokens.divergence.heads import has_bf16_products
from rocktokens.errors import ConfigError
from rocktokens.jobs import num_workers

log = logging.getLogger(__name__)

# Below this many parameters a model's matrices are too small to share between threads.
TINY_PARAMETERS = 20_000_000


def choose_device(device: str) -> str:
    """The device a setting of `auto` stands for."""
    if device != "auto":
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device is cuda, but torch sees no CUDA device; use --pair.device cpu")
        return _own_cuda() if device == "cuda" else device
    if torch.cuda.is_available():
        return _own_cuda()
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _own_cuda() -> str:
    """One device a process: torchrun numbers the processes of a machine, --workers shows each one device."""
    rank = os.environ.get("LOCAL_RANK")
    return "cuda" if rank is None else f"cuda:{int(rank) % max(torch.cuda.device_count(), 1)}"


def choose_threads(threads: int | None, *models: PreTrainedModel) -> int:
    """Set torch's CPU threads: as told, else one for tiny models (more only wait), else its share of the cores."""
    if threads is None:
        largest = max(sum(p.numel() for p in model.parameters()) for model in models)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        here = max(num_workers(), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # processes of this command or torchrun's
        threads = 1 if largest < TINY_PARAMETERS else max(1, cores // here)
    torch.set_num_threads(threads)
    return threads


def warn_of_slow_products(*models: PreTrainedModel) -> None:
    """Say so where 16-bit weights are multiplied by a processor that has no instructions for it."""
    for model in models:
        weight = next(model.parameters())
        narrow = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
        if narrow and model.num_parameters() >= TINY_PARAMETERS and not has_bf16_products():
            log.warning(
                "%s weights on a processor without instructions for them: their products are several times slower than "
                "float32's. Where memory allows it, pass --pair.dtype float32, and --distill.bf16 False in training",
                str(weight.dtype).removeprefix("torch."),
            )
            return


def free_memory(device: torch.device) -> int:
    """Bytes free on a device: a GPU's own, the machine's otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def total_memory() -> int:
    """Bytes of the device that models are loaded on: a GPU's own, the machine's otherwise."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    import psutil

    return int(psutil.virtual_memory().total)
