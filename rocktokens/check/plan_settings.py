"""Settings of a budget: how large a run is, and on what machine, for `rocktokens check --plan`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from rocktokens.settings import Settings, require

Machine = Literal["h100", "h200", "b200", "mi300x", "a100", "l40s", "rtx4090", "cpu"]


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(Settings):
    """How large the run is; rollouts per prompt and their length are --rollouts'."""

    prompts: int = 20_000
    """Prompts that are sampled and scored."""
    mean_tokens: int | None = None
    """Mean length of a rollout; unset: max_new_tokens, the most it can be."""
    checkpoints: int = 2
    """Checkpoints that are scored."""
    steps: int = 300
    """Optimiser steps of the distillation."""
    step_rollouts: int = 64
    """Rollouts an optimiser step."""
    causal_prompts: int = 1000
    """Prompts of the census."""
    causal_rollouts: int = 4
    """Rollouts to each of them."""
    candidates: int = 200
    """Token types that are banned."""
    resumed_share: float = 0.3
    """Share of the census's rollouts that use a candidate, on average, and are resumed halfway."""
    machine: Machine = "h100"
    """What it runs on: h100, h200, b200, mi300x, a100, l40s, rtx4090, or cpu (this machine, measured)."""
    tflops: float | None = None
    """Peak of one device in 16-bit products, dense, in TFLOP/s; unset: the machine's."""
    bandwidth: float | None = None
    """Bandwidth of its memory, in TB/s; unset: the machine's."""
    memory: float | None = None
    """Size of its memory, in GB; unset: the machine's."""
    devices: int = 8
    """How many of them."""
    utilisation: float = 0.4
    """Share of the peak arithmetic that scoring and training reach."""

    @property
    def where(self) -> str:
        """The machine in words."""
        name = "this machine" if self.machine == "cpu" else f"{self.devices} x {self.machine}"
        own = [figure for figure in ("tflops", "bandwidth", "memory") if getattr(self, figure) is not None]
        return f"{name} with your own {' and '.join(own)}" if own else name

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(not whole or value >= 1, f"budget.{item.name} must be at least 1, got {value}")
        for name in ("tflops", "bandwidth", "memory"):
            figure = getattr(self, name)
            require(figure is None or figure > 0, f"budget.{name} must be above 0, got {figure}")
        require(0 < self.resumed_share <= 1, f"budget.resumed_share is a share in (0, 1], got {self.resumed_share}")
        require(0 < self.utilisation <= 1, f"budget.utilisation is a share in (0, 1], got {self.utilisation}")
