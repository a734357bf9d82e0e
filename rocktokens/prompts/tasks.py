"""Prompts: the built-in worlds, any JSONL file, any hub dataset, the reasoning-gym tasks of gym.py.

    prompts = load_prompts(PromptsConfig(source="mine.jsonl"), tokenizer)

Turns what a user points at into token ids and reference answers, and says what is wrong with it. Knows no model: a
prompt is tokenised here once, and everything after works on its ids.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rocktokens.errors import ConfigError, DataError, printable
from rocktokens.prompts.checkers import NAMED_CHECKERS, MathChecker
from rocktokens.prompts.gym import gym_rows, is_gym_source
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.seeds import derive_seed
from rocktokens.settings import require
from rocktokens.world import get_world, world_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rocktokens.world.worlds import Split

Row = Mapping[str, Any]
log = logging.getLogger(__name__)

Part = Literal["train", "detection", "causal"]
PART_TENTHS: dict[Part, int] = {"train": 6, "detection": 2, "causal": 2}
TENTHS: list[Part] = [part for part, tenths in PART_TENTHS.items() for _ in range(tenths)]
DATA_FILES, MOST_FILES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".txt"), 100_000
TEMPLATE_SECONDS = 5.0  # for one prompt; templates are programs, and some do not end
BUILT_IN_PROMPTS = 1000  # a built-in task is endless; this many without a limit


@dataclass(frozen=True)
class Prompt:
    """One prompt as the models see it, with its reference answer where there is one."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    text: str
    answer: str | None
    group_id: str | None = None
    """Prompts of one group are not independent of each other; None: the prompt stands for itself."""


def load_prompts(
    config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, *, part: Part | None = None
) -> list[Prompt]:
    """The prompts a configuration points at, in order; every fault of the input is named before anything runs.

    `part` asks for one of three disjoint shares, so that no stage sees another's prompts: a built-in task's split of
    that name; of anything else, the rows whose text falls into that share by its hash. The limit is the part's own.
    """
    _refuse_ignored(config, part)
    endless, limit = is_endless(config.source), config.limit
    if config.source in world_names():
        limit = limit or BUILT_IN_PROMPTS
        split = cast("Split", part or config.split)
        problems = get_world(config.source).problems(split, limit, config.seed)
        made = (Prompt(own.id, _encode(tokenizer, own.prompt), own.prompt, own.answer) for own in problems)
    else:
        if endless:
            limit = limit or BUILT_IN_PROMPTS
            rows: Iterator[tuple[str, Row]] = (
                (name, {config.prompt_field: question, config.answer_field: answer})
                for name, question, answer in gym_rows(config.source, config.options, config.seed)
            )
        else:
            rows = _jsonl_rows(Path(config.source)) if config.source.endswith(".jsonl") else _hub_rows(config)
        made = (_row_to_prompt(name, row, config, tokenizer) for name, row in rows)
        made = (prompt for prompt in made if part is None or part_of(prompt.text) == part)
    prompts = list(islice(made, limit))
    if not prompts or (endless and len(prompts) < (limit or 0)):
        share = f" for {part}: {PART_TENTHS[part]} of 10 are set aside for it" if part else ""
        said = f"gave {len(prompts)} distinct prompts where {limit} were asked for" if prompts else "has no prompts"
        raise DataError(f"{config.source} {said}{share}; give more rows, lower prompts.limit, or vary prompts.options.")
    _refuse_bad(prompts, config, tokenizer)
    double = len(prompts) - len({prompt.text for prompt in prompts})
    if double and config.source.endswith(".jsonl"):
        log.warning(
            "%s: %d of %d prompts repeat another's text; equal texts are one group", config.source, double, len(prompts)
        )
    return _grouped(prompts)


