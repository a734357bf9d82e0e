"""Settings of the two stages of distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from rocktokens.select.settings import SelectorConfig
from rocktokens.servers.settings import is_base_url
from rocktokens.settings import Count, Length, Positive, Seed, Settings, Share, immaterial, require


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(Settings, section="distill.off_policy"):
    """Training on the teacher's own answers, before OPD."""

    answers: Count | None = None
    """Teacher answers to train on, one per prompt; unset: this stage is left out."""
    epochs: Count = 1
    """Passes over the answers."""
    learning_rate: Positive = 2e-5
    """Peak learning rate."""
    batch: Count = 128
    """Answers an optimiser step."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(Settings, section="distill.vllm"):
    """The student's rollouts by vLLM while it trains (generation=vllm); needs CUDA."""

    url: str | None = None
    """Base URL of a `trl vllm-serve`, which is sent the student's weights after every step; unset: vLLM runs in the
    training processes, on their GPUs."""
    memory: Share = 0.3
    """Without a URL: share of each GPU's memory that vLLM takes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.url is None or is_base_url(self.url),
            f"vllm.url takes a base URL such as http://127.0.0.1:8000, got {self.url!r}",
        )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Settings, section="distill"):
    """On-policy distillation: how long, how fast, on which tokens, and what is kept."""

    steps: Count = 300
    """Optimiser steps."""
    learning_rate: Positive = 2e-6
    """Peak learning rate."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """The learning rate after the warm-up: falling to 0 by a line or a cosine, or constant."""
    warmup: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the steps in which the learning rate rises."""
    prompts_per_step: Count = 16
    """Prompts an optimiser step."""
    rollouts_per_prompt: Count = 4
    """Responses the student samples for each, at temperature 1."""
    max_new_tokens: Length = 512
    """Length limit of a response."""
    micro_batch: Count | None = None
    """Rollouts in one forward and backward pass; unset: chosen for the models."""
    bf16: bool | None = None
    """Matrix products in bfloat16, in rollouts too; weights, logits and losses stay float32 but come from hidden states
    with bfloat16's error. Unset: where CUDA has it. Worth its noise on a CPU that has instructions for it (avx512_bf16,
    amx) and a model of some size."""
    generation: Literal["auto", "ours", "trl", "vllm"] = "auto"
    """Who samples; auto: our sampler, or TRL's generation where the model is sharded."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """For generation=vllm."""
    normalise: Literal["kept", "all"] = "kept"
    """Divide the loss by the weight of the kept tokens, or by the number of all tokens."""
    loss: Literal["reverse_kl", "todi", "srkl"] = "reverse_kl"
    """What is minimised at each token: reverse KL; todi, both KLs mixed token by token; srkl, reverse KL to a mixture
    of both models. Occurrences are recorded with reverse_kl only."""
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    """Which tokens carry loss."""
    shadows: tuple[str, ...] = ()
    """Selectors that are recorded but not in force, by name, with their default settings."""
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """The stage before."""
    processes: Count = immaterial(1)
    """Processes that train together on this machine, started by torchrun for this stage alone."""
    lora_rank: Count | None = None
    """Train adapters of this rank instead of the whole student."""
    keep: Annotated[int, Meta(ge=1, le=10_000)] = 7
    """Checkpoints kept for scoring, evenly spaced, after the one that OPD starts from."""
    save_every: Count | None = immaterial(None)
    """Steps between checkpoints to resume from; unset: a tenth of the run, at most 100."""
    telemetry_every: Count | None = 10
    """Steps between two recordings of every token's occurrence; unset: none."""
    audit_every: Count | None = immaterial(None)
    """Steps between two audits, in which every position is measured to record what the selector changed and what the
    shadows would keep; unset: only what is measured anyway."""
    evaluate_every: Count | None = None
    """Steps between two evaluations on held-out prompts; unset: a tenth of the run."""
    report_to: tuple[str, ...] = immaterial(())
    """Trackers: wandb, tensorboard, trackio."""
    seed: Seed = 0
    """Seed of the order of prompts, of rollouts and of evaluation."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, not the whole student."""
        return self.lora_rank is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        rollouts = self.prompts_per_step * self.rollouts_per_prompt
        require(
            self.micro_batch is None or rollouts % self.micro_batch == 0,
            f"micro_batch {self.micro_batch} does not divide the {rollouts} rollouts of a step",
        )
