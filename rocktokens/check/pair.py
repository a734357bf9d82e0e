"""Checks of a pair that need no weights: tokenizer, end tokens, chat templates, vocabulary, sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocktokens.check.findings import Finding, judge
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.sample.settings import RolloutConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = {"role": "user", "content": "What is 3 + 4?"}
ANSWER = "The answer is 7."
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [QUESTION],
    [{"role": "system", "content": "Be brief."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "It is 7."}, {"role": "user", "content": "And 5 + 6?"}],
)
NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object", "properties": NUMBERS}}
TOOL = {"type": "function", "function": ADD}


@dataclass(frozen=True)
class Side:
    """One model of the pair, without its weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    config: Any
    generation: object | None

    @property
    def generation_ends(self) -> set[int] | None:
        """End tokens of the generation config, or of the configuration where there is none."""
        named = getattr(self.generation, "eos_token_id", None)
        if named is None:
            named = getattr(self.config, "eos_token_id", None)
        return None if named is None else set(named if isinstance(named, list | tuple) else [named])

    @property
    def ends(self) -> set[int]:
        """Every id that ends a rollout of this model."""
        return ({self.tokenizer.eos_token_id} - {None}) | (self.generation_ends or set())

    def spell(self, ids: Sequence[int] | set[int]) -> str:
        """Ids with their tokens."""
        tokens = self.tokenizer.convert_ids_to_tokens(sorted(ids))
        return ", ".join(f"{token} ({id_})" for id_, token in zip(sorted(ids), tokens)) or "none"

    def render(self, messages: list[dict[str, str]], tools: list[Any] | None = None) -> str:
        """Messages through the chat template."""
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # templates are programs of their own and raise what they like
            return f"refused: {error}"


def load_side(name: str, config: PairConfig) -> Side:
    """Tokenizer and configurations of a model."""
    from transformers import GenerationConfig

    from rocktokens.models.pair import load_tokenizer, model_config

    generation = None
    has_one = not Path(name).is_dir() or (Path(name) / "generation_config.json").exists()
    if has_one and not name.endswith(".gguf"):
        with contextlib.suppress(OSError, ValueError):
            generation = GenerationConfig.from_pretrained(name)
    return Side(name, load_tokenizer(name, config), model_config(name, config), generation)


def pair_findings(student: Side, teacher: Side, rollouts: RolloutConfig) -> list[Finding]:
    """Every check that tokenizers and configurations allow."""
    return [
        tokenizers(student, teacher),
        end_tokens(student, teacher),
        chat_template(student, teacher),
        vocabulary(student, teacher),
        sampling(rollouts),
    ]


def tokenizers(student: Side, teacher: Side) -> Finding:
    """Do ids mean the same for both?"""
    from rocktokens.models.pair import check_tokenizers

    names = PairConfig(student=student.name, teacher=teacher.name)
    number, said = "", ""
    try:
        number = f"{check_tokenizers(names, (student.tokenizer, teacher.tokenizer))[1]:,} token types"
    except ConfigError as error:
        said = str(error)
    remedy = "Choose a teacher of the same tokenizer family."
    return judge("tokenizer", bool(said), number, "Every id means the same for both models.", said, remedy)


def end_tokens(student: Side, teacher: Side) -> Finding:
    """Do student, teacher, template and generation config end a rollout with the same token?"""
    only = student.ends ^ teacher.ends
    said, remedy = "", ""
    for who, side in (("student", student), ("teacher", teacher)):
        own, turn = side.tokenizer.eos_token_id, _template_end(side)
        if side.generation_ends is not None and own is not None and own not in side.generation_ends:
            ends = side.spell(side.generation_ends)
            said = f"The {who}'s tokenizer ends with {side.spell([own])}, its generation config with {ends}."
            remedy = "Add the tokenizer's end token to eos_token_id in generation_config.json."
        elif turn is not None and turn not in side.ends:
            said = (
                f"The {who}'s chat template ends a turn with {side.spell([turn])}, which is none of its end tokens "
                f"{side.spell(side.ends)}."
            )
            remedy = "Add that token to eos_token_id in generation_config.json, or rollouts run on into the next turn."
    if not student.ends:
        said, remedy = "The student names no end token.", "Set eos_token in its tokenizer."
    elif only:
        said = f"The student ends with {student.spell(student.ends)}, the teacher with {teacher.spell(teacher.ends)}."
        remedy = (
            "Give both the same eos_token_id in generation_config.json: the teacher rewards an end that the student "
            "does not stop at, and lengths explode."
        )
    right = f"Rollouts end with {student.spell(student.ends)} everywhere."
    return judge("end token", bool(said), f"{len(only) or int(bool(said))} differ", right, said, remedy)