def _grouped(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts with the name of their group: those of one text or of one value of the group field, and what they link.

    A group has the name of its first prompt's value, or of that prompt; a prompt without either has none.
    """
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(key: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for prompt in prompts:
        if prompt.group_id is not None:
            parent[root(("text", prompt.text))] = root(("value", prompt.group_id))
    roots = [root(("text", prompt.text)) for prompt in prompts]
    first: dict[tuple[str, str], str] = {}
    for prompt, key in zip(prompts, roots):
        first.setdefault(key, prompt.group_id or prompt.prompt_id)
    size = Counter(roots)
    return [
        replace(prompt, group_id=first[key] if prompt.group_id is not None or size[key] > 1 else None)
        for prompt, key in zip(prompts, roots)
    ]


def part_of(text: str) -> Part:
    """The share a prompt belongs to, by its text alone: the same text is never in two."""
    return TENTHS[derive_seed("part", text) % 10]


def is_endless(source: str) -> bool:
    """Whether a source makes as many prompts as it is asked for, so that a limit must be given."""
    return source in world_names() or is_gym_source(source)


# ---------------------------------------------------------------- where prompts come from


def _refuse_ignored(config: PromptsConfig, part: Part | None) -> None:
    """A split, option or column that a source does not have is refused, also where a stage asks for a part."""
    source, split, is_gym = config.source, config.split, is_gym_source(config.source)
    if source in world_names():
        require(split in PART_TENTHS, f"{source} has no split {split!r}; there are {', '.join(PART_TENTHS)}.")
    require(not config.options or is_gym, f"{source} is no reasoning-gym task and has no options: leave options out.")
    if is_gym or source.endswith(".jsonl"):
        known = split == PromptsConfig.split or (is_gym and split == part)
        require(known, f"{source} has no splits, stages take disjoint parts; leave split={split} out.")
    for field in ("subset", "prompt_field", "answer_field", "group_field"):
        own = getattr(config, field) != getattr(PromptsConfig, field)
        require(not (is_endless(source) and own), f"{source} makes its own prompts and answers; leave {field} out.")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL file, named by their line; blank lines are passed over."""
    if not path.is_file():
        raise DataError(f"there is no prompt file {path}.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8"))
                    json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is JSON and no text
                    said = "" if isinstance(row, dict) else f"a row must be a JSON object, got {type(row).__name__}"
                except UnicodeDecodeError as error:
                    said = f"not UTF-8 text (byte {error.start + 1}); save the file as UTF-8"
                except (RecursionError, ValueError) as error:  # also nested thousands deep, or a number of that length
                    said = f"not valid JSON ({str(error).split(';')[0]})"
                if said:
                    raise DataError(f"{path}, line {number}: {said}.")
                yield f"{path.stem}/{number}", row


def _hub_rows(config: PromptsConfig) -> Iterator[tuple[str, Row]]:
    """Rows of a dataset by hub name, or of a local directory in any layout that `datasets` reads."""
    if Path(config.source).is_dir():
        files = (name for *_, names in os.walk(config.source) for name in names)
        held = list(islice(files, MOST_FILES + 1))  # `datasets` would look through a whole disk
        if len(held) > MOST_FILES or not any(name.endswith(DATA_FILES) for name in held):
            raise ConfigError(f"{config.source} is no dataset: a directory with {', '.join(DATA_FILES)} files is one.")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", config.source):
        near = difflib.get_close_matches(config.source, world_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no task is called {config.source!r}.{hint} Built in: {', '.join(world_names())}. Or give a file that "
            "ends in .jsonl, a directory, a hub dataset as owner/name, or reasoning-gym:TASK."
        )
    import datasets

    try:
        table = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:  # an unknown split lists those that exist
        raise ConfigError(f"dataset {config.source} could not be loaded: {error}") from None
    for number, row in enumerate(table):
        yield f"{Path(config.source).name}/{config.split}/{number}", cast(Row, row)


# ---------------------------------------------------------------- from a row to token ids


