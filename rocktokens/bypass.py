"""Which costly token types may be skipped in training: what detection, census and graft say together, type by type.

Candidates are declared, confirmed rocks that the census proves neutral. Those may be skipped that gain no more than ε
when they are grafted as one set, by the upper bound (docs/method.md §6). A stumbling block stands apart: only a
comparison that trained without it puts it on the list.
The stage `bypass` decides it from the run's tables, loads no model, and writes a file that any trainer can read:

    found = read_bypass("runs/mine/bypass.json", fingerprint=fingerprint(tokenizer.get_vocab()))
    found.ids                               # token ids; meaningless under another tokenizer, hence the fingerprint

A comparison writes its verdict back into the list.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.causal.inference import NEUTRAL, NEVER_USED, PILLAR, STUMBLING_BLOCK
from rocktokens.causal.settings import BypassConfig, KnockoutConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.models.tokens import run_tokenizer
from rocktokens.progress import console
from rocktokens.run import Run, open_run, working_on, write_text
from rocktokens.show import Column, Table, estimate, interval, percent, plural, points
from rocktokens.stage import Stage, inputs_of
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NAME = "bypass.json"
FORMAT, VERSION = "rocktokens bypass list", 1
NOT_COMPARED = "not compared"
ROCKS = ("rock", "rock so far")  # classes of what is declared; so far: too few checkpoints to tell if it has settled
# Facts of the stages that the list rests on.
TESTED = ("definition", "signal", "num_prompts", "num_problems", "num_rollouts", "accuracy", "epsilon", "alpha")
UNTESTED = {
    "knockout": "bans at inference: `rocktokens knockout`",
    "graft": "what learning the types would gain: `rocktokens graft`",
}
FREEZING = ("freeze", "freeze_rocks")  # regimes that leave a set of types out of the loss

# Reason → what may be done with the type, and the reason in words.
REASONS: dict[str, tuple[str, str]] = {
    "neutral": ("skip", "a confirmed rock, proven neutral: {banned}{gain}, no more than {margin}"),
    "trained without": ("skip", "a stumbling block: {banned}; a comparison that trained without it lost nothing"),
    "stumbling block": (
        "apart",
        "a rock and a stumbling block: {banned}. Only a comparison that trains without it puts it on the list",
    ),
    "learning": ("keep", "it is learning: its loss fell{fell}"),
    "learning, levelled off": ("keep", "it has learned: its loss fell{fell} and then stayed"),
    "pillar": ("keep", "a rock, but a pillar: {banned}"),
    "would gain": ("keep", "a rock that is not needed as it is, but learning it would pay{gain}, more than {margin}"),
    "end token": ("keep", "it ends rollouts, cannot be banned, and is never skipped"),
    "not yet": ("keep", "its loss has fallen little so far, and was still falling{fell}"),
    "unclear": ("undecided", "costly, but neither that it stays nor that it falls is proven"),
    "no loss before": (
        "undecided",
        "costly, but no checkpoint before distillation was scored to tell if it stays",
    ),
    "not declared": ("undecided", "stagnant, but not in the declared set"),
    "not confirmed": ("undecided", "declared a rock on one half of the prompts, and not confirmed on the other"),
    "not tested": ("undecided", "a confirmed rock that no census has tested; run `rocktokens knockout`"),
    "census undecided": ("undecided", "a confirmed rock, but the census is undecided: {banned}"),
    "never used": ("undecided", "a confirmed rock, but no rollout of the census used it"),
    "no graft": ("undecided", "a confirmed rock, proven neutral, but not grafted; run `rocktokens graft`"),
    "graft undecided": ("undecided", "a rock, proven neutral, but learning it may gain over {margin}{gain}"),
}
DECISIONS = ("skip", "apart", "keep", "undecided")


# ---------------------------------------------------------------- the rule


def before_graft(row: Row) -> str:
    """The reason as far as detection and census go; what is neutral may yet fail the graft.

    `row`: class, declared, confirmed, verdict and is_end of one costly type.
    """
    if row.get("is_end"):
        return "end token"
    if row["class"] not in ROCKS:
        return {"costly": "no loss before"}.get(row["class"], row["class"] if row["class"] in REASONS else "unclear")
    if not row["declared"]:
        return "not declared"
    if not row["confirmed"]:
        return "not confirmed"
    tested = {None: "not tested", NEVER_USED: "never used", PILLAR: "pillar", NEUTRAL: "neutral"}
    return {**tested, STUMBLING_BLOCK: "stumbling block"}.get(row["verdict"], "census undecided")


def decide(
    costly: Sequence[Row], grafts: Sequence[Row], *, epsilon: float, passed: Sequence[Iterable[int]] = ()
) -> list[Row]:
    """Every costly type with its decision, the reason, and why in words; largest cost first.

    Args:
        costly: one row per costly type, as `evidence_of` makes them.
        grafts: rows of grafts.parquet with members.
        epsilon: largest gain of accuracy that does not matter, as a share.
        passed: sets of token ids without which a comparison trained and lost nothing.
    """
    cost = {row["token_id"]: row["cost_share"] for row in costly}
    reasons = {row["token_id"]: before_graft(row) for row in costly}
    candidates, blocks = (
        {token for token, reason in reasons.items() if reason == wanted} for wanted in ("neutral", "stumbling block")
    )
    # A graft speaks for its candidates if nothing else is in its set but alternatives of theirs.
    own = [(set(graft["members"]) - set(graft.get("alternatives") or ()), graft) for graft in grafts]
    own = [(members, graft) for members, graft in own if members and members <= candidates]
    flat = [(members, graft) for members, graft in own if graft["gain_high"] <= epsilon]
    skipped, used = max(flat, key=lambda found: sum(cost[token] for token in found[0]), default=(set(), None))
    trained = set().union(*(set(ids) for ids in passed if set(ids) <= skipped | blocks)) & blocks
    made = []
    for row in sorted(costly, key=lambda row: (-row["cost_share"], row["token_id"])):
        token, graft = row["token_id"], None
        reason = "trained without" if token in trained else reasons[token]
        if reason == "neutral":
            # Of what speaks against it, the smallest set says most.
            around = [found for members, found in own if token in members]
            graft = used if token in skipped else min(around, key=lambda found: len(found["members"]), default=None)
            if graft is None:
                reason = "no graft"
            elif token not in skipped:
                reason = "would gain" if graft["gain_low"] > 0 else "graft undecided"
        delta, fall, gain = estimate(row, "delta"), estimate(row, "fall"), ""
        if graft is not None:
            gain = f"; grafting {plural(len(graft['members']), 'type')} ({graft['arm']}) gains "
            gain += f"{interval(estimate(graft, 'gain'), points)} points"
        changed = "an unknown amount" if delta is None else f"{interval(delta, points)} points"
        why = REASONS[reason][1].format(
            banned=f"banning it changes accuracy by {changed}",
            fell="" if fall is None else f" by {interval(fall, percent)}",
            gain=gain,
            margin=f"{points(epsilon, signed=False)} points",
        )
        said = {"token_id": token, "token": row["token"], "decision": REASONS[reason][0], "reason": reason}
        known = {name: value for name, value in row.items() if name not in (*said, "is_end")}
        ends = {f"graft_gain{end}": None if graft is None else graft[f"gain{end}"] for end in ("", "_low", "_high")}
        made.append({**said, "why": why, **known, **ends, "graft": None if graft is None else graft["arm"]})
    return made


def list_sentence(decisions: Sequence[Row]) -> str:
    """How many may be skipped, of what, and the share of the loss that goes with them."""
    rocks = [row["decision"] for row in decisions if row["class"] in ROCKS and row["declared"]]
    if not rocks:
        return f"No rock is declared among {len(decisions)} costly token types: there is nothing to skip."
    share = percent(sum(row["cost_share"] for row in decisions if row["decision"] == "skip"))
    apart = rocks.count("apart")
    blocks = f"{plural(apart, 'is a stumbling block', 'are stumbling blocks')}, " if apart else ""
    return (
        f"{rocks.count('skip')} of {len(rocks)} declared rocks may be skipped ({share} of the loss); {blocks}"
        f"{rocks.count('keep')} must be kept, {rocks.count('undecided')} are undecided."
    )


# ---------------------------------------------------------------- the stage


def bypass(path: Path, config: BypassConfig) -> Run:
    """Decide for every costly type whether training may skip it; writes bypass.json and prints the table."""
    with working_on(path):
        run = open_run(path)
        files = ("types.parquet", "census.parquet", "grafts.parquet")
        stage = Stage(run, "bypass", {"bypass": config}, inputs_of(run, files=files))
        known = run.manifest["config"]
        epsilon = config.epsilon or known.get("knockout", {}).get("epsilon", KnockoutConfig.epsilon)
        grafts = run.read("grafts").to_pylist() if run.has("grafts") else []
        sets = [row for row in grafts if row["members"] and row["gain"] is not None]
        decisions = decide(evidence_of(run), sets, epsilon=epsilon, passed=_passed(run))
        skipped = [row for row in decisions if row["decision"] == "skip"]
        facts: Json = {"ids": [row["token_id"] for row in skipped], "sentence": list_sentence(decisions)}
        facts["epsilon"] = epsilon
        tokenizer = run_tokenizer(run)
        vocabulary = None if tokenizer is None else tokenizer.get_vocab()
        content: Json = {
            "format": FORMAT,
            "version": VERSION,
            "tokens": [row["token"] for row in skipped],
            **facts,
            "tokenizer": {
                "source": known.get("pair", {}).get("student") or None,
                "fingerprint": None if vocabulary is None else fingerprint(vocabulary),
                "vocabulary": None if vocabulary is None else len(vocabulary),
            },
            "tested": {
                name: {fact: value for fact, value in run.facts(name).items() if fact in TESTED}
                for name in ("detect", *UNTESTED)
                if run.done(name)
            },
            "decisions": decisions,
            "run": str(run.path),
            "versions": run.manifest.get("versions", {}),
        }
        content = _compared(content, comparison_of(run, facts["ids"]))
        try:
            written = read_bypass(run.path).content == json.loads(json.dumps(content))
        except DataError:  # none, or a damaged one
            written = False
        if not written:
            _write(run.path / NAME, content)
        if not stage.is_complete() or run.facts("bypass") != facts:
            stage.finish(facts)

    rows = sorted(decisions, key=lambda row: (DECISIONS.index(row["decision"]), -row["cost_share"]))
    for row in rows:
        row["class"] += " (not confirmed)" if row["class"] in ROCKS and not row["confirmed"] else ""
    columns = (
        Column("token", "token"),
        Column("class", "class"),
        Column("cost", "cost_share", percent),
        Column("decision", "decision"),
        Column("reason", "why"),
    )
    caption = [f"The list as a whole: {content['comparison']['text']}."]
    table = Table(columns, rows, content["sentence"], caption, name=NAME, limit=40)
    console().print(table)
    return run


def evidence_of(run: Run) -> list[Row]:
    """What detection and census say about every costly type."""
    types = run.types().to_pylist()
    if types and "class" not in types[0]:
        raise DataError(
            f"types.parquet of {run.path} does not say which token types are costly and which learn (it was imported, "
            f"or made by another program): run `rocktokens detect {run.path}` first"
        )
    total = sum(max(row["r"] or 0.0, 0.0) for row in types)
    census = run.read("census").to_pylist() if run.has("census") else []
    tested = {row["token_id"]: row for row in census if row["kind"] == "token"}
    ends: set[int] = set()  # token types that ended a scored rollout
    if run.steps():
        ended = f"select distinct token_id from occurrences where step = {run.steps()[-1]} and is_eos"
        ends = set(run.query(ended)["token_id"].to_pylist())
    found = []
    for row in types:
        if row["class"] is None:
            continue
        own = tested.get(row["token_id"], {})
        one: Row = {
            "token_id": int(row["token_id"]),
            "token": row["token"],
            "class": row["class"],
            "declared": bool(row.get("in_certified")),
            "confirmed": bool(row.get("confirmed")),
            "cost_share": max(row["r"] or 0.0, 0.0) / total if total > 0 else 0.0,
            "verdict": own.get("verdict"),
            "is_end": row["token_id"] in ends,
        }
        for name, known in (("fall", row), ("delta", own)):
            for column in (name, f"{name}_low", f"{name}_high"):
                value = known.get(column)
                one[column] = None if value is None or value != value else float(value)  # JSON has no NaN
        found.append(one)
    return found


# ---------------------------------------------------------------- the file


@dataclass(frozen=True)
class BypassList:
    """A bypass list as it was read."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    fingerprint: str | None
    """Of the tokenizer that the ids belong to; None: the list does not say."""
    status: str
    """not compared, passed, failed or undecided: what training without these types did to accuracy."""
    text: str
    """The same in words, e.g. "compared: −0.1 [−0.8, 0.6]"."""
    content: Json
    """Everything the file holds."""


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A digest of a tokenizer's tokens and their ids; the same for two tokenizers that give the same ids."""
    pairs = sorted((int(token_id), token) for token, token_id in vocabulary.items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()


def read_bypass(path: str | Path, *, fingerprint: str | None = None, formats: Sequence[str] = (FORMAT,)) -> BypassList:
    """Read and check a bypass list. Nothing in the file is executed or believed.

    Args:
        path: a bypass.json, or a run directory that has one.
        fingerprint: of the tokenizer at hand (see `fingerprint`); a list of another one is refused.
        formats: what the file may say of itself; an export for another trainer says something else.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"there is no bypass list {path}; `rocktokens bypass RUN` makes one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(
            content, ensure_ascii=False, allow_nan=False
        ).encode()  # half of a surrogate pair is JSON and no text
        ids, said = content["ids"], (content["format"], content["version"])
        whole = said in [(form, VERSION) for form in formats] and all(type(item) is int and item >= 0 for item in ids)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        whole = False
    if not whole or len(set(ids)) < len(ids):
        raise DataError(f"{path} is damaged, or not a bypass list: {FORMAT!r}, version {VERSION}, with different ids")
    made_with, comparison, tokens = (content.get(name) for name in ("tokenizer", "comparison", "tokens"))
    theirs = made_with.get("fingerprint") if isinstance(made_with, dict) else None
    if fingerprint is not None and theirs is not None and theirs != fingerprint:
        raise DataError(
            f"{path} was made with another tokenizer: its fingerprint is {theirs}, this one's is {fingerprint}. "
            "Token ids mean other tokens here; make a list for this pair with `rocktokens bypass`."
        )
    comparison = comparison if isinstance(comparison, dict) else {}
    tokens = tokens if isinstance(tokens, list) and len(tokens) == len(ids) else [f"#{token_id}" for token_id in ids]
    status, text = (str(comparison.get(name, NOT_COMPARED)) for name in ("status", "text"))
    return BypassList(tuple(ids), tuple(map(str, tokens)), theirs, status, text, content)


def _write(path: Path, content: Json) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


# ---------------------------------------------------------------- comparison and use


def comparison_of(run: Run, ids: Sequence[int]) -> Json:
    """What a comparison that froze exactly these types said of them; "not compared" where there is none."""
    facts = run.facts("compare") if run.done("compare") else {}
    frozen = {name: sorted(own) for name, own in facts.get("frozen_by", {}).items() if name in FREEZING}
    rows = [row for row in facts.get("regimes", []) if frozen.get(row["regime"]) == sorted(ids)]
    if not rows or not ids:
        return {"status": NOT_COMPARED, "text": NOT_COMPARED}
    row = rows[0]
    found = {"change": row["delta"], "low": row["delta_low"], "high": row["delta_high"], "verdict": row["verdict"]}
    found |= {"seeds": row["num_seeds"], "prompts": row["num_problems"], "steps": facts.get("steps")}
    change = Estimate(row["delta"], row["delta_low"], row["delta_high"], row["num_problems"])
    text = f"compared: {interval(change, points, signed=False)}"
    status = {"unchanged": "passed", "gains": "passed", "costs": "failed"}.get(row["verdict"], "undecided")
    if row["num_seeds"] < MIN_SEEDS:  # without an interval over seeds nothing is proven about training
        status, few = "undecided", "1 seed" if row["num_seeds"] == 1 else f"{row['num_seeds']} seeds"
        text += f" (interval over prompts only: {few})"
    return {"status": status, "text": text, **found}


def _passed(run: Run) -> list[list[int]]:
    """Sets that a comparison left out of training without a loss of accuracy."""
    frozen = run.facts("compare").get("frozen_by", {}) if run.done("compare") else {}
    sets = [list(own) for name, own in frozen.items() if name in FREEZING]
    return [own for own in sets if comparison_of(run, own)["status"] == "passed"]


def _compared(content: Json, comparison: Row) -> Json:
    """The list with what a comparison said of it, and what is still not tested."""
    if "tested" not in content or "decisions" not in content:  # a list from elsewhere keeps its own words
        return {**content, "comparison": comparison}
    missing = [words for name, words in UNTESTED.items() if name not in content["tested"]]
    if comparison["status"] == NOT_COMPARED:
        missing.append("training without them: `rocktokens compare`")
    untested = sum(row.get("verdict") is None and row.get("reason") != "end token" for row in content["decisions"])
    if untested:
        missing.append(f"{untested} costly token types that the census did not test")
    missing.append("other prompts, other checkpoints, other models and other sampling settings")
    return {**content, "not_tested": missing, "comparison": comparison}


def write_comparison_back(run: Run) -> None:
    """Put the verdict of a comparison into the run's list, if it compared that list."""
    if not (run.path / NAME).is_file():
        return
    content = read_bypass(run.path).content
    comparison = comparison_of(run, content["ids"])
    if content.get("comparison") != comparison:
        _write(run.path / NAME, _compared(content, comparison))
        log.info("%s: %s", run.path / NAME, comparison["text"])


def list_for(
    run: Run, named: str | None, tokenizer: PreTrainedTokenizerBase, *, freezes: bool
) -> tuple[int, ...] | None:
    """Token ids of the list that a selector names, else of the run's own; None where there is neither.

    A list that was made with another tokenizer is refused, and an empty one where exactly its types are frozen.
    """
    if named is None and not (run.path / NAME).is_file():
        return None
    found = read_bypass(named or run.path, fingerprint=fingerprint(tokenizer.get_vocab()))
    if freezes and not found.ids:
        raise ConfigError(
            f"the bypass list of {named or run.path} is empty: there is nothing to freeze. Train with uniform, or "
            "freeze all rocks with freeze_rocks."
        )
    if freezes and found.status != "passed":
        log.warning("the bypass list in use is not proven in training: %s", found.text)
    return found.ids
