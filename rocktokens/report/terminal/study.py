"""The study on the terminal: ten lines, every number with its interval.

The report's five sentences say the same in full. What was not asked is named with the command that asks it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rocktokens.core.stats import Estimate
from rocktokens.report.figures.causal import census_rows, counted, epsilon, graft_rows, verdicts_by_token
from rocktokens.report.figures.compare import finals
from rocktokens.report.figures.detect import footprint_row
from rocktokens.report.figures.distill import persistence_rows
from rocktokens.report.formats import bracket, interval, listed, percent, plural, points, visible
from rocktokens.report.run_facts import Facts, estimate

NAMED = 8


def summary(facts: Facts, report: Path | None) -> list[tuple[str, str]]:
    """Ten rows of a name and what is known about it, plain text."""
    return [
        ("rocks", _rocks(facts)),
        ("positions", _share(facts, "share_positions")),
        ("loss", _share(facts, "share_loss", gradient=True)),
        ("enrichment", _enrichment(facts)),
        ("learned", _learned(facts)),
        ("accuracy", _accuracy(facts)),
        ("banned", _banned(facts)),
        ("grafted", _grafted(facts)),
        ("frozen", _frozen(facts)),
        ("report", str(report) if report is not None else _ask("report")),
    ]


def _ask(command: str) -> str:
    return f"not measured; `rocktokens {command}` does"


def _rocks(facts: Facts) -> str:
    if not facts.types:
        return _ask("detect")
    names = listed([visible(row["token"]) for row in facts.rocks], NAMED)
    return f"{len(facts.rocks)} of {plural(len(facts.types), 'token type')}" + (f": {names}" if names else "")


def _share(facts: Facts, column: str, *, gradient: bool = False) -> str:
    row = footprint_row(facts)
    found = estimate(row, column) if facts.rocks else None
    if found is None:
        return "no rocks to measure" if facts.types else _ask("detect")
    norm = estimate(row, "share_grad") if gradient else None
    more = f", and {interval(norm, percent)} of the gradient norm" if norm else ""
    return f"{interval(found, percent)} are rocks’{more}"


def _enrichment(facts: Facts) -> str:
    found = estimate(footprint_row(facts), "enrichment") if facts.rocks else None
    if found is None:
        return "no rocks to measure" if facts.types else _ask("detect")
    return f"{interval(found)} times what their frequency explains"


def _learned(facts: Facts) -> str:
    rows = [row for row in persistence_rows(facts) if row["arm"] == "checkpoint"]
    if not rows:
        return _ask("score")
    last = max(row["step"] for row in rows)
    found = {row["group"]: estimate(row, "change") for row in rows if row["step"] == last}
    said = [
        f"{interval(found[group], digits=3)} nats {words}"
        for group, words in (("rocks", "on rocks"), ("rare high-loss", "on rare high-loss types"))
        if found.get(group) is not None
    ]
    return "mean loss on the same texts changed by " + ", ".join(said) if said else "no rock at two checkpoints"


def _accuracy(facts: Facts) -> str:
    stage = facts.stage("distill")
    ends = [_accuracy_of(stage.get(name)) for name in ("accuracy_before", "accuracy_after")]
    if ends[0] is None or ends[1] is None:
        return "not measured; no answers were checked while training"
    return f"{interval(ends[0], percent)} before distillation, {interval(ends[1], percent)} after"


def _accuracy_of(row: dict[str, Any] | None) -> Estimate | None:
    return estimate(row, "accuracy") if row else None


def _banned(facts: Facts) -> str:
    if not census_rows(facts):
        return _ask("knockout")
    rows = verdicts_by_token(facts)
    own = [rows[token_id] for token_id in sorted(facts.rock_ids) if token_id in rows]
    if not own:
        return "no rock was among the candidates"
    said = listed([counted(name, count) for name, count in Counter(row["verdict"] for row in own).most_common()], 6)
    known = [(abs(item.value), row, item) for row in own if (item := estimate(row, "delta")) is not None]
    largest = ""
    if known:
        _, row, item = max(known, key=lambda found: (found[0], found[1]["token"]))
        largest = f"; most by “{visible(row['token'])}” {interval(item, points)} points"
    return f"{said} (ε = {points(epsilon(facts)).lstrip('+')} points){largest}"


def _grafted(facts: Facts) -> str:
    found = next((row for row in graft_rows(facts) if row["arm"] == "rocks"), None)
    gain = estimate(found, "gain") if found else None
    return f"drawn by the teacher, rocks gain {interval(gain, points)} points" if gain else _ask("graft")


def _frozen(facts: Facts) -> str:
    row = finals(facts).get("freeze")
    change = estimate(row, "delta") if row else None
    if row is None or change is None:
        return _ask("compare")
    ratio = estimate(row, "seconds_ratio")
    time = ""
    if ratio is not None:
        known = "" if bracket(ratio) else " (no interval from one seed)"
        time = f", in {interval(ratio)} of its time{known}"
    return f"{interval(change, points)} points against uniform training{time}"
