"""Settings of a budget: how large a run is, and on what machine, for `rocktokens check --plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.settings import Count, Positive, Settings, ShareOrAll

Machine = Literal["h100", "h200", "b200", "mi300x", "a100", "l40s", "rtx4090", "cpu"]


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(Settings, section="budget"):
    """How large the run is; rollouts per prompt and their length are --rollouts'."""

    prompts: Count = 20_000
    """Prompts that are sampled and scored."""
    mean_tokens: Count | None = None
    """Mean length of a rollout; unset: max_new_tokens, the most it can be."""
    checkpoints: Count = 2
    """Checkpoints that are scored."""
    steps: Count = 300
    """Optimiser steps of the distillation."""
    step_rollouts: Count = 64
    """Rollouts an optimiser step."""
    causal_prompts: Count = 1000
    """Prompts of the census."""
    causal_rollouts: Count = 4
    """Rollouts to each of them."""
    candidates: Count = 200
    """Token types that are banned."""
    resumed_share: ShareOrAll = 0.3
    """Share of the census's rollouts that use a candidate, on average, and are resumed halfway."""
    machine: Machine = "h100"
    """What it runs on: h100, h200, b200, mi300x, a100, l40s, rtx4090, or cpu (this machine, measured)."""
    tflops: Positive | None = None
    """Peak of one device in 16-bit products, dense, in TFLOP/s; unset: the machine's."""
    bandwidth: Positive | None = None
    """Bandwidth of its memory, in TB/s; unset: the machine's."""
    memory: Positive | None = None
    """Size of its memory, in GB; unset: the machine's."""
    devices: Count = 8
    """How many of them."""
    utilisation: ShareOrAll = 0.4
    """Share of the peak arithmetic that scoring and training reach."""

    @property
    def where(self) -> str:
        """The machine in words."""
        name = "this machine" if self.machine == "cpu" else f"{self.devices} x {self.machine}"
        own = [figure for figure in ("tflops", "bandwidth", "memory") if getattr(self, figure) is not None]
        return f"{name} with your own {' and '.join(own)}" if own else name
