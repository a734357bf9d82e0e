"""The section "The study" of a real pair's results page, from its run: tables of what each stage found, nothing else.

python benchmarks/pair_page.py runs/qwen docs/results/qwen.md     # replaces the section; what follows the marker stays
python benchmarks/pair_page.py runs/qwen docs/results/qwen.md --late runs/qwen-late     # with a second comparison

Numbers are taken from the run; a stage that did not complete is named as such. Judgement is written by people, below
the marker.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocktokens import open_run
from rocktokens.facts import Facts
from rocktokens.report.conclusions import verdict
from rocktokens.show import estimate, interval, percent, plural, points

HEADING, MARKER = "## The study\n", "<!-- below: written by hand -->\n"
STAGES = ("distill", "sample", "score", "detect", "geometry", "knockout", "graft", "bypass", "compare")
SHOWN = 20


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a sentence where there are no rows."""
    if not rows:
        return "None.\n"
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def shown(token: Any) -> str:
    """A token as code."""
    return "`" + str(token).replace("\n", "↵").replace("|", "\\|").replace("`", "'") + "`"


def number(value: Any, digits: int = 3) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def training(facts: Facts) -> str:
    """Loss of every step, and the accuracies."""
    stage = facts.stage("distill")
    rows = facts.run.query("select step, loss, tokens from training where loss is not null order by step").to_pylist()
    said = f"{stage['steps']} optimiser steps (stopped by {stage['stopped']}). Loss per step, nats per token: "
    said += ", ".join(number(row["loss"]) for row in rows) + ".\n"
    for key, name in (("accuracy_before", "before"), ("accuracy_after", "after")):
        value = estimate(stage[key], "accuracy") if key in stage else None
        said += f"Accuracy {name}: {interval(value, percent)}.\n" if value else ""
    return said


def detection(facts: Facts) -> str:
    """Costly types with their class, the footprints of every definition, persistence beside A/A."""
    stage = facts.stage("detect")
    types = sorted((row for row in facts.types if row.get("class")), key=lambda row: -(row.get("r") or 0))
    rows = [
        [
            shown(row["token"]),
            str(row["class"]),
            "yes" if row.get("confirmed") else "no",
            str(row["count_all"]),
            f"{number(row.get('loss_pre'))} → {number(row.get('loss_post'))}",
            interval(estimate(row, "fall"), percent),
        ]
        for row in types[:SHOWN]
    ]
    spread = stage.get("concentration", {})
    feet = [
        [
            str(row["name"]),
            str(row["num_types"]),
            interval(estimate(row, "share_positions"), percent),
            interval(estimate(row, "share_loss"), percent),
            interval(estimate(row, "enrichment")),
        ]
        for row in facts.rows("footprints")
    ]
    last = max(facts.steps, default=0)
    persistence = [
        [
            row["group"],
            row["arm"],
            str(row["num_types"]),
            f"{number(row['before'])} → {number(row['after'])}",
            interval(estimate(row, "change"), digits=3),
        ]
        for row in facts.rows("persistence")
        if row["step"] in (None, last)
    ]
    return (
        f"{stage.get('num_prompts')} prompts, {stage.get('num_occurrences')} positions, {stage.get('num_types')} token "
        f"types, checkpoints {', '.join(map(str, facts.steps))}. Declared rocks: {len(stage.get('rocks', []))}. "
        f"Half of the loss lies on {percent(spread.get('positions_50'))} of the positions, 80 % on "
        f"{percent(spread.get('positions_80'))}.\n\n"
        + table(("costly type", "class", "confirmed", "count", "loss before → after", "fall"), rows)
        + "\n"
        + table(("set", "types", "of positions", "of loss", "enrichment"), feet)
        + "\n"
        + table(("group", "arm", "types", "before → after", "change"), persistence)
    )


def census(facts: Facts) -> str:
    """Verdicts and what could be seen."""
    stage = facts.stage("knockout")
    rows = [
        [
            shown(row["token"]),
            row["role"],
            row["kind"],
            row["verdict"],
            interval(estimate(row, "delta"), points),
            percent(row.get("used_share")),
        ]
        for row in facts.rows("census")
    ]
    smallest, floor = stage.get("smallest_detectable_effect"), stage.get("noise_floor")
    return (
        f"{stage.get('num_problems')} prompts; baseline {interval(estimate(stage, 'accuracy'), percent)}; smallest "
        f"effect seen at 80 % power {points(smallest) if smallest is not None else '–'} points, noise of resuming with "
        f"nothing banned {points(floor) if floor is not None else '–'} points at most; verdicts "
        f"{stage.get('verdicts')}."
        "\n\n" + table(("banned", "role", "kind", "verdict", "Δ, points", "used in"), rows[: 2 * SHOWN])
    )


