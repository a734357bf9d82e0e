"""Prompts: the built-in worlds, any JSONL file, any hub dataset, any reasoning-gym task.

How rollouts are checked against answers is checkers.py's business.

    prompts = load_prompts(PromptsConfig(source="mine.jsonl"), tokenizer)

Turns what a user points at into token ids and reference answers, and says clearly what is wrong with it. Knows no
model: a prompt is tokenised here once, and everything after works on its ids.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rocktokens.errors import ConfigError, DataError
from rocktokens.prompts.checkers import NAMED_CHECKERS, Checker, MathChecker, how_checked, make_checker
from rocktokens.prompts.gym import gym_rows, is_gym_source
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.seeds import derive_seed
from rocktokens.values import Json
from rocktokens.world import get_world, world_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rocktokens.world.worlds import Split

__all__ = ["Checker", "MathChecker", "Prompt", "how_checked", "load_prompts", "make_checker"]  # old paths of checkers

Row = Mapping[str, Any]
log = logging.getLogger(__name__)

Part = Literal["train", "detection", "causal"]
PART_TENTHS: dict[Part, int] = {"train": 6, "detection": 2, "causal": 2}
BUILT_IN_PROBLEMS = 1000  # a built-in task is endless; this many without a limit


@dataclass(frozen=True)
class Prompt:
    """One prompt as the models see it, with its reference answer where there is one."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    text: str
    answer: str | None


def load_prompts(
    config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, *, part: Part | None = None
) -> list[Prompt]:
    """The prompts a configuration points at, in order; every fault of the input is named before anything runs.

    `part` asks for one of three disjoint shares, so that no stage sees another's prompts: a built-in task's split of
    that name; of anything else, the rows whose text falls into that share by its hash. The limit is the part's own.
    """
    _refuse_ignored(config, part)
    if config.source in world_names():
        prompts = list(_built_in_prompts(replace(config, split=part or config.split), tokenizer))
    elif is_gym_source(config.source):
        prompts = _gym_prompts(config, tokenizer, part)
    else:
        rows = _jsonl_rows(Path(config.source)) if config.source.endswith(".jsonl") else _hub_rows(config)
        made = (_row_to_prompt(name, row, config, tokenizer) for name, row in rows)
        prompts = list(islice((p for p in made if part is None or part_of(p.text) == part), config.limit))
    if not prompts:
        share = f" for {part}: {PART_TENTHS[part]} of 10 are set aside for it" if part else ""
        raise DataError(f"{config.source} has no prompts{share}; give at least one row, better hundreds.")
    _refuse_bad_lengths(prompts, tokenizer)
    _refuse_bad_answers(prompts, config)
    double = len(prompts) - len({prompt.text for prompt in prompts})
    if double and config.source.endswith(".jsonl"):
        log.warning("%s: %d of %d prompts stand there more than once", config.source, double, len(prompts))
    return prompts


def part_of(text: str) -> Part:
    """The share a prompt belongs to, by its text alone: the same text is never in two."""
    tenth = derive_seed("part", text) % 10
    for part, tenths in PART_TENTHS.items():
        if tenth < tenths:
            return part
        tenth -= tenths
    raise AssertionError("the shares make up ten tenths")


# ---------------------------------------------------------------- where prompts come from


def _refuse_ignored(config: PromptsConfig, part: Part | None) -> None:
    """A split or column that a source does not have is refused, also where a stage asks for a part of its own."""
    if config.source in world_names() and config.split not in PART_TENTHS:
        raise ConfigError(f"{config.source} has no split {config.split!r}; there are {', '.join(PART_TENTHS)}.")
    if config.options and not is_gym_source(config.source):
        raise ConfigError(f"options are settings of a reasoning-gym task; {config.source} is none: leave options out.")
    if is_gym_source(config.source) and config.split not in (PromptsConfig.split, part):
        raise ConfigError(f"{config.source} has no splits, stages take disjoint parts; leave split={config.split} out.")
    for field in ("subset", "prompt_field", "answer_field"):
        if is_endless(config.source) and getattr(config, field) != getattr(PromptsConfig, field):
            raise ConfigError(f"{config.source} makes its own prompts and answers; leave {field} out.")
    if config.source.endswith(".jsonl") and config.split != PromptsConfig.split:
        raise ConfigError(f"{config.source} is one file without splits; leave split={config.split} out.")


def _built_in_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Prompt]:
    split = cast("Split", config.split)
    for problem in get_world(config.source).problems(split, config.limit or BUILT_IN_PROBLEMS, config.seed):
        yield Prompt(problem.id, _encode(tokenizer, problem.prompt), problem.prompt, problem.answer)


def _gym_prompts(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, part: Part | None) -> list[Prompt]:
    wanted = config.limit or BUILT_IN_PROBLEMS
    found: list[Prompt] = []
    for name, question, answer in gym_rows(config.source, config.options, config.seed):
        row = {config.prompt_field: question, config.answer_field: answer}
        prompt = _row_to_prompt(name, row, config, tokenizer)
        if part is None or part_of(prompt.text) == part:
            found.append(prompt)
        if len(found) == wanted:
            return found
    raise DataError(
        f"{config.source} gave {len(found)} distinct prompts where {wanted} were asked for; lower prompts.limit or "
        "choose settings with more variety through prompts.options"
    )


