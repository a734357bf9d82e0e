"""The configuration: one frozen dataclass per stage. Flags, help and YAML keys are generated from these fields.

A recipe is a function that returns a configuration. This room knows no model, file format or default path beyond
what a user may set; it is imported on the `--help` path and therefore imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
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


# Selector → the fields of SelectorConfig it takes.
SELECTOR_OPTIONS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "freeze": ("rocks", "window", "tau"),
    "soft": ("rocks", "lam", "window", "tau"),
    "random": ("rocks", "lam", "match_loss", "window", "tau", "seed"),
    "adaptive": ("budget", "max_fall", "audit", "seed"),
    "entropy": ("keep",),
    "divergence": ("keep",),
    "prefix": ("keep",),
}


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """Which tokens carry loss, and how much."""

    name: str = "uniform"
    """uniform, freeze, soft, random, adaptive, entropy, divergence, prefix; or your own, as package.module:Class."""
    rocks: tuple[int, ...] = ()
    """Token ids for freeze, soft and random; empty: those that `detect` found in the run."""
    lam: float | None = None
    """Loss weight of a rock for soft (0.5 if unset), of a control for random (0 if unset)."""
    keep: float = 0.5
    """Share kept by entropy and divergence; for prefix: share of max_new_tokens after which sampling stops."""
    window: int = 0
    """Positions on either side that a rock's high-divergence window may reach; 0 is off."""
    tau: float | None = None
    """Loss in nats above which a window goes on; unset: each step's 80th percentile."""
    match_loss: bool = False
    """For random: match the loss of the frozen positions too, not only their number and run lengths."""
    budget: float = 0.005
    """For adaptive: least share of the loss that makes a token type worth freezing."""
    max_fall: float = 0.15
    """For adaptive: a type whose mean loss fell by more than this share still learns."""
    audit: float = 0.05
    """For adaptive: share of frozen positions left in the loss."""
    seed: int = 0
    """Seed of controls and audits."""

    def __post_init__(self) -> None:
        if self.name not in SELECTOR_OPTIONS:
            return  # a class of the user's own, or a mistake that make_selector names
        takes = SELECTOR_OPTIONS[self.name]
        for item in fields(self):
            changed = getattr(self, item.name) != item.default
            require(
                item.name == "name" or item.name in takes or not changed,
                f"selector {self.name} has no {item.name}; it takes {', '.join(takes) or 'no options'}",
            )

    def options(self) -> dict[str, object]:
        """The settings this selector takes, without those left unset."""
        takes = SELECTOR_OPTIONS.get(
            self.name, tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)
        )
        return {name: getattr(self, name) for name in takes if name != "name" and getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig:
    """Training on the teacher's own answers, before OPD."""

    answers: int | None = None
    """Teacher answers to train on, one a prompt; unset: this stage is left out."""
    epochs: int = 1
    """Passes over the answers."""
    learning_rate: float = 2e-5
    """Peak learning rate."""
    batch: int = 128
    """Answers an optimiser step."""
    hard_share: float = 0.5
    """Share of cross-entropy with the answer's own tokens in the loss; the rest is forward KL."""

    def __post_init__(self) -> None:
        require(
            self.answers is None or self.answers >= 1, f"answers must be at least 1, got {self.answers}; or unset it"
        )
        require(self.epochs >= 1 and self.batch >= 1, f"epochs and batch must be at least 1, got {self}")
        require(self.learning_rate > 0, f"learning_rate must be > 0, got {self.learning_rate}")
        require(0 <= self.hard_share <= 1, f"hard_share must lie in [0, 1], got {self.hard_share}")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """On-policy distillation: how long, how fast, on which tokens, and what is kept."""

    steps: int = 300
    """Optimiser steps; with until=saturated the most that are taken."""
    until: Literal["steps", "saturated"] = "steps"
    """Stop after the steps, or earlier when the loss no longer falls."""
    saturation_on: Literal["loss", "rest"] = "loss"
    """Which loss is tested: the whole, or that of everything but the rocks."""
    learning_rate: float = 2e-6
    """Peak learning rate."""
    schedule: Literal["auto", "linear", "cosine", "constant"] = "auto"
    """After the warm-up; auto: linear to 0 over fixed steps, constant until saturated."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    prompts_per_step: int = 16
    """Prompts an optimiser step."""
    rollouts_per_prompt: int = 4
    """Responses the student samples for each, at temperature 1."""
    max_new_tokens: int = 512
    """Length limit of a response."""
    micro_batch: int | None = None
    """Rollouts in one forward and backward pass; unset: chosen for the models."""
    generation: Literal["auto", "ours", "trl", "vllm"] = "auto"
    """Who samples; auto: our sampler, or TRL's generation where the model is sharded."""
    normalise: Literal["kept", "all"] = "kept"
    """Divide the loss by the weight of the kept tokens, or by the number of all tokens."""
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    """Which tokens carry loss."""
    shadows: tuple[str, ...] = ()
    """Selectors recorded beside the one in force, by name, with their default settings."""
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """The stage before."""
    lora_rank: int | None = None
    """Train adapters of this rank instead of the whole student."""
    keep: int = 7
    """Checkpoints kept for scoring, evenly spaced, beside the one that OPD starts from."""
    save_every: int | None = None
    """Steps between checkpoints to resume from; unset: a tenth of the run, at most 100."""
    telemetry_every: int | None = 10
    """Steps between two recordings of every token's occurrence; unset: none."""
    evaluate_every: int | None = None
    """Steps between two evaluations on held-out problems; unset: a tenth of the run."""
    evaluate_rollouts: int = 1
    """Responses to each held-out problem."""
    report_to: tuple[str, ...] = ()
    """Trackers: wandb, tensorboard, trackio."""
    seed: int = 0
    """Seed of the order of prompts, of rollouts and of evaluation."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "rollouts_per_prompt", "max_new_tokens", "keep", "evaluate_rollouts"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("micro_batch", "lora_rank", "save_every", "telemetry_every", "evaluate_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}; or unset it")
        require(self.learning_rate > 0, f"learning_rate must be > 0, got {self.learning_rate}")
        require(0 <= self.warmup < 1, f"warmup is a share of the steps in [0, 1), got {self.warmup}")
        require(self.clip > 0, f"clip must be > 0, got {self.clip}")
        rollouts = self.prompts_per_step * self.rollouts_per_prompt
        require(
            self.micro_batch is None or rollouts % self.micro_batch == 0,
            f"micro_batch {self.micro_batch} does not divide the {rollouts} rollouts of a step",
        )
        unknown = [name for name in self.shadows if name not in SELECTOR_OPTIONS and ":" not in name]
        require(
            not unknown,
            f"no selector is called {unknown[0] if unknown else ''}; there are {', '.join(SELECTOR_OPTIONS)}",
        )


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """The rollouts that knock-outs and grafts start from, on problems that detection did not use."""

    problems: int = 2000
    """Problems at most; fewer where the source has fewer."""
    rollouts: int = 2
    """Responses sampled per problem."""
    source: str | None = None
    """Where the problems come from; unset: what the run's own prompts have besides those detection used."""
    split: str | None = None
    """Split of a hub dataset; unset: the run's own, and `causal` of a built-in task."""
    reuse_prompts: bool = False
    """Use the problems that detection used, too. Rocks were chosen on them: effects may look larger than they are."""
    checkpoint: str = "last"
    """Who writes: last (kept checkpoint, else the student), student, or a step."""
    max_new_tokens: int | None = None
    """Length limit of a response; unset: that of the run's rollouts, else 512."""
    temperature: float = 1.0
    """Sampling temperature."""
    greedy: bool = False
    """Take the most probable token instead of sampling."""
    top_k: int | None = None
    """Sample only among the k most probable tokens. Knock-outs are then generated in full: resuming is not exact."""
    top_p: float | None = None
    """Sample only among the most probable tokens that together hold this probability. As with top_k."""
    batch_size: int = 256
    """Rollouts in flight at once."""
    seed: int = 0
    """Every rollout's and every resumption's own seed derives from this."""

    def __post_init__(self) -> None:
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        require(self.rollouts >= 1, f"rollouts must be at least 1, got {self.rollouts}")
        limit = self.max_new_tokens
        require(limit is None or limit >= 1, f"max_new_tokens must be at least 1, got {limit}")
        require(self.temperature > 0, f"temperature must be > 0, got {self.temperature}; for greedy set greedy")
        require(self.top_k is None or self.top_k >= 1, f"top_k must be at least 1, got {self.top_k}; unset it instead")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        require(not self.greedy or self.rollouts == 1, "greedy responses are all alike; set rollouts to 1")


SetKind = Literal["token", "window", "family"]


@dataclass(frozen=True, kw_only=True)
class KnockoutConfig:
    """Which token types are banned, how often, and what counts as an effect."""

    candidates: tuple[str, ...] = ()
    """Token types to test, as text, or as ids like #17; unset: the top of types.parquet."""
    top: int = 200
    """How many token types, by the definition's score, where none are named."""
    definition: Definition | None = None
    """The score that orders them; unset: the one `detect` chose."""
    kinds: tuple[SetKind, ...] = ("token",)
    """What is banned together: token (the type alone), window (with the candidates in its high-divergence windows),
    family (with its other surface forms: leading space, case)."""
    window_share: float = 0.1
    """A candidate belongs to a window set if it stands in so many of the occurrences' windows, as a share of them."""
    controls: bool = True
    """For every rock also ban a non-rock that is as frequent."""
    until: Literal["decided", "budget"] = "decided"
    """decided: problems are added in rounds and a set stops when its verdict is in; budget: all problems for all."""
    rounds: int = 4
    """Looks at most, each at twice the problems of the one before; they share alpha."""
    repeats: int = 1
    """Continuations per resumption, of the knock-out and of the rollout it is compared with."""
    placebo_share: float = 0.125
    """Share of the problems on which every resumption is also done with nothing banned: the noise floor."""
    epsilon: float = 0.01
    """Smallest change of accuracy that matters."""
    alpha: float = 0.05
    """Error rate of each verdict."""
    power: float = 0.8
    """Power at which the smallest detectable effect is stated."""
    resamples: int = 10_000
    """Bootstrap resamples of problems, and sign flips."""

    def __post_init__(self) -> None:
        require(self.top >= 1, f"top must be at least 1, got {self.top}")
        require(len(self.kinds) > 0, "kinds must name at least one of token, window, family")
        require(self.rounds >= 1, f"rounds must be at least 1, got {self.rounds}")
        require(self.repeats >= 1, f"repeats must be at least 1, got {self.repeats}")
        for name in ("epsilon", "alpha", "power"):
            require(0 < getattr(self, name) < 1, f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("placebo_share", "window_share"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")


@dataclass(frozen=True, kw_only=True)
class GraftConfig:
    """Which tokens the student draws again from the teacher."""

    problems: int = 1000
    """Problems at most, the first of the baseline's."""
    definition: Definition | None = None
    """Whose rock set is grafted; unset: the one `detect` chose."""
    rocks: tuple[str, ...] = ()
    """The set itself, as text, or as ids like #17; unset: the run's rocks."""
    clusters: bool = True
    """Also graft each cluster of token types by itself."""
    level: float = 0.95
    """Coverage of intervals."""
    resamples: int = 10_000
    """Bootstrap resamples of problems."""

    def __post_init__(self) -> None:
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        require(0 < self.level < 1, f"level must lie between 0 and 1, got {self.level}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")
