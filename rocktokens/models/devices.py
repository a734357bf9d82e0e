"""Where a model computes: its device, and how many of the machine's cores this process takes."""

from __future__ import annotations

import logging
import os

import psutil
import torch
from transformers import PreTrainedModel

from rocktokens.divergence.heads import has_bf16_products
from rocktokens.errors import ConfigError
from rocktokens.jobs import num_workers, torchrun_number

log = logging.getLogger(__name__)

# Below this many parameters a model's matrices are too small to share between threads.
TINY_PARAMETERS = 20_000_000


def choose_device(device: str) -> str:
    """The device a setting of `auto` stands for."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device; use --pair.device cpu")
    number = torchrun_number(local=True)
    if device == "cuda" and number is not None:  # torchrun numbers its processes; --workers shows each one device only
        return f"cuda:{number % max(torch.cuda.device_count(), 1)}"
    return device


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
    """Warn about 16-bit weights on a processor that has no instructions for them."""
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


def memory(device: str) -> tuple[int, int]:
    """Bytes free, and bytes in total, on a device: a GPU's own, the machine's otherwise."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))
    machine = psutil.virtual_memory()
    return int(machine.available), int(machine.total)
