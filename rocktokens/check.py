"""`rocktokens check`: the known ways in which on-policy distillation goes wrong unnoticed, one finding per check.

It looks at a pair, its prompts, servers, and a run, ours or imported. Every finding has a verdict, a number, a sentence
and, for a fault, a remedy. Nothing is written.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from rocktokens.errors import ConfigError, DataError, RockTokensError
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import from_mapping
from rocktokens.stats import accuracy_estimate, right_shares, smallest_detectable_effect, wilson_interval
from rocktokens.train.record import UNIT_ROUNDOFF, change
from rocktokens.train.settings import DistillConfig
from rocktokens.values import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.prompts.checkers import Checker
    from rocktokens.prompts.tasks import Prompt

# Conventions, not tests: beyond these a finding is a fault.
CUT = 0.2  # share of rollouts cut at the length limit
GROWTH = 2.0  # rollouts at the end of training against its beginning
LOOPS, REPEATED = 0.1, 0.3  # share of rollouts that repeat this share of their 8-grams
MISMATCH = 0.01  # nats between engine and trainer
UNREADABLE = 0.05  # share of rollouts
INVALID = 0.001  # share of losses
ENTROPY, ENTROPY_LEFT = 0.05, 0.1  # nats at the end of training, and as a share of its beginning
LOST = 0.5  # share of updates lost in the weights' format
LEAK = 0.2  # share of prompts that hold their answer, beyond chance
FEW = 50  # prompts of a stage; intervals over fewer are too short (docs/method.md)

MOST_PROMPTS = 2000  # read of each part
WEIGHTS = 200_000  # looked at for the resolution of an update

Status = Literal["fine", "note", "wrong", "not checked"]
STYLES = {"wrong": "bold red", "note": "yellow", "fine": "green", "not checked": "dim"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    number: str
    """What was measured, with its unit; empty where nothing could be."""
    sentence: str
    remedy: str = ""


def judge(check: str, fault: bool, number: str, fine: str, wrong: str, remedy: str) -> Finding:
    """A fault with its remedy, or nothing wrong; each with its sentence."""
    return Finding(check, "wrong", number, wrong, remedy) if fault else Finding(check, "fine", number, fine)


def unknown(check: str, why: str) -> Finding:
    """What could not be checked, and why."""
    return Finding(check, "not checked", "", why)


def report(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """Print findings, faults first, or as a JSON list; DataError if there is a fault."""
    from rich.markup import escape
    from rich.table import Table

    faults = [finding.check for finding in findings if finding.status == "wrong"]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        table = Table("", "check", "number", "what it means", box=None, padding=(0, 1), show_edge=False)
        for finding in sorted(findings, key=lambda own: list(STYLES).index(own.status)):
            said = f"{finding.sentence} → {finding.remedy}" if finding.remedy else finding.sentence
            style = STYLES[finding.status]
            table.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.number), escape(said))
        console().print(table)
        if not faults:
            print(f"no fault in {sum(finding.status in ('fine', 'note') for finding in findings)} checks")
    if faults:
        raise DataError(f"{len(faults)} of {len(findings)} checks found a fault: {', '.join(faults)}")


def check(
    path: Path | None = None,
    pair: PairConfig | None = None,
    prompts: PromptsConfig | None = None,
    rollouts: RolloutConfig | None = None,
    servers: ServersConfig | None = None,
    *,
    probe: int = 32,
    learning_rate: float = DistillConfig.learning_rate,
) -> list[Finding]:
    """Look for known faults, one finding per check.

    Args:
        path: A run, ours or imported; None: a pair and prompts alone.
        pair: The models; where a run names its own and none are given here, the run's.
        prompts: The prompts, likewise.
        rollouts: How rollouts are sampled.
        servers: Servers to be probed.
        probe: Prompts that both models answer in this process; 0: load no weights.
        learning_rate: The learning rate that is compared with the resolution of the weights.
    """
    from rocktokens.models.tokens import run_tokenizer
    from rocktokens.stage import resolve

    pair, prompts = pair or PairConfig(), prompts or PromptsConfig()
    rollouts, servers = rollouts or RolloutConfig(), servers or ServersConfig()
    found: list[Finding] = []
    if path is not None:
        run = open_run(path)
        found += run_findings(run, run_tokenizer(run))
        named = run.manifest["config"].get("pair") or {}
        if not (pair.student and pair.teacher) and not (named.get("student") and named.get("teacher")):
            return [*found, unknown("pair", "The run names no pair, so models and prompts were not checked.")]
    pair, prompts = resolve(path or Path(), pair, prompts)
    if not pair.student or not pair.teacher:
        raise ConfigError("give both --pair.student and --pair.teacher, or a run that names them")
    student, teacher = load_side(pair.student, pair), load_side(pair.teacher, pair)
    found += [
        tokenizers(student, teacher),
        end_tokens(student, teacher),
        chat_template(student, teacher),
        vocabulary(student, teacher),
        sampling(rollouts),
        memory_and_time(pair, rollouts),
        *server_findings(pair, rollouts, servers),
    ]
    try:
        found += prompt_findings(prompts, student.tokenizer)
        if not any(finding.status == "wrong" and finding.check == "readable answers" for finding in found):
            found += probe_findings(pair, prompts, rollouts, probe, learning_rate)
    except RockTokensError as error:
        found.append(Finding("prompts", "wrong", "", str(error), "Correct the prompts or the pair and check again."))
    return found


# ---------------------------------------------------------------- a pair, without its weights

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
    """One model of the pair."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    rows: int
    """Of its output head."""
    stops: set[int] | None
    """End tokens of its generation config, or of its configuration; None where neither names one."""

    @property
    def ends(self) -> set[int]:
        """Every id that ends a rollout of this model."""
        return ({self.tokenizer.eos_token_id} - {None}) | (self.stops or set())

    def spell(self, ids: Iterable[int]) -> str:
        """Ids with their tokens."""
        tokens = self.tokenizer.convert_ids_to_tokens(sorted(ids))
        return ", ".join(f"{token} ({id_})" for id_, token in zip(sorted(ids), tokens)) or "none"

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        """Messages through the chat template; the template's own error as text."""
        try:
            from rocktokens.prompts.tasks import render

            return render(self.tokenizer, messages, **options)
        except Exception as error:  # templates are programs and raise anything
            return f"refused: {error}"


