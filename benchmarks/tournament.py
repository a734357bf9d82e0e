"""The page of the tournament, docs/results/tournament.md, from the results files that `rocktokens compare` wrote.

    python benchmarks/tournament.py docs/results/tournament_arithmetic.json docs/results/tournament_market.json …

Every number on the page is read from those files; nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rocktokens.compare.league_page import league_markdown, saved_of
from rocktokens.show import percent, points

# Regime → what its source says, in its own setting.
CLAIMS = {
    "freeze": "skipping the rocks, 18 % of positions, is 1.4 to 1.7 times quicker and loses nothing (2605.09253)",
    "tip": "half of the tokens are as good as all (2604.14084)",
    "teachable": "5 % of the tokens beat all of them, 44.9 against 42.4 (2605.26844)",
    "iw": "more weight on early tokens gains up to 6.9 points (2606.22600)",
    "fire": "dropping unlikely rollouts and weighing by both entropies gains (2606.02684)",
    "selectkd": "little weight where the teacher disagrees gains (2510.24021); an audit saw 2.3 % of tokens changed",
    "position": "more weight on late tokens gains (2605.21606)",
    "adakd": "an adaptive share of the hardest tokens gains (2510.11615)",
    "entropy": "the most uncertain fifth of the tokens is enough (2506.01939; here a half)",
    "todi": "both divergences mixed token by token gain (2505.16297)",
    "srkl": "a skewed reverse divergence is more stable",
    "prefix": "short rollouts need 2 to 47 times fewer training operations (2602.15260)",
    "scheduled_prefix": "so do rollouts that grow over training (2602.15260)",
    "esr": "stopping after 100 tokens loses nothing (2605.27028; here after fewer, for rollouts are shorter)",
    "no_teacher": "a constant negative advantage on improbable tokens gives much of the gain (2608.31046)",
}


# Regime → the idea.
IDEAS = {
    "cut": "stop rollouts where the rest is easy: where the token record says that the non-rock loss ends",
    "small_cut": "that, and one rollout per prompt",
    "small_matched": "one rollout per prompt, learning rate matched to the smaller batch",
    "wide": "as many rollouts, each of another prompt",
    "fewer": "fewer rollouts of prompts whose non-rock loss is low",
}
LIMITS = """\
Skipping the teacher's pass on rollouts of low audited loss was not built. With prompts that come again (64
prompts, three epochs; [tournament_repeated.json](tournament_repeated.json)) `fewer` left no rollout out in 24
steps, as in the worlds below: its bite is 0, and it has not been tested here.

**The goal is not reached**: no regime saves anything beyond simply sampling less whose interval leaves out 0,
in any of the worlds. One rollout per prompt (`small`) needs the fewest tokens for uniform's accuracy; the
estimates of `small_cut` are 19 % and 24 % fewer in two worlds, and neither is proven. So no saving is claimed.