def bypass(facts: Facts) -> str:
    """The list, and why each rock is or is not on it."""
    content = json.loads((facts.run.path / "bypass.json").read_text(encoding="utf-8"))
    rows = [[shown(row["token"]), row["class"], row["decision"], row["why"]] for row in content["decisions"]]
    said = facts.stage("bypass")["sentence"]
    return f"{said}\n\n" + table(("costly type", "class", "decision", "why"), rows[:SHOWN])


def comparison(facts: Facts) -> str:
    """Every regime from one start, against uniform."""
    stage = facts.stage("compare")
    rows = [
        [
            row["regime"],
            interval(estimate(row, "accuracy"), percent),
            "" if row["regime"] == "uniform" else interval(estimate(row, "delta"), points),
            _loss(row, "loss_rocks"),
            _loss(row, "loss_rest"),
            percent(row.get("kept_share")),
            "" if row["regime"] == "uniform" else number(row.get("spent_ratio"), 2),
            "" if row["regime"] == "uniform" else interval(estimate(row, "length_ratio"), _two_digits),
            "" if row["regime"] == "uniform" else interval(estimate(row, "truncated_change"), points),
            row["verdict"] if row["regime"] != "uniform" else "",
        ]
        for row in stage["regimes"]
    ]
    first = stage["regimes"][0]
    names = ("regime", "accuracy", "change, points", "loss, frozen types", "loss, the rest", "tokens kept")
    names = (*names, "tokens spent ×", "length ×", "cut, points", "verdict")
    start = [row for row in facts.rows("compare") if (row["regime"], row["step"]) == ("uniform", 0)]
    names_of = {"accuracy": "accuracy", "loss_rocks": "heldout_loss_rocks", "loss_rest": "heldout_loss_rest"}
    known = {name: [row[column] for row in start if row[column] is not None] for name, column in names_of.items()}
    before = {name: sum(values) / len(values) for name, values in known.items() if values}
    return (
        f"From the checkpoint at step {stage.get('start', 0)}: {stage['steps']} steps, "
        f"{plural(first['num_seeds'], 'seed')}, {first['num_problems']} prompts; {len(stage['frozen'])} token types "
        f"frozen. Before: accuracy {percent(before.get('accuracy'))}, loss of the frozen types "
        f"{number(before.get('loss_rocks'))}, of the rest {number(before.get('loss_rest'))}.\n\n" + table(names, rows)
    )


def _two_digits(value: float) -> str:
    return number(value, 2)


def _loss(row: dict[str, Any], name: str) -> str:
    """A loss with its change against uniform, where that has an interval."""
    change = estimate(row, f"{name}_change")
    said = number(row.get(name))
    if change is None or row.get(f"{name}_change_low") is None:
        return said
    return f"{said} ({interval(change, lambda value: f'{value:+.3f}')})"


def section(run_path: Path, late: Path | None = None) -> str:
    """The section as Markdown."""
    run = open_run(run_path)
    facts = Facts(run)
    done = [stage for stage in STAGES if run.done(stage)]
    left = [stage for stage in STAGES if stage not in done]
    parts = [f"Completed: {', '.join(done) or 'nothing'}. Not run: {', '.join(left) or 'nothing'}.\n"]
    if run.done("distill"):
        parts.append("### Distillation\n\n" + training(facts))
    if run.done("detect"):
        parts.append("### Detection\n\n" + detection(facts))
    if run.done("knockout"):
        parts.append("### Census\n\n" + census(facts))
    if run.done("graft"):
        keep = [[str(row["arm"]), interval(estimate(row, "gain"), points)] for row in facts.rows("grafts")]
        parts.append("### Grafts\n\n" + table(("drawn by the teacher", "gain, points"), keep))
    if run.done("bypass"):
        parts.append("### Bypass list\n\n" + bypass(facts))
    if run.done("compare"):
        parts.append("### Comparison, early\n\n" + comparison(facts))
    if late is not None and open_run(late).done("compare"):
        parts.append("### Comparison, late\n\n" + comparison(Facts(open_run(late))))
    if run.done("detect"):
        said = (f"- {tile.question} {tile.value}, {tile.answer}. {tile.detail}" for tile in verdict(facts).tiles)
        parts.append("### The report's own words\n\n" + "\n".join(said) + "\n")
    return HEADING + "\n" + "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--late", type=Path, help="a copy of the run that holds the comparison from a later checkpoint")
    options = parser.parse_args()
    text = options.page.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEADING)
    below = MARKER + rest.partition(MARKER)[2] if MARKER in rest else ""
    options.page.write_text(before + section(options.run, options.late) + below, encoding="utf-8")


if __name__ == "__main__":
    main()
