"""Which costly token types may be skipped in training: what detection, census and graft say together, type by type.

A type may be skipped if (a) it is a declared and confirmed rock, (b) the census proves that it is neutral or a
stumbling block, and (c) it is inside a set whose graft gains no more than ε, by the upper bound (docs/method.md §6).
The stage `bypass` decides it from the run's tables and writes bypass.json (store.py); it loads no model. A comparison
writes its verdict back into the list.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.bypass.settings import BypassConfig
from rocktokens.bypass.store import FORMAT, NAME, VERSION, fingerprint, read_bypass
from rocktokens.causal.inference import NEUTRAL, NEVER_USED, PILLAR, STUMBLING_BLOCK
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import ConfigError, DataError, RockTokensError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.run import Run, open_run, working_on, write_text
from rocktokens.settings import from_mapping
from rocktokens.show import Column, Table, estimate, interval, percent, points
from rocktokens.stage import Stage, inputs_of
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NOT_COMPARED = "not compared"
# Arms of the graft whose members are the set in question.
GRAFTED = ("rocks", "skippable")
# Facts of the stages that the list rests on.
TESTED = ("definition", "signal", "num_prompts", "num_problems", "num_rollouts", "accuracy", "epsilon", "alpha")
UNTESTED = {
    "knockout": "bans at inference: `rocktokens knockout`",
    "graft": "what learning the types would gain: `rocktokens graft`",
}
WIDTH = 150  # of the table where there is no terminal

# Reason → what may be done with the type, and the reason in words.
REASONS: dict[str, tuple[str, str]] = {
    "neutral": ("skip", "a confirmed rock, proven neutral: {banned}{gain}, no more than {margin}"),
    "stumbling block": ("skip", "a confirmed rock and a stumbling block: {banned}{gain}, no more than {margin}"),
    "learning": ("keep", "it is learning: its loss fell{fell}"),
    "learning, levelled off": ("keep", "it has learned: its loss fell{fell} and then stayed"),
    "pillar": ("keep", "a rock, but a pillar: {banned}"),
    "would gain": ("keep", "a rock that is not needed as it is, but learning it would pay{gain}, more than {margin}"),
    "end token": ("keep", "it ends rollouts, cannot be banned, and is never skipped"),
    "unclear": ("undecided", "costly, but neither that it stays nor that it falls is proven"),
    "no loss before": (
        "undecided",
        "costly, but no checkpoint before distillation was scored: whether it stays is not known",
    ),
    "not declared": ("undecided", "stagnant, but not in the declared set"),
    "not confirmed": ("undecided", "declared a rock on one half of the prompts, and not confirmed on the other"),
    "not tested": ("undecided", "a confirmed rock that no census has tested; run `rocktokens knockout`"),
    "census undecided": ("undecided", "a confirmed rock, but the census is undecided: {banned}"),
    "never used": ("undecided", "a confirmed rock, but no rollout of the census used it"),
    "no graft": (
        "undecided",
        "a confirmed rock, not needed at inference, but not grafted; run `rocktokens graft`",
    ),
    "graft undecided": (
        "undecided",
        "a confirmed rock, not needed at inference, but what learning it would gain is not known to {margin}{gain}",
    ),
}


# ---------------------------------------------------------------- the rule


def before_graft(row: Row) -> str:
    """The reason as far as detection and census go; neutral and stumbling block may yet fail the graft.

    `row`: class, declared, confirmed, verdict and is_end of one costly type.
    """
    if row.get("is_end"):
        return "end token"
    if row["class"] != "rock":
        return {"costly": "no loss before"}.get(row["class"], row["class"] if row["class"] in REASONS else "unclear")
    if not row["declared"]:
        return "not declared"
    if not row["confirmed"]:
        return "not confirmed"
    tested = {None: "not tested", NEVER_USED: "never used", PILLAR: "pillar", NEUTRAL: "neutral"}
    return {**tested, STUMBLING_BLOCK: "stumbling block"}.get(row["verdict"], "census undecided")


def chosen_graft(members: Iterable[int], grafts: Sequence[Row]) -> Row | None:
    """The graft that speaks for a set: that of the set itself, else of the smallest set around it."""
    wanted = frozenset(members)
    around = [graft for graft in grafts if wanted <= frozenset(graft["members"])]
    return min(around, key=lambda graft: (len(graft["members"]), graft["arm"]), default=None) if wanted else None


def decide(costly: Sequence[Row], grafts: Sequence[Row], *, epsilon: float) -> list[Row]:
    """Every costly type with its decision, the reason, and why in words; largest cost first.

    Args:
        costly: one row per costly type, as `evidence_of` makes them.
        grafts: rows of grafts.parquet whose members may hold those to be skipped.
        epsilon: largest gain of accuracy that does not matter, as a share.
    """
    # Types that detection and census would let be skipped have to be grafted together.
    graft = chosen_graft([row["token_id"] for row in costly if REASONS[before_graft(row)][0] == "skip"], grafts)
    gain = "" if graft is None else f"; grafting {len(graft['members'])} types ({graft['arm']}) gains "
    gain += "" if graft is None else f"{interval(estimate(graft, 'gain'), points)} points"
    made = []
    for row in sorted(costly, key=lambda row: (-row["cost_share"], row["token_id"])):
        reason, used = before_graft(row), None
        if REASONS[reason][0] == "skip":
            used = graft
            if graft is None:
                reason = "no graft"
            elif not graft["gain_high"] <= epsilon:
                reason = "would gain" if graft["gain_low"] > 0 else "graft undecided"
        delta, fall = estimate(row, "delta"), estimate(row, "fall")
        changed = "an unknown amount" if delta is None else f"{interval(delta, points)} points"
        why = REASONS[reason][1].format(
            banned=f"banning it changes accuracy by {changed}",
            fell="" if fall is None else f" by {interval(fall, percent)}",
            gain="" if used is None else gain,
            margin=f"{points(epsilon, signed=False)} points",
        )
        said = {"token_id": row["token_id"], "token": row["token"], "decision": REASONS[reason][0], "reason": reason}
        known = {name: value for name, value in row.items() if name not in (*said, "is_end")}
        ends = {f"graft_gain{end}": None if used is None else used[f"gain{end}"] for end in ("", "_low", "_high")}
        made.append({**said, "why": why, **known, **ends, "graft": None if used is None else used["arm"]})
    return made


def list_sentence(decisions: Sequence[Row]) -> str:
    """How many may be skipped, of what, and the share of the loss that goes with them."""
    rocks = [row["decision"] for row in decisions if row["class"] == "rock" and row["declared"]]
    if not rocks:
        return f"No rock is declared among {len(decisions)} costly token types: there is nothing to skip."
    share = percent(sum(row["cost_share"] for row in decisions if row["decision"] == "skip"))
    return (
        f"{rocks.count('skip')} of {len(rocks)} declared rocks may be skipped ({share} of the loss); "
        f"{rocks.count('keep')} must be kept, {rocks.count('undecided')} are undecided."
    )


# ---------------------------------------------------------------- the stage


def bypass(path: Path, config: BypassConfig) -> Run:
    """Decide for every costly type whether training may skip it; writes bypass.json and prints the table."""
    with working_on(path):
        run = open_run(path)
        files = ("types.parquet", "census.parquet", "grafts.parquet")
        stage = Stage(run, "bypass", {"bypass": config}, inputs_of(run, files=files))
        known = run.manifest["config"].get("knockout", {})
        epsilon = config.epsilon or known.get("epsilon", KnockoutConfig.epsilon)
        grafts = run.read("grafts").to_pylist() if run.has("grafts") else []
        sets = [row for row in grafts if row["arm"] in GRAFTED and row["members"] and row["gain"] is not None]
        decisions = decide(evidence_of(run), sets, epsilon=epsilon)
        skipped = [row for row in decisions if row["decision"] == "skip"]
        ids, sentence = [row["token_id"] for row in skipped], list_sentence(decisions)
        content: Json = {
            "format": FORMAT,
            "version": VERSION,
            "ids": ids,
            "tokens": [row["token"] for row in skipped],
            "sentence": sentence,
            "epsilon": epsilon,
            "tokenizer": _tokenizer(run),
            "tested": {
                name: {fact: value for fact, value in run.facts(name).items() if fact in TESTED}
                for name in ("detect", *UNTESTED)
                if run.done(name)
            },
            "not_tested": [],  # by `_compared`
            "decisions": decisions,
            "run": str(run.path),
            "versions": run.manifest.get("versions", {}),
        }
        content = _compared(content, comparison_of(run, ids))
        facts = {"ids": ids, "sentence": sentence, "epsilon": epsilon}
        try:
            written = read_bypass(run.path).content == json.loads(json.dumps(content))
        except DataError:  # none, or a damaged one
            written = False
        if not written:
            _write(run.path / NAME, content)
        if not stage.is_complete() or run.facts("bypass") != facts:
            stage.finish(facts)
    console(width=None if os.isatty(1) else WIDTH).print(bypass_table(content))
    return run


def bypass_table(content: Json, limit: int = 40) -> Table:
    """One row per costly type, those that may be skipped first."""
    order = ("skip", "keep", "undecided")
    rows = sorted(content["decisions"], key=lambda row: (order.index(row["decision"]), -row["cost_share"]))
    for row in rows:
        doubt = row["class"] == "rock" and not row["confirmed"]
        row["named"] = f"{row['class']} (not confirmed)" if doubt else row["class"]
    columns = (
        Column("token", "token"),
        Column("class", "named"),
        Column("cost", "cost_share", percent),
        Column("census", "verdict"),
        Column("graft ≤", "graft_gain_high", points),
        Column("decision", "decision"),
        Column("reason", "why"),
    )
    caption = [f"The list as a whole: {content['comparison']['text']}."]
    return Table(columns, rows, content["sentence"], caption, name=NAME, limit=limit)


# ---------------------------------------------------------------- what is read and written


def evidence_of(run: Run) -> list[Row]:
    """What detection and census say about every costly type."""
    types = run.types().to_pylist()
    if types and "class" not in types[0]:
        raise RunError(
            f"{run.path} was detected by an older version, which gave token types no class; run "
            f"`rocktokens detect {run.path} --again` first"
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
        one: Row = {
            "token_id": int(row["token_id"]),
            "token": row["token"],
            "class": row["class"],
            "declared": bool(row["in_certified"]),
            "confirmed": bool(row["confirmed"]),
            "cost_share": max(row["r"] or 0.0, 0.0) / total if total > 0 else 0.0,
            "verdict": tested.get(row["token_id"], {}).get("verdict"),
            "is_end": row["token_id"] in ends,
        }
        for name, known in (("fall", row), ("delta", tested.get(row["token_id"], {}))):
            for column in (name, f"{name}_low", f"{name}_high"):
                value = known.get(column)
                one[column] = None if value is None or value != value else float(value)
        found.append(one)
    return found


def _tokenizer(run: Run) -> Json:
    """The tokenizer that the ids belong to; ids of a run that names none cannot be protected."""
    from rocktokens.models.pair import load_tokenizer

    pair = from_mapping(PairConfig, run.manifest["config"].get("pair", {}))
    none: Json = {"source": pair.student or None, "fingerprint": None, "vocabulary": None}
    if not pair.student:
        return none
    try:
        vocabulary = load_tokenizer(pair.student, pair).get_vocab()
    except RockTokensError as error:
        log.warning("the list carries no fingerprint of its tokenizer: %s", error)
        return none
    return {"source": pair.student, "fingerprint": fingerprint(vocabulary), "vocabulary": len(vocabulary)}


def _write(path: Path, content: Json) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


# ---------------------------------------------------------------- comparison and use


def comparison_of(run: Run, ids: Sequence[int]) -> Json:
    """What a comparison that froze exactly these types said of them; "not compared" where there is none."""
    facts = run.facts("compare") if run.done("compare") else {}
    frozen = facts.get("frozen_by", {}).get("freeze")
    row = next((row for row in facts.get("regimes", []) if row["regime"] == "freeze"), None)
    if row is None or not ids or frozen is None or sorted(frozen) != sorted(ids):
        return {"status": NOT_COMPARED, "text": NOT_COMPARED}
    found = {"change": row["delta"], "low": row["delta_low"], "high": row["delta_high"], "verdict": row["verdict"]}
    found |= {"seeds": row["num_seeds"], "prompts": row["num_problems"], "steps": facts.get("steps")}
    change = Estimate(row["delta"], row["delta_low"], row["delta_high"], row["num_problems"])
    text = f"compared: {interval(change, points, signed=False)}"
    status = {"unchanged": "passed", "gains": "passed", "costs": "failed"}.get(row["verdict"], "undecided")
    if row["num_seeds"] < MIN_SEEDS:  # without an interval over seeds nothing is proven about training
        status, few = "undecided", "1 seed" if row["num_seeds"] == 1 else f"{row['num_seeds']} seeds"
        text += f" (interval over prompts only: {few})"
    return {"status": status, "text": text, **found}


def _compared(content: Json, comparison: Row) -> Json:
    """The list with what a comparison said of it. One of other types leaves training without these ones untested."""
    if "tested" not in content or "decisions" not in content:  # a list from elsewhere: its own words stand
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
