"""The stage `bypass`: which costly token types training may skip; writes bypass.json. It loads no model.

It reads what detection, census and grafts left and decides nothing by itself: the rule is core/bypass.py's, the words
report/conclusions/bypass.py's, the file's form runs/bypass.py's. A comparison writes its verdict back into the list.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocktokens.bypass.conclusions import (
    NOT_COMPARED,
    comparison_text,
    list_sentence,
    not_tested,
    reason_sentence,
)
from rocktokens.bypass.rules import Decision, Evidence, Graft, decide
from rocktokens.bypass.settings import BypassConfig
from rocktokens.bypass.store import FORMAT, NAME, VERSION, BypassList, fingerprint, read_bypass
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import ConfigError, DataError, RockTokensError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.run import Run, open_run, working_on, write_text
from rocktokens.select.settings import SelectorConfig
from rocktokens.settings import from_mapping
from rocktokens.stage import Stage, inputs_of
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Arms of the graft whose members are the set in question.
GRAFTED = ("rocks", "skippable")
WIDTH = 150  # of the table where there is no terminal


def bypass(path: Path, config: BypassConfig) -> Run:
    """Decide for every costly type whether training may skip it; writes bypass.json and prints the table."""
    from rocktokens.bypass.terminal import bypass_table

    with working_on(path):
        run = open_run(path)
        files = ("types.parquet", "census.parquet", "grafts.parquet")
        stage = Stage(run, "bypass", {"bypass": config}, inputs_of(run, files=files))
        known = run.manifest["config"].get("knockout", {})
        epsilon = config.epsilon or known.get("epsilon", KnockoutConfig.epsilon)
        decisions = decide(evidence_of(run), grafts_of(run), epsilon=epsilon)
        ids = [item.evidence.token_id for item in decisions if item.action == "skip"]
        content = _compared(_content(run, decisions, epsilon), comparison_of(run, ids))
        facts = {"ids": ids, "sentence": list_sentence(decisions), "epsilon": epsilon}
        if not _is_written(run.path, content):
            _write(run.path / NAME, content)
        if not stage.is_complete() or run.facts("bypass") != facts:
            stage.finish(facts)
    out = console(width=None if os.isatty(1) else WIDTH)
    out.print(bypass_table(decisions, epsilon=epsilon, compared=content["comparison"]["text"]))
    return run


# ---------------------------------------------------------------- what is read


def evidence_of(run: Run) -> list[Evidence]:
    """What detection and census say about every costly type."""
    types = run.types().to_pylist()
    if types and "class" not in types[0]:
        raise RunError(
            f"{run.path} was detected by an older version, which gave token types no class; run "
            f"`rocktokens detect {run.path} --again` first"
        )
    total = sum(max(row["r"] or 0.0, 0.0) for row in types)
    tested = _census(run)
    ends = set(_end_tokens(run))
    found = []
    for row in types:
        if row["class"] is None:
            continue
        census = tested.get(row["token_id"], {})
        found.append(
            Evidence(
                token_id=int(row["token_id"]),
                token=row["token"],
                kind=row["class"],
                declared=bool(row["in_certified"]),
                confirmed=bool(row["confirmed"]),
                cost_share=max(row["r"] or 0.0, 0.0) / total if total > 0 else 0.0,
                fall=_estimate(row, "fall", row.get("num_prompts")),
                verdict=census.get("verdict"),
                delta=_estimate(census, "delta", census.get("num_problems")),
                is_end=row["token_id"] in ends,
            )
        )
    return found


def _census(run: Run) -> dict[int, Json]:
    """Results of single token types by id."""
    if not run.has("census"):
        return {}
    return {row["token_id"]: row for row in run.read("census").to_pylist() if row["kind"] == "token"}


def _end_tokens(run: Run) -> list[int]:
    """Token types that ended a scored rollout."""
    if not run.steps():
        return []
    step = run.steps()[-1]
    return run.query(f"select distinct token_id from occurrences where step = {step} and is_eos")[
        "token_id"
    ].to_pylist()


def grafts_of(run: Run) -> list[Graft]:
    """The grafts of sets that were named by their members."""
    if not run.has("grafts"):
        return []
    rows = [row for row in run.read("grafts").to_pylist() if row["arm"] in GRAFTED and row.get("members")]
    made = []
    for row in rows:
        gain = _estimate(row, "gain", row["num_problems"])
        if gain is not None:
            made.append(Graft(row["arm"], frozenset(row["members"]), gain))
    return made


def _estimate(row: Row, name: str, number: Any) -> Estimate | None:
    values = [row.get(name + end) for end in ("", "_low", "_high")]
    if values[0] is None:
        return None
    value, low, high = (float("nan") if item is None else float(item) for item in values)
    return Estimate(value, low, high, int(number or 0))


# ---------------------------------------------------------------- what is written


def _content(run: Run, decisions: Sequence[Decision], epsilon: float) -> Json:
    skipped = [item for item in decisions if item.action == "skip"]
    stages = [name for name in ("detect", "knockout", "graft") if run.done(name)]
    return {
        "format": FORMAT,
        "version": VERSION,
        "ids": [item.evidence.token_id for item in skipped],
        "tokens": [item.evidence.token for item in skipped],
        "sentence": list_sentence(decisions),
        "epsilon": epsilon,
        "tokenizer": _tokenizer(run),
        "tested": {name: _tested(run, name) for name in stages},
        "not_tested": [],  # by `_compared`
        "decisions": [_decision(item, epsilon) for item in decisions],
        "run": str(run.path),
        "versions": run.manifest.get("versions", {}),
    }


def _compared(content: Json, comparison: Row) -> Row:
    """The list with what a comparison said of it. One of other types leaves training without these ones untested."""
    if "tested" not in content or "decisions" not in content:  # a list from elsewhere: its own words stand
        return {**content, "comparison": comparison}
    stages = [*content["tested"], *(["compare"] if comparison["status"] != NOT_COMPARED else [])]
    untested = sum(row.get("verdict") is None and row.get("reason") != "end token" for row in content["decisions"])
    return {**content, "not_tested": not_tested(stages, untested), "comparison": comparison}


def _decision(item: Decision, epsilon: float) -> Json:
    found, graft = item.evidence, item.graft
    row: Row = {
        "token_id": found.token_id,
        "token": found.token,
        "decision": item.action,
        "reason": item.reason,
        "why": reason_sentence(item, epsilon=epsilon),
        "class": found.kind,
        "declared": found.declared,
        "confirmed": found.confirmed,
        "cost_share": found.cost_share,
        "verdict": found.verdict,
    }
    row |= _flat("fall", found.fall) | _flat("delta", found.delta) | _flat("graft_gain", graft.gain if graft else None)
    return row | {"graft": graft.name if graft else None}


def _flat(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    ends = estimate[:3] if estimate is not None else (None, None, None)
    plain = [None if value is None or value != value else float(value) for value in ends]
    return dict(zip((name, f"{name}_low", f"{name}_high"), plain))


def _tested(run: Run, stage: str) -> Json:
    """A few facts of a stage that the list rests on."""
    wanted = ("definition", "signal", "num_prompts", "num_problems", "num_rollouts", "accuracy", "epsilon", "alpha")
    return {name: value for name, value in run.facts(stage).items() if name in wanted}


def _tokenizer(run: Run) -> Json:
    """The tokenizer that the ids belong to; ids of a run that names none cannot be protected."""
    from rocktokens.models.pair import load_tokenizer

    pair = from_mapping(PairConfig, run.manifest["config"].get("pair", {}))
    if not pair.student:
        return {"source": None, "fingerprint": None, "vocabulary": None}
    try:
        vocabulary = load_tokenizer(pair.student, pair).get_vocab()
    except RockTokensError as error:
        log.warning("the list carries no fingerprint of its tokenizer: %s", error)
        return {"source": pair.student, "fingerprint": None, "vocabulary": None}
    return {"source": pair.student, "fingerprint": fingerprint(vocabulary), "vocabulary": len(vocabulary)}


def _is_written(path: Path, content: Json) -> bool:
    """Whether the list that lies there says the same; a damaged one does not."""
    try:
        return read_bypass(path).content == json.loads(json.dumps(content))
    except DataError:
        return False


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
    status = {"unchanged": "passed", "gains": "passed", "costs": "failed"}.get(row["verdict"], "undecided")
    if row["num_seeds"] < MIN_SEEDS:  # without an interval over seeds nothing is proven about training
        status = "undecided"
    return {"status": status, "text": comparison_text(found), **found}


def write_comparison_back(run: Run) -> None:
    """Put the verdict of a comparison into the run's list, if it compared that list."""
    if not (run.path / NAME).is_file():
        return
    content = read_bypass(run.path).content
    comparison = comparison_of(run, content["ids"])
    if content.get("comparison") != comparison:
        _write(run.path / NAME, _compared(content, comparison))
        log.info("%s: %s", run.path / NAME, comparison["text"])


def list_for(run: Run, config: SelectorConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...] | None:
    """Token ids of the list that a selector asks for, else of the run's own; None where there is neither.

    A list that was made with another tokenizer is refused.
    """
    if config.bypass is None and not (run.path / NAME).is_file():
        return None
    found: BypassList = read_bypass(config.bypass or run.path, fingerprint=fingerprint(tokenizer.get_vocab()))
    if config.name == "freeze" and not config.rocks and not found.ids:
        raise ConfigError(
            f"the bypass list of {config.bypass or run.path} is empty: there is nothing to freeze. Train with uniform, "
            "or freeze all rocks with freeze_rocks."
        )
    if config.name == "freeze" and found.status != "passed":
        log.warning("the bypass list in use is not proven in training: %s", found.text)
    return found.ids
