"""Settings of the prompts and of how answers are checked."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.config.base import Settings, require


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(Settings):
    """Where prompts come from and how answers are checked."""

    source: str = "arithmetic"
    """A built-in task, a .jsonl file, a hub dataset name, or reasoning-gym:TASK."""
    options: tuple[str, ...] = ()
    """Settings of a reasoning-gym task, each as KEY=VALUE."""
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
    """Seed of a built-in task's endless prompts."""

    def __post_init__(self) -> None:
        require(self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}")
        require(
            (self.pattern is not None) == (self.checker == "regex"),
            "pattern and checker=regex go together: give both or neither",
        )
