"""Settings of the pair, of its prompts, of sampling and of scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.config.common import require

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


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