def load_side(name: str, config: PairConfig) -> Side:
    """Tokenizer and configurations of a model."""
    from rocktokens.models.pair import load_tokenizer, model_config, stop_ids

    rows = int(model_config(name, config).get_text_config().vocab_size)
    return Side(name, load_tokenizer(name, config), rows, stop_ids(name, config) or None)


def tokenizers(student: Side, teacher: Side) -> Finding:
    """Do ids mean the same for both?"""
    from rocktokens.models.pair import check_tokenizers

    number, said = "", ""
    try:
        names = PairConfig(student=student.name, teacher=teacher.name)
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
        if side.stops is not None and own is not None and own not in side.stops:
            ends = side.spell(side.stops)
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
    """The special token that the chat template puts after an assistant's message; None if there is none."""
    if not side.tokenizer.chat_template:
        return None
    before, _, after = side.render([QUESTION, {"role": "assistant", "content": ANSWER}]).rpartition(ANSWER)
    special = {id_ for id_, token in side.tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(side.tokenizer.all_special_ids)
    ids = side.tokenizer(after, add_special_tokens=False)["input_ids"] if before else []
    return next((id_ for id_ in ids if id_ in special), None)


def chat_template(student: Side, teacher: Side) -> Finding:
    """Do both templates render the same messages to the same text?"""
    check = "chat template"
    ours, theirs = student.tokenizer.chat_template, teacher.tokenizer.chat_template
    if not ours and not theirs:
        return Finding(check, "fine", "0 templates", "Neither model has a chat template; prompts are plain text.")
    said, number = "", "0 differences"
    if not ours or not theirs:
        said, number = f"Only the {'student' if ours else 'teacher'} has a chat template.", "1 template"
    cases: list[tuple[Any, Any, str]] = [(messages, None, f"{len(messages)} messages") for messages in CONVERSATIONS]
    for messages, tools, what in [] if said else [*cases, (CONVERSATIONS[0], [TOOL], "message with a tool")]:
        one, two = (side.render(messages, tools=tools, add_generation_prompt=True) for side in (student, teacher))
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
    types = max(student.tokenizer.get_vocab().values()) + 1
    if student.name.endswith(".gguf"):  # transformers may append a token that the file does not have
        types = min(types, max(student.rows, teacher.rows))
    shared = min(student.rows, teacher.rows)
    sentence = (
        f"Rows of the student's head: {student.rows:,}, of the teacher's: {teacher.rows:,}; tokenizer: {types:,} ids."
    )
    remedy = "One of the models does not belong to this tokenizer; choose a teacher of the same family."
    return judge("vocabulary", types > shared, f"{shared:,} rows shared", sentence, sentence, remedy)


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


class Needs(NamedTuple):
    """What a pair needs; memory in bytes, all lower bounds."""

    student_parameters: int
    teacher_parameters: int
    score_bytes: int
    distill_bytes: int
    sample_seconds: float
    """For 1,000 response tokens: floating-point operations over the rate of this machine on one large product."""


def needs_of(config: PairConfig, rollouts: RolloutConfig) -> Needs:
    """Memory of sampling, scoring and distilling with a pair, and the time that sampling takes; loads no weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from rocktokens.divergence.fused import CHUNK_BYTES, CHUNK_ELEMENTS
    from rocktokens.models.devices import choose_device
    from rocktokens.models.pair import model_config

    described = [model_config(name, config) for name in (config.student, config.teacher)]
    with torch.device("meta"):
        code = config.trust_remote_code
        student, teacher = (AutoModelForCausalLM.from_config(own, trust_remote_code=code) for own in described)
    own, theirs = (sum(p.numel() for p in model.parameters()) for model in (student, teacher))
    text: Any = described[0].get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 4 if config.dtype == "float32" or (config.dtype == "auto" and choose_device(config.device) == "cpu") else 2
    weights, chunk = width * (own + theirs), CHUNK_BYTES * CHUNK_ELEMENTS
    cache_per_token = 2 * text.num_hidden_layers * heads * head_width  # numbers in the KV cache
    cache = width * rollouts.batch_size * cache_per_token * (rollouts.max_new_tokens + 256)
    # What is trained is float32 whatever the dtype: the weights' second half, gradient, Adam's two moments, and the
    # gradient of the head while it is summed.
    trained = (4 - width + 4 + 8) * own + 4 * student.get_output_embeddings().weight.numel()  # type: ignore[union-attr, operator]
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a @ b  # the first product starts threads
    start = time.perf_counter()
    for _ in range(3):
        a @ b
    rate = 3 * 2 * 1024**3 / (time.perf_counter() - start)
    score, distill = weights + max(cache, chunk), weights + max(cache, chunk + trained)
    return Needs(own, theirs, score, distill, sample_seconds=2 * own * 1000 / rate)


def memory_and_time(config: PairConfig, rollouts: RolloutConfig) -> Finding:
    """Does the pair fit into this machine, and how long will it take at least?"""
    from rocktokens.models.devices import choose_device, memory

    needs, (free, _) = needs_of(config, rollouts), memory(choose_device(config.device))
    sentence = (
        f"{needs.student_parameters / 1e6:,.1f} M parameters (student) and {needs.teacher_parameters / 1e6:,.1f} M "
        f"(teacher). 1,000 response tokens take at least {needs.sample_seconds:.2g} s to sample."
    )
    return judge(
        "memory and time",
        needs.distill_bytes > free,
        f"{needs.score_bytes / 1e9:.2f} GB to sample and score, {needs.distill_bytes / 1e9:.2f} GB to distil, "
        f"{free / 1e9:.1f} GB free",
        sentence,
        f"There is too little memory to distil. {sentence}",
        "Use smaller models, --pair.dtype bfloat16, a served teacher, or a machine with more memory.",
    )


def server_findings(pair: PairConfig, rollouts: RolloutConfig, servers: ServersConfig) -> list[Finding]:
    """Does every server answer, and does it serve the right model?"""
    from rocktokens.models.pair import context_of, pair_facts
    from rocktokens.servers.connect import open_sampling, open_states, why_no_states
    from rocktokens.servers.pool import ServerPool

    found = []
    for role, url in [("student", url) for url in servers.student] + [("teacher", url) for url in servers.teacher]:
        one = replace(servers, student=(url,), teacher=(url,))
        try:
            own = context_of(pair.teacher if role == "teacher" else pair.student, pair)
            with ServerPool([url], servers) as pool:
                context = pool.context  # raises if nobody answers
                needed = rollouts.max_new_tokens + 1
                pool.require(min(needed, own or needed), "a rollout after a prompt of one token")
            # Opening it compares the log-probabilities of what it serves with those of the model that is meant.
            gives = "rollouts"
            if role == "student" or why_no_states(url, servers):
                open_sampling(pair, one, rollouts, of_teacher=role == "teacher")
            else:
                gives, _ = "hidden states", open_states(pair, one, pair_facts(pair))
            limit = "context not said" if context is None else f"context {context:,}"
            found.append(Finding("server", "fine", limit, f"{url} serves the {role} and gives its {gives}."))
        except RockTokensError as error:
            found.append(Finding("server", "wrong", "", str(error), f"Correct what {url} serves and check again."))
    return found


# ---------------------------------------------------------------- prompts


def prompt_findings(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Every check of the prompts."""
    from rocktokens.prompts.tasks import Part, load_prompts

    few = replace(config, limit=min(config.limit or MOST_PROMPTS, MOST_PROMPTS))
    parts: dict[str, list[Prompt]] = {part: [] for part in get_args(Part)}
    unreadable = ""
    for part in get_args(Part):
        try:
            parts[part] = load_prompts(few, tokenizer, part=part)
        except DataError as error:
            if "neither a number nor a formula" in str(error):
                unreadable = str(error)
            elif "has no prompts" not in str(error):  # too few for a part is a finding of its own
                raise
    prompts = [prompt for own in parts.values() for prompt in own]
    readable = judge(
        "readable answers",
        bool(unreadable),
        unreadable.partition(" are neither")[0] or f"{sum(prompt.answer is not None for prompt in prompts)} answers",
        "The checker can read every reference answer.",
        unreadable,
        "Use --prompts.checker exact, regex or a function of your own; unreadable answers are wrong.",
    )
    if unreadable:
        return [readable]
    texts = {part: [prompt.text for prompt in own] for part, own in parts.items()}
    parted = enough(len(texts["detection"]), len(texts["causal"]))
    return [readable, answers_in_prompts(prompts), duplicates(texts), near_copies(prompts), parted]


def answers_in_prompts(prompts: list[Prompt]) -> Finding:
    """Does the prompt hold its own answer more often than another prompt's answer, which is there by chance?"""
    known = [prompt for prompt in prompts if prompt.answer and prompt.answer.strip()]
    if len(known) < 20:
        return unknown("answers in prompts", f"Only {len(known)} prompts have an answer.")
    stated = [str(prompt.answer).rpartition("####")[2].strip() for prompt in known]

    def held(answers: Iterable[str]) -> Any:
        finds = (re.search(rf"(?<!\w){re.escape(a)}(?!\w)", p.text) if a else None for p, a in zip(known, answers))
        return np.array([found is not None for found in finds], float)

    own, other = held(stated), held(stated[at] for at in np.random.default_rng(0).permutation(len(known)))
    excess = own - other
    low = excess.mean() - 1.96 * excess.std(ddof=1) / np.sqrt(len(excess))
    example = known[int(own.argmax())]
    return judge(
        "answers in prompts",
        low > LEAK,
        f"{own.mean():.1%} (by chance {other.mean():.1%})",
        "Prompts hold their answer about as often as another prompt's.",
        f"Prompts hold their own answer, e.g. {example.prompt_id}: {example.answer!r} in {example.text[-80:]!r}.",
        "Remove the answer from the prompt; accuracy measures copying.",
    )


def duplicates(texts: dict[str, list[str]]) -> Finding:
    """Do two splits share a prompt, up to case and spaces?"""
    seen = {part: {" ".join(text.lower().split()) for text in own} for part, own in texts.items()}
    shared = {f"{a} and {b}": seen[a] & seen[b] for a, b in combinations(seen, 2) if seen[a] & seen[b]}
    total = sum(len(own) for own in texts.values())
    repeated = total - sum(len(own) for own in seen.values())
    if not shared and repeated > 0.01 * total:
        remedy = "Remove duplicates: equal texts are one group and count once in halves, tests and intervals."
        said = "Prompts occur several times within a split."
        return Finding("duplicates", "note", f"{repeated} of {total}", said, remedy)
    where, example = next(iter(shared.items()), ("", {""}))
    return judge(
        "duplicates",
        bool(shared),
        f"{sum(len(both) for both in shared.values())} shared, {repeated} repeated",
        "No prompt is in two splits.",
        f"{where} share prompts, e.g. {min(example)[:60]!r}.",
        "Remove one of each: what is measured on the second was trained on in the first.",
    )


def near_copies(prompts: list[Prompt]) -> Finding:
    """How many prompts are equal to another up to numbers, and not in one group with it?"""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for prompt in prompts:
        template = re.sub(r"\d+([.,]\d+)*", "0", " ".join(prompt.text.lower().split()))
        groups[template][prompt.group_id or prompt.prompt_id] += 1
    shared = {template: own.total() for template, own in groups.items() if len(own) > 1}
    copies, example = sum(shared.values()), max(shared, key=lambda template: shared[template], default="")
    number = f"{copies} of {len(prompts)}, in {len(shared)} templates"
    if copies <= 0.01 * len(prompts):
        return Finding("near-copies", "fine", number, "Few prompts are equal up to numbers, or they are in one group.")
    said = (
        f"{copies} prompts are equal to another up to numbers, e.g. {example[:60]!r}. Each counts as an independent "
        "prompt: if copies of one template behave alike, false rocks are confirmed and intervals are too short."
    )
    remedy = "Name the column that holds the template or document: --prompts.group-field NAME."
    return Finding("near-copies", "note", number, said, remedy)


def enough(detection: int, causal: int) -> Finding:
    """Are there enough prompts for detection and for the causal tests?"""
    number = f"{detection} for detection"
    if causal >= 2:
        effect = 100 * smallest_detectable_effect(0.5, causal)
        number += f"; {causal} for causal tests show effects of {effect:.1f} points or more"
    return judge(
        "enough prompts",
        detection < FEW or causal < FEW,
        number,
        "Every stage has enough prompts for honest intervals.",
        f"Fewer than {FEW} prompts for a stage: its intervals are too short and little can be declared.",
        "Give more prompts: of a file, 2 of 10 go to detection and 2 of 10 to causal tests.",
    )


# ---------------------------------------------------------------- with the models


def probe_findings(
    pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, probe: int, rate: float
) -> list[Finding]:
    """Every check that samples or loads weights; each says so where the probe is switched off."""
    if not probe:
        names = ("teacher ahead", "length limit", "learning rate")
        return [unknown(name, "Models were not loaded (--probe 0).") for name in names]
    from rocktokens.models.pair import load_pair
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.sample.rollouts import make_sampler, requests_for

    models, settings = load_pair(pair), replace(rollouts, num_rollouts=1)
    asked = load_prompts(replace(prompts, limit=probe), models.tokenizer, part="detection")
    ids = {}
    for who in ("student", "teacher"):
        answers = make_sampler(models, settings, of_teacher=who == "teacher").generate(requests_for(asked, settings))
        ids[who] = [tuple(answer.token_ids) for answer in answers]
    cut = [not own or own[-1] not in models.eos_ids for own in ids["teacher"]]
    return [
        teacher_ahead(asked, ids, models.tokenizer, make_checker(prompts)),
        length_limit(cut, rollouts.max_new_tokens),
        resolution(models.student, rate),
    ]


def teacher_ahead(
    prompts: list[Prompt],
    ids: dict[str, list[tuple[int, ...]]],
    tokenizer: PreTrainedTokenizerBase,
    checker: Checker | None,
) -> Finding:
    """Is the teacher right more often than the student?"""
    known = [at for at, prompt in enumerate(prompts) if prompt.answer is not None]
    if checker is None or not known:
        return unknown("teacher ahead", "The prompts have no answers to check, so accuracy cannot be measured.")
    right, shown = {}, []
    for who in ("student", "teacher"):
        texts = tokenizer.batch_decode([list(ids[who][at]) for at in known], skip_special_tokens=True)
        right[who] = right_shares(texts, [prompts[at].answer or "" for at in known], checker)
        found = accuracy_estimate(right[who], rng=np.random.default_rng(0))
        shown.append(f"{who} {found.value:.0%} [{found.low:.0%}, {found.high:.0%}]")
    gain = right["teacher"] - right["student"]
    error = 1.96 * gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
    if gain.mean() - error <= 0 <= gain.mean() + error:
        sentence = f"On {len(known)} prompts the teacher is not proven to be better than the student."
        return Finding("teacher ahead", "note", ", ".join(shown), sentence, "Probe with more prompts (--probe 200).")
    return judge(
        "teacher ahead",
        gain.mean() < 0,
        ", ".join(shown),
        "The teacher is better than the student.",
        "The teacher is worse than the student on these prompts.",
        "Choose another teacher, or check its chat template: distillation moves the student towards it.",
    )


def length_limit(cut: list[bool], limit: int) -> Finding:
    """Is the length limit long enough for the teacher?"""
    share = wilson_interval(sum(cut), len(cut))
    return judge(
        "length limit",
        share.low > CUT / 2 and share.value > CUT,
        f"{share.value:.0%} of {len(cut)} cut at {limit} tokens",
        "The teacher finishes within the length limit.",
        "The teacher itself does not finish within the length limit.",
        "Raise --rollouts.max-new-tokens (and --distill.max-new-tokens), or ask for shorter rollouts.",
    )


def resolution(student: PreTrainedModel, rate: float) -> Finding:
    """Is an update of the learning rate's size larger than the resolution of the weights?"""
    weights = [parameter.detach().flatten() for parameter in student.parameters() if parameter.dim() > 1]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    step = max(1, sum(len(own) for own in weights) // WEIGHTS)
    size_N = np.abs(np.concatenate([own[::step].float().cpu().numpy() for own in weights]))
    # A step of Adam has about the rate's size; a format of unit roundoff u leaves w as it is below about u |w|.
    lost = float(np.mean(rate < UNIT_ROUNDOFF[dtype] * size_N))
    return judge(
        "learning rate",
        lost > LOST,
        f"{lost:.0%} of updates of {rate:g} lost in {dtype}",
        "Updates are larger than the resolution of the weights.",
        "Most weights do not change when a step of this size is added to them in their own format.",
        "Keep float32 weights (--pair.dtype float32, with bf16 for products), or raise the learning rate.",
    )


# ---------------------------------------------------------------- a run


def run_findings(run: Run, tokenizer: PreTrainedTokenizerBase | None) -> list[Finding]:
    """Every check that the run's tables allow."""
    rollouts = run.read("rollouts").to_pylist() if run.has("rollouts") else []
    ends = {tokenizer.eos_token_id} - {None} if tokenizer is not None else set()
    found = [truncation(rollouts, ends), repetition(rollouts), engine(run), readable_rollouts(run)]
    if "rollouts" in run.manifest["config"]:
        found.append(sampling(from_mapping(RolloutConfig, run.manifest["config"]["rollouts"])))
    return [*found, *over_training(run, rollouts)]


def truncation(rollouts: list[Row], ends: set[int]) -> Finding:
    """How many rollouts are cut at the length limit?"""
    known = [
        row["truncated"] if row["truncated"] is not None else row["token_ids"][-1] not in ends
        for row in rollouts
        if row["truncated"] is not None or (ends and row["token_ids"])
    ]
    if not known:
        return unknown("truncation", "No rollouts are recorded, or nothing says where they end.")
    found = wilson_interval(int(np.sum(known)), len(known))
    return judge(
        "truncation",
        found.value > CUT and found.low > CUT / 2,
        f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}] of {len(known)} rollouts",
        "Few rollouts are cut at the length limit.",
        "Many rollouts are cut at the length limit: the end is never learned from them.",
        "Raise the length limit, or check that student, teacher and template end with the same token.",
    )


