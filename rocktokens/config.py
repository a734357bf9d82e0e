"""The configuration: one frozen dataclass per stage. Flags, help and YAML keys are generated from these fields.

A recipe is a function that returns a configuration. This room knows no model, file format or default path beyond
what a user may set; it is imported on the `--help` path and therefore imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.errors import ConfigError

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def require(condition: bool, message: str) -> None:
    """Refuse a setting, saying what would work."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Which two models, and how they are loaded."""

    student: str = ""
    """Student: a Hugging Face directory or hub name, or a .gguf file."""
    teacher: str = ""
    """Teacher: likewise; it must share the student's tokenizer."""
    dtype: Dtype = "auto"
    """Weights' dtype; auto is float32 on a CPU and the checkpoint's own elsewhere."""
    device: Device = "auto"
    """Where the models live; auto takes CUDA or MPS where there is one."""
    device_map: str | None = None
    """Passed to transformers for models larger than one device, e.g. auto."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: such models are refused."""
    allow_pickle: bool = False
    """Load pickled weights (.bin, .pt). Off: only safetensors and GGUF."""
    threads: int | None = None
    """CPU threads for torch; unset: one for tiny models, otherwise the free cores."""

    def __post_init__(self) -> None:
        require(self.threads is None or self.threads >= 1, f"threads must be at least 1, got {self.threads}")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Where prompts come from and how answers are checked."""

    source: str = "arithmetic"
    """A built-in task, a .jsonl file, or a hub dataset name."""
    split: str = "train"
    """Split of a hub dataset, or of a built-in task: train, detection, causal."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    prompt_field: str = "prompt"
    """Column with the prompt text."""
    messages_field: str = "messages"
    """Column with chat messages; used where a row has it, through the tokenizer's own chat template."""
    chat: bool = False
    """Put prompt text, too, through the chat template, as a user's message."""
    answer_field: str = "answer"
    """Column with the reference answer; optional."""
    checker: str = "auto"
    """auto, math, exact, regex, none, or a Python function by dotted path (package.module:function)."""
    pattern: str | None = None
    """For checker=regex: the pattern whose last match's first group is compared with the answer."""
    limit: int | None = None
    """Use only the first so many prompts."""
    seed: int = 0
    """Seed of a built-in task's endless problems."""

    def __post_init__(self) -> None:
        require(self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}")
        require(
            (self.pattern is not None) == (self.checker == "regex"),
            "pattern and checker=regex go together: give both or neither",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    num_rollouts: int = 4
    """Responses sampled per prompt."""
    max_new_tokens: int = 512
    """Length limit of a response; a rollout that meets it is marked truncated."""
    temperature: float = 1.0
    """Sampling temperature; divergences are always scored at 1.0."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    top_k: int | None = None
    """Sample only among the k most probable tokens."""
    top_p: float | None = None
    """Sample only among the most probable tokens that together hold this probability."""
    batch_size: int = 64
    """Rollouts in flight at once."""
    seed: int = 0
    """Every rollout's own seed derives from this, its prompt and its number."""

    def __post_init__(self) -> None:
        require(self.num_rollouts >= 1, f"num_rollouts must be at least 1, got {self.num_rollouts}")
        require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        require(
            self.temperature > 0,
            f"temperature must be > 0, got {self.temperature}; for greedy decoding pass greedy=True",
        )
        require(self.top_k is None or self.top_k >= 1, f"top_k must be at least 1, got {self.top_k}; unset it instead")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """How rollouts are scored."""

    checkpoints: str = "all"
    """all kept checkpoints of the run, or their steps as a comma-separated list."""
    token_budget: int = 8192
    """Padded tokens in one forward pass; sets the memory scoring takes."""
    chunk: int | None = None
    """Rows of logits that exist at once; unset: chosen for the vocabulary."""
    gradients: bool = True
    """Gather the last checkpoint's gradients per token type on the way, for `geometry`."""

    def __post_init__(self) -> None:
        require(self.token_budget >= 1, f"token_budget must be at least 1, got {self.token_budget}")


Definition = Literal["burden", "context", "excess"]
Signal = Literal["kl", "log_ratio"]


@dataclass(frozen=True, kw_only=True)
class DetectConfig:
    """Which token types are called rocks, and by which thresholds."""

    definition: Definition = "context"
    """The rock set that later stages use; all three are computed and shown."""
    signal: Signal = "kl"
    """The loss that is ranked: exact reverse KL, or the sampled token's log-ratio."""
    k: int | Literal["auto"] = "auto"
    """Rocks to keep; auto: the largest number whose choice is stable."""
    stability: float = 0.7
    """For k=auto: least mean Jaccard of the top K of some prompts with the top K of all."""
    tau_quantile: float = 0.8
    """An occurrence persists if its loss is at or above this quantile at both checkpoints."""
    tau_pre: float | None = None
    """Threshold on the loss before OPD in nats, in place of the quantile."""
    tau_post: float | None = None
    """Threshold on the loss after OPD in nats, in place of the quantile."""
    window: int = 4
    """Tokens on either side that make up an occurrence's context."""
    gamma_share: float = 0.05
    """Contexts are similar above the cosine that this share of pairs of different types exceeds."""
    gamma: float | None = None
    """Similarity threshold as a cosine, in place of the share."""
    eta: float = 0.10
    """Least share of a type's other persistent occurrences in similar contexts."""
    max_others: int = 2048
    """Others that an occurrence is compared with; more are sampled."""
    context_dims: int = 64
    """Width of the random vectors that stand for tokens where no embedding is at hand."""
    resamples: int = 1000
    """Bootstrap resamples of prompts."""
    level: float = 0.95
    """Coverage of intervals; 1 - level is the chance of any false rock by `excess`."""
    num_rare: int = 100
    """Size of the group of rare high-loss types that rocks are set beside."""
    seed: int = 0
    """Seed of the split into halves, of samples and of resamples."""

    def __post_init__(self) -> None:
        require(self.k == "auto" or self.k >= 1, f"k must be at least 1 or auto, got {self.k}")
        for name in ("stability", "tau_quantile", "gamma_share", "eta", "level"):
            value = getattr(self, name)
            require(0 < value < 1, f"{name} must lie between 0 and 1, got {value}")
        require(self.gamma is None or -1 <= self.gamma <= 1, f"gamma is a cosine, got {self.gamma}")
        for name in ("window", "max_others", "context_dims", "num_rare"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")


@dataclass(frozen=True, kw_only=True)
class GeometryConfig:
    """How gradients per token type are kept in bounded memory."""

    exact_vocab: int = 8192
    """Up to this many token types in the vocabulary, gradients are kept exactly."""
    sketch_dims: int = 16384
    """Width of the sketch of a gradient above that; cosines err by about 2 / sqrt(width) at 95 %."""
    max_types: int = 8192
    """Token types with a gradient of their own; later ones count in the totals only."""
    seed: int = 0
    """Seed of the sketch and of the group of random others."""

    def __post_init__(self) -> None:
        for name in ("exact_vocab", "sketch_dims", "max_types"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