**What this is not**: trainings are short (24 optimiser steps of 32 rollouts, then on to the same tokens), at a
constant learning rate, with tiny models of built-in worlds whose rollouts have about 43 tokens, and with three
seeds: intervals are wide, and a regime that pays only late is not seen. `freeze` of the markers in
`cornerstone` cost 84 points over 150 steps and 6.5 over 24. Trained with the code that
landed as 416b692, before evaluations got other sampling seeds; the files
say at which commit they were written. `shorter`, `saturated` and `merit` were left out: at a constant learning
rate the first is uniform's own curve, and nothing is saturated after 24 steps; so were `soft` and `adaptive`,
which watches 101 steps first. `freeze_rocks` is `freeze` here: the list holds every rock.
""".splitlines()


def main() -> None:
    """Write the page beside the first file."""
    paths = [Path(name) for name in sys.argv[1:]]
    worlds = {path.stem.removeprefix("tournament_"): json.loads(path.read_text()) for path in paths}
    lines = ["# The tournament: published selectors, one budget, fair controls", ""]
    lines += introduction(worlds)
    lines += ["", "## What the papers say, and what happened here", ""]
    lines += claims(worlds)
    lines += ["", "## Savings of ours that were tried", ""]
    lines += ideas(worlds)
    lines += ["", *LIMITS]
    for name, found in worlds.items():
        lines += ["", league_markdown(f"World `{name}`", found["results"]).rstrip(), ""]
        lines += [f"![League of {name}](tournament_{name}.svg)", ""]
        lines += [
            f"- {sentence}" for sentence in found["results"]["verdicts"] if "beyond simply sampling less" in sentence
        ]
        lines += ["", "Overlap of what selectors would keep of uniform's rollouts (the largest and the smallest):", ""]
        lines += overlaps(found["results"]["overlap"])
    (paths[0].parent / "tournament.md").write_text("\n".join(lines).rstrip() + "\n")


def introduction(worlds: dict[str, Any]) -> list[str]:
    """How it was run."""
    lines = []
    for name, found in worlds.items():
        made, facts = found["environment"], found["results"]
        seeds = {row["num_seeds"] for row in facts["regimes"]}
        lines += [
            f"- `{name}`: {len(facts['regimes'])} regimes, {min(seeds)} seeds, {facts['steps']} steps, then on to "
            f"{facts['tokens']:,} tokens at a constant learning rate; {facts['regimes'][0]['num_problems']} held-out "
            f"prompts. {made['date']}, commit {made['commit']}, {made['cpu']}, {made['memory_gb']} GB, Python "
            f"{made['python']}, {', '.join(f'{key} {value}' for key, value in made['versions'].items())}. "
            f"Command: `{made['command']}`"
        ]
    return lines


def claims(worlds: dict[str, Any]) -> list[str]:
    """One row per regime: the claim, and in every world the changes with the bite beside them."""
    head = ["regime", "claim", *(f"`{name}`: change at equal steps; at equal tokens; bite" for name in worlds)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for regime, claim in CLAIMS.items():
        cells = [cell(found["results"]["regimes"], regime) for found in worlds.values()]
        if any(cells):
            lines.append("| " + " | ".join([f"`{regime}`", claim, *(text or "not trained" for text in cells)]) + " |")
    return lines


def cell(rows: list[dict[str, Any]], regime: str) -> str:
    """One regime in one world."""
    row = next((row for row in rows if row["regime"] == regime), None)
    if row is None:
        return ""

    def change(name: str) -> str:
        return f"{points(row[name])} [{points(row[f'{name}_low'])}, {points(row[f'{name}_high'])}]"

    bite = [percent(row[name]) for name in ("bite_tokens", "bite_loss") if row[name] is not None]
    dropped = f", end tokens dropped {percent(row['end_dropped'])}" if row["end_dropped"] else ""
    return f"{change('delta')}; {change('change_same_tokens')}; {' of tokens, '.join(bite)} of loss{dropped}"


def ideas(worlds: dict[str, Any]) -> list[str]:
    """One row per idea: tokens at equal steps, accuracy at equal tokens, and what is saved against the best control."""
    head = ["regime", "idea", *(f"`{name}`: tokens ×; change at equal tokens; saved" for name in worlds)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for regime, idea in IDEAS.items():
        cells = []
        for found in worlds.values():
            row = next(row for row in found["results"]["regimes"] if row["regime"] == regime)
            saving = next((row for row in found["results"]["savings"] if row["regime"] == regime), None)
            low, high = (points(row[f"change_same_tokens_{end}"]) for end in ("low", "high"))
            saved = "no saver" if saving is None else f"{saved_of(saving)}: {saving['answer']}"
            cells.append(f"{row['spent_ratio']:.2f}; {points(row['change_same_tokens'])} [{low}, {high}]; {saved}")
        lines.append("| " + " | ".join([f"`{regime}`", idea, *cells]) + " |")
    return lines


def overlaps(rows: list[dict[str, Any]]) -> list[str]:
    """The pairs that agree most and least, among selectors that drop something."""
    real = [row for row in rows if max(row["kept_first"], row["kept_second"]) < 0.95]
    ordered = sorted(real, key=lambda row: -row["overlap"])
    some = ordered[:3] + [row for row in ordered[-3:] if row not in ordered[:3]]
    return [f"- `{row['first']}` and `{row['second']}`: {row['overlap']:.2f}" for row in some]


if __name__ == "__main__":
    main()