def repetition(rollouts: list[Row]) -> Finding:
    """How many rollouts loop?"""
    shares = []
    for token_T in (row["token_ids"] for row in rollouts):
        grams = [tuple(token_T[at : at + 8]) for at in range(max(len(token_T) - 7, 1))]
        shares.append(1.0 - len(set(grams)) / len(grams))
    if not shares:
        return unknown("repetition", "No rollouts are recorded.")
    looping = float(np.mean(np.array(shares) > REPEATED))
    return judge(
        "repetition",
        looping > LOOPS,
        f"{looping:.0%} of rollouts repeat more than {REPEATED:.0%} of their 8-grams",
        "Rollouts do not loop.",
        f"Rollouts loop, most of all {rollouts[int(np.argmax(shares))]['rollout_id']}.",
        "Look at them (`rocktokens view`); a lower learning rate or an earlier checkpoint is the usual cure.",
    )


def engine(run: Run) -> Finding:
    """Do the engine's log-probabilities agree with the trainer's forward pass?"""
    if not run.has("engine"):
        return unknown("engine and trainer", "The run has no log-probabilities of the engine that sampled.")
    table = run.read("engine")
    log_r_N = table["student_logprob"].to_numpy().astype(float) - table["engine_logprob"].to_numpy().astype(float)
    known_N = np.flatnonzero(np.isfinite(log_r_N))
    if not len(known_N):
        return unknown("engine and trainer", "No token has log-probabilities of both.")
    # KL(engine || trainer) over the engine's samples: mean of r - 1 - log r, r = p_trainer / p_engine.
    kl = float(np.mean(np.expm1(np.clip(log_r_N[known_N], -50, 50)) - log_r_N[known_N]))
    worst = int(known_N[np.abs(log_r_N[known_N]).argmax()])
    row = table.slice(worst, 1).to_pylist()[0]
    return judge(
        "engine and trainer",
        kl > MISMATCH,
        f"KL {kl:.2g} nats, largest {abs(log_r_N[worst]):.2g}",
        "Engine and trainer give the same log-probabilities.",
        f"Engine and trainer disagree, most at position {row['position']} of {row['rollout_id']}.",
        "Check precision, quantisation, weights that are not synchronised, and temperature on both sides: rollouts "
        "come from another policy than the one that is trained.",
    )