def is_endless(source: str) -> bool:
    """Whether a source makes as many prompts as it is asked for, so that a limit must be given."""
    return source in world_names() or is_gym_source(source)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL file, named by their line; blank lines are passed over."""
    if not path.is_file():
        raise DataError(f"there is no prompt file {path}.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not UTF-8 text (byte {error.start + 1}); save the file as UTF-8."
                ) from None
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno}).") from None
            except (RecursionError, ValueError) as error:  # nested thousands deep, or a number of thousands of digits
                raise DataError(f"{path}, line {number}: cannot be read ({str(error).split(';')[0]}).") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a row must be a JSON object, got {type(row).__name__}.")
            yield f"{path.stem}/{number}", row


def _hub_rows(config: PromptsConfig) -> Iterator[tuple[str, Row]]:
    """Rows of a dataset by hub name, or of a local directory in any layout that `datasets` reads."""
    is_directory = Path(config.source).is_dir()
    if "/" not in config.source and not is_directory:
        raise ConfigError(_unknown_source(config.source))
    import datasets

    try:
        table = datasets.load_dataset(config.source, config.subset, split=config.split)
    except ValueError as error:  # unknown split or subset: the message lists those that exist
        raise ConfigError(f"dataset {config.source}: {error}") from None
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"dataset {config.source} could not be loaded: {error}") from None
    name = Path(config.source).name
    for number, row in enumerate(table):
        yield f"{name}/{config.split}/{number}", cast(Row, row)


def _unknown_source(source: str) -> str:
    near = difflib.get_close_matches(source, world_names(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"no task is called {source!r}.{hint} Built in: {', '.join(world_names())}. "
        "Or give a file that ends in .jsonl, a directory, a hub dataset as owner/name, or reasoning-gym:TASK."
    )


# ---------------------------------------------------------------- from a row to token ids


def _row_to_prompt(name: str, row: Row, config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    answer = row.get(config.answer_field)
    answer = None if answer is None else _written(name, str(answer))
    if row.get("messages") is not None:
        messages = _valid_messages(name, row["messages"])
    elif isinstance(row.get(config.prompt_field), str):
        text = _written(name, row[config.prompt_field])
        if not config.chat:
            return Prompt(name, _encode(tokenizer, text), text, answer)
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": text}]
    elif config.prompt_field in row:
        kind = type(row[config.prompt_field]).__name__
        raise DataError(f"row {name}: column {config.prompt_field!r} must hold text, got {kind}.")
    else:
        columns = ", ".join(map(repr, row))
        raise DataError(
            f"row {name} has neither column {config.prompt_field!r} nor 'messages'. It has: {columns}. "
            "Name the right one with --prompts.prompt-field."
        )
    ids, text = _apply_template(messages, tokenizer)
    return Prompt(name, ids, text, answer)


def _written(name: str, text: str) -> str:
    """A text that can be written down again; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"row {name}: character {error.start + 1} is half of a surrogate pair and no text; mend the row."
        ) from None
    return text


def _valid_messages(name: str, messages: Any) -> list[Json]:
    """Messages up to the last that is not the assistant's: what follows is for the student to write."""
    if not isinstance(messages, list) or any(not isinstance(m, dict) or "role" not in m for m in messages):
        raise DataError(f"row {name}: messages must be a list of objects with role and content.")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"row {name}: there is no message for the student to answer.")
    return list(messages)


def _apply_template(messages: list[Json], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], str]:
    if not tokenizer.chat_template:
        raise ConfigError(
            "the prompts are chat messages, but this tokenizer has no chat template. Give plain text in a prompt "
            "column, or use a chat model's tokenizer."
        )
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    # The template writes the special tokens itself; adding them again would double the start token.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text)["input_ids"])


# ---------------------------------------------------------------- what is refused


def _refuse_bad_lengths(prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    empty = [p.prompt_id for p in prompts if not p.prompt_ids]
    if empty:
        raise DataError(f"{len(empty)} of {len(prompts)} prompts are empty, the first is {empty[0]}.")
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids))
    if len(longest.prompt_ids) >= tokenizer.model_max_length:
        long = sum(len(p.prompt_ids) >= tokenizer.model_max_length for p in prompts)
        raise DataError(
            f"{long} of {len(prompts)} prompts leave no room for a response in the context of "
            f"{tokenizer.model_max_length} tokens; the longest, {longest.prompt_id}, has {len(longest.prompt_ids)}."
        )


def _refuse_bad_answers(prompts: list[Prompt], config: PromptsConfig) -> None:
    """With the math checker every answer must be a number or a formula, or accuracy would count it as wrong."""
    if config.checker not in NAMED_CHECKERS or config.checker == "none":
        return
    answered = [prompt for prompt in prompts if prompt.answer is not None]
    if not answered and config.checker != "auto":
        raise DataError(
            f"checker={config.checker} needs answers, but no row of {config.source} has column "
            f"{config.answer_field!r}. Name the column with --prompts.answer-field, or set checker=none."
        )
    if not answered and config.answer_field != PromptsConfig.answer_field:
        raise DataError(f"no row of {config.source} has column {config.answer_field!r}, named by prompts.answer_field.")
    own_checker = config.checker == "auto" and is_gym_source(config.source)
    if config.source in world_names() or own_checker or config.checker not in ("auto", "math"):
        return
    checker = MathChecker()
    unreadable = [p for p in answered if not checker.readable(cast(str, p.answer))]
    if unreadable:
        shown = "; ".join(f"{p.prompt_id}: {p.answer!r}" for p in unreadable[:3])
        raise DataError(
            f"{len(unreadable)} of {len(answered)} answers are neither a number nor a formula, e.g. {shown}. "
            "Use checker=exact, regex, a function of your own, or none."
        )
