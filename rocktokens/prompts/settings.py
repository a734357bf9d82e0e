"""Settings of the prompts and of how answers are checked."""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.settings import Count, Seed, Settings, require


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(Settings, section="prompts"):
    """Where prompts come from and how answers are checked."""

    source: str = "arithmetic"
    """A built-in task, a .jsonl file, a hub dataset name, or reasoning-gym:TASK."""
    options: tuple[str, ...] = ()
    """Settings of a reasoning-gym task, each as KEY=VALUE with a YAML value (docs/prompts.md)."""
    split: str = "train"
    """Split of a hub dataset, or of a built-in task: train, detection, causal."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    prompt_field: str = "prompt"
    """Column with the prompt text. A row with `messages` is a chat and goes through the tokenizer's chat template."""
    chat: bool = False
    """Put prompt text, too, through the chat template, as a user's message."""
    system: str | None = None
    """For chat: a system message before the prompt text, e.g. how to write the response; unset: the template's own."""
    answer_field: str = "answer"
    """Column with the reference answer; optional."""
    group_field: str | None = None
    """Column that says which prompts belong together: copies, one template, one document. Equal texts always do."""
    checker: str = "auto"
    """auto, math, exact, regex, none, or a Python function by dotted path (package.module:function)."""
    pattern: str | None = None
    """For checker=regex: the pattern whose last match's first group is compared with the answer."""
    limit: Count | None = None
    """Use only the first prompts, up to this number."""
    seed: Seed = 0
    """Seed of the endless prompts of a built-in or reasoning-gym task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.system is None or self.chat,
            "system is a message of a chat: set chat too, or put the words into the prompts themselves",
        )
        require(
            (self.pattern is not None) == (self.checker == "regex"),
            "pattern and checker=regex go together: give both or neither",
        )