def _template_end(side: Side) -> int | None:
    """The special token that the chat template puts after an assistant's message; None where there is none."""
    if not side.tokenizer.chat_template:
        return None
    try:
        text = side.tokenizer.apply_chat_template([QUESTION, {"role": "assistant", "content": ANSWER}], tokenize=False)
    except Exception:  # templates are programs of their own and raise what they like
        return None
    after = side.tokenizer(str(text).rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = {id_ for id_, token in side.tokenizer.added_tokens_decoder.items() if token.special}
    return next((id_ for id_ in after if id_ in special | set(side.tokenizer.all_special_ids)), None)


def chat_template(student: Side, teacher: Side) -> Finding:
    """Do both templates render the same messages to the same text?"""
    check = "chat template"
    ours, theirs = student.tokenizer.chat_template, teacher.tokenizer.chat_template
    if not ours and not theirs:
        return Finding(check, "fine", "0 templates", "Neither model has a chat template; prompts are plain text.")
    said, number = "", "0 differences"
    if not ours or not theirs:
        said, number = f"Only the {'student' if ours else 'teacher'} has a chat template.", "1 template"
    cases = [(messages, None, f"{len(messages)} messages") for messages in CONVERSATIONS]
    for messages, tools, what in [] if said else [*cases, (CONVERSATIONS[0], [TOOL], "message with a tool")]:
        one, two = student.render(messages, tools), teacher.render(messages, tools)
        if one != two and not said:
            at = next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
            number, shown = f"first difference at character {at}", slice(max(0, at - 20), at + 40)
            said = f"The same {what} render differently: student …{one[shown]!r}, teacher …{two[shown]!r}."
    if not said and ours != theirs:
        sentence = "The templates differ in their source, but render four conversations alike, one of them with a tool."
        return Finding(check, "note", number, sentence)
    remedy = (
        "Render every prompt with the student's template and give the teacher those token ids (rocktokens does); a "
        "server that applies the teacher's own template scores another prompt."
    )
    return judge(check, bool(said), number, "Both models have the same chat template.", said, remedy)


def vocabulary(student: Side, teacher: Side) -> Finding:
    """Do both output heads have a row for every id of the tokenizer?"""
    rows = [int(side.config.get_text_config().vocab_size) for side in (student, teacher)]
    types = max(student.tokenizer.get_vocab().values()) + 1
    if student.name.endswith(".gguf"):  # transformers may append a token that the file does not have
        types = min(types, max(rows))
    sentence = f"The student's head has {rows[0]:,} rows, the teacher's {rows[1]:,}, the tokenizer {types:,} ids."
    remedy = "One of the models does not belong to this tokenizer; choose a teacher of the same family."
    return judge("vocabulary", types > min(rows), f"{min(rows):,} rows shared", sentence, sentence, remedy)


def sampling(rollouts: RolloutConfig) -> Finding:
    """Are rollouts drawn from the distribution that is scored?"""
    changes = {
        "greedy decoding": rollouts.greedy,
        f"temperature {rollouts.temperature:g}": rollouts.temperature != 1.0,
        f"top-p {rollouts.top_p}": rollouts.top_p not in (None, 1.0),
        f"top-k {rollouts.top_k}": rollouts.top_k is not None,
    }
    changed = [name for name, is_so in changes.items() if is_so]
    return judge(
        "sampling settings",
        bool(changed),
        f"{len(changed)} differ",
        "Rollouts are drawn at temperature 1 from all tokens, as they are scored.",
        f"Rollouts are drawn with {' and '.join(changed)}, but scored at temperature 1 over all tokens.",
        "Sample with temperature 1, without top-k and top-p: log-ratios of other samples estimate no KL.",
    )