def _row_to_prompt(name: str, row: Row, config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    text, messages, answer = (row.get(field) for field in (config.prompt_field, "messages", config.answer_field))
    group = row.get(config.group_field) if config.group_field is not None else None
    answer, said = None if answer is None else str(answer), ""
    if messages is None and isinstance(text, list):
        messages = text  # TRL's conversational form
    if messages is not None:
        if not isinstance(messages, list) or any(not isinstance(m, dict) or "role" not in m for m in messages):
            said = "messages must be a list of objects with role and content."
        else:
            while messages and messages[-1]["role"] == "assistant":  # what follows is for the student to write
                messages = messages[:-1]
            messages = [{**message, "content": _content(message)} for message in messages]
            silent = next((n for n, message in enumerate(messages, 1) if message["content"] is None), None)
            said = "" if messages else "there is no message for the student to answer."
            if silent is not None:
                said = f"message {silent} has no text; its content is text, or a list of parts of type text."
    elif isinstance(text, str):
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": text}] if config.chat else None
    else:
        said = (
            f"neither column {config.prompt_field!r} nor 'messages' holds text or messages. It has: "
            f"{', '.join(map(repr, row))}. Name the right one with --prompts.prompt-field."
        )
    if config.group_field is not None and group is None and not said:
        said = f"there is no group in column {config.group_field!r}. It has: {', '.join(map(repr, row))}."
    if said:
        raise DataError(f"row {name}: {said}")
    group = None if group is None else str(group)
    if messages is None:
        return Prompt(name, _encode(tokenizer, str(text)), str(text), answer, group)
    require(
        bool(tokenizer.chat_template),
        "the prompts are chat messages, but this tokenizer has no chat template. Give plain text in a prompt column, "
        "or use a chat model's tokenizer.",
    )
    try:
        text = render(tokenizer, messages, add_generation_prompt=True)
    except Exception as error:  # templates are programs and raise anything
        said = printable(error) or f"{type(error).__name__}"
        raise DataError(f"row {name}: the tokenizer's chat template does not take its messages: {said}") from error
    # The template writes the special tokens itself; adding them again would double the start token.
    return Prompt(name, tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), text, answer, group)


def _content(message: Row) -> str | None:
    """A message's text, of OpenAI's lists of parts too; None where it has none."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        return None if None in texts else "".join(map(str, texts))
    if content is None and message.get("tool_calls"):
        return ""
    return content if isinstance(content, str) else None


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    """Messages through the tokenizer's chat template, which is a program: what it raises, or TimeoutError.

    Signals reach the main thread alone, where every stage reads its prompts.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"no end within {TEMPLATE_SECONDS:g} s")

    if threading.current_thread() is not threading.main_thread():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text)["input_ids"])


# ---------------------------------------------------------------- what is refused


def _refuse_bad(prompts: list[Prompt], config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompts must leave room for a response; with the math checker answers must be readable, or all count as wrong."""
    most, checker, said = tokenizer.model_max_length, MathChecker(), ""
    worst = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    empty = [prompt.prompt_id for prompt in prompts if not prompt.prompt_ids]
    answered = [prompt for prompt in prompts if prompt.answer is not None]
    is_math = config.checker == "math" or (config.checker == "auto" and not is_endless(config.source))
    wants_answers = config.checker in ("math", "exact", "regex") or config.answer_field != PromptsConfig.answer_field
    if empty:
        said = f"{len(empty)} of {len(prompts)} prompts are empty, e.g. {empty[0]}."
    elif len(worst.prompt_ids) >= most:
        said = f"prompt {worst.prompt_id} with {len(worst.prompt_ids)} tokens leaves no room for a response in {most}."
    elif not answered and wants_answers and config.checker in NAMED_CHECKERS and config.checker != "none":
        said = (
            f"checker={config.checker} needs answers, but no row of {config.source} has column "
            f"{config.answer_field!r}. Name the column with --prompts.answer-field, or set checker=none."
        )
    elif is_math and (unreadable := [own for own in answered if not checker.readable(str(own.answer))]):
        shown = "; ".join(f"{own.prompt_id}: {own.answer!r}" for own in unreadable[:3])
        said = (
            f"{len(unreadable)} of {len(answered)} answers are neither a number nor a formula, e.g. {shown}. "
            "Use checker=exact, regex, a function of your own, or none."
        )
    if said:
        raise DataError(said)