def readable_rollouts(run: Run) -> Finding:
    """How many rollouts could the checker not read?"""
    counts = (run.facts("sample") if run.done("sample") else {}).get("checked_by") or {}
    total = sum(counts.values())
    if not total:
        return unknown("readable rollouts", "No rollouts were checked by a checker that can fail to read one.")
    share = counts.get("unreadable", 0) / total
    return judge(
        "readable rollouts",
        share > UNREADABLE,
        f"{share:.1%} of {total} rollouts",
        "The checker reads nearly every rollout.",
        "The checker cannot read an answer in these rollouts and counts them as wrong.",
        "Ask for the answer in a fixed form (\\boxed{}), or use --prompts.checker regex.",
    )


def over_training(run: Run, rollouts: list[Row]) -> list[Finding]:
    """Length, entropy and invalid losses over training; from training.parquet, or from an imported dump."""
    lengths, cut, entropy = (np.zeros(0) for _ in range(3))
    growth = unknown("length growth", "Fewer than two training steps are recorded.")
    explores = unknown("entropy", "The student's entropy over training is not recorded.")
    invalid = unknown("invalid losses", "The run has no record of training steps.")
    if run.has("training"):
        columns = run.read("training").to_pydict()
        lengths, cut, entropy = (
            np.array(columns.get(name, []), float) for name in ("mean_length", "truncated_share", "entropy")
        )
        tokens, bad = (sum(value or 0 for value in columns[name]) for name in ("tokens", "invalid"))
        invalid = judge(
            "invalid losses",
            bool(tokens) and bad / tokens > INVALID,
            f"{bad} of {tokens} tokens",
            "Every divergence is a number.",
            "Divergences were not numbers: logits overflowed.",
            "Lower the learning rate, or use bfloat16 or float32 in place of float16.",
        )
    elif run.has("imported"):
        step_R = np.array(run.read("imported")["step"].to_pylist())
        length_R = np.array([len(row["token_ids"]) for row in rollouts], float)
        cut_R = np.array([np.nan if row["truncated"] is None else row["truncated"] for row in rollouts], float)
        lengths, cut = (
            np.array([of_R[step_R == step].mean() for step in np.unique(step_R)]) for of_R in (length_R, cut_R)
        )
        if run.steps():
            entropy = run.query(
                "select imported.step, avg(student_entropy) as entropy from occurrences join imported using "
                "(rollout_id) where isfinite(student_entropy) group by 1 order by 1"
            )["entropy"].to_numpy()
    window = max(1, min(10, len(lengths) // 2))
    grown, late_cut, fell = (change(values, window) for values in (lengths, cut, entropy))
    if grown is not None:
        growth = judge(
            "length growth",
            grown.ratio >= GROWTH and (late_cut is None or late_cut.late >= CUT),
            f"{grown.early:.0f} → {grown.late:.0f} tokens",
            "Lengths are steady over training.",
            "Rollouts grew until many were cut at the limit.",
            "Check end tokens and templates (`rocktokens check` on the pair), and that the end token is trained.",
        )
    if fell is not None:
        explores = judge(
            "entropy",
            fell.late < ENTROPY and fell.ratio < ENTROPY_LEFT,
            f"{fell.early:.3f} → {fell.late:.3f} nats",
            "The student still explores.",
            "The student's entropy collapsed: it hardly explores.",
            "Lower the learning rate or stop earlier.",
        )
    return [growth, explores, invalid]
