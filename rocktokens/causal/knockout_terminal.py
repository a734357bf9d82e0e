"""The census on the terminal: one line per candidate, verdict by verdict, and what the table rests on."""

from __future__ import annotations

import numpy as np
from rich.markup import escape
from rich.table import Table

from rocktokens.causal.census import Census, SetResult, last_look, median_detectable
from rocktokens.causal.inference import NEVER_USED, UNDECIDED, VERDICTS
from rocktokens.show import interval, percent, plural, points
from rocktokens.stats import Estimate


def render(census: Census, limit: int = 40) -> Table:
    """The candidates as a table for the terminal, verdict by verdict, largest effect first."""
    rows = [r for r in census.results if r.banned.role == "candidate"]
    rows.sort(key=lambda r: (VERDICTS.index(r.verdict), -abs(r.delta), r.banned.token_id or 0, r.banned.set_id))
    counts = census.counts()
    title = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    lines = summary(census)
    if len(rows) > limit:
        lines.insert(0, f"{len(rows) - limit} more are in census.parquet")
    table = Table(
        title=title, caption="\n".join(map(escape, lines)), caption_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    for name in ("token", "used", "n", "Δ points [interval]", "p (BH)", "verdict"):
        table.add_column(escape(name), justify="left" if name in ("token", "verdict") else "right", no_wrap=True)
    for r in rows[:limit]:
        table.add_row(*map(escape, _cells(r)))
    return table


def _cells(r: SetResult) -> tuple[str, ...]:
    kind = "" if r.banned.kind == "token" else f" {r.banned.kind} of {len(r.banned.members)}"
    if r.verdict == NEVER_USED:
        return (f"{r.banned.token!r}{kind}", "0 %", str(r.num_problems), "–", "–", r.verdict)
    return (
        f"{r.banned.token!r}{kind}",
        percent(r.used_share, 0 if r.used_share >= 0.1 else 1),
        str(r.num_problems),
        interval(Estimate(r.delta, r.low, r.high, r.num_problems), points),
        "–" if np.isnan(r.p_bh) else f"{r.p_bh:.2g}",
        f"{UNDECIDED}: {r.more_problems:,} more" if r.verdict == UNDECIDED else r.verdict,
    )


def summary(census: Census) -> list[str]:
    """What the table rests on, in a few lines."""
    accuracy = census.accuracy
    rollouts = f", {plural(census.baseline_rollouts, 'rollout')}" if census.baseline_rollouts else ""
    lines = [
        f"baseline accuracy {interval(accuracy, percent)} on {plural(accuracy.num_prompts, 'prompt')}{rollouts}; "
        f"looks: {census.num_rounds}, α = {census.alpha} in all; ε = {100 * census.epsilon:g} points"
    ]
    full = last_look(census)
    floors = [r.placebo_floor for r in full if np.isfinite(r.placebo_floor)]
    by_chance = f"; two runs without a ban differ by up to ±{points(max(floors, default=None), signed=False)} points"
    if full:
        lines.append(
            f"on all {accuracy.num_prompts} prompts: smallest effect seen at {percent(census.power, 0)} power "
            f"{points(median_detectable(full), 2, signed=False)} points (median of {plural(len(full), 'set')})"
            + (f"{by_chance} by chance" if floors else "")
        )
    strong, placebos = census.placebo_strong
    if placebos:
        lines.append(
            f"A/A on {census.placebo_problems} prompts: resumed with nothing banned, {strong} of {placebos} had a "
            f"strong verdict ({100 * census.alpha:g} % expected on average; they share one baseline)"
        )
    resumed = sum(r.num_tokens for r in census.results)
    whole = sum(r.num_problems for r in census.results) * census.baseline_tokens / max(accuracy.num_prompts, 1)
    if census.exact_resume and resumed:
        lines.append(f"{resumed:,} tokens generated, placebos included; full regeneration: about {whole:,.0f}")
    controls = census.counts("control")
    if controls:
        lines.append("controls as frequent as the rocks: " + ", ".join(f"{n} {name}" for name, n in controls.items()))
    undecided = [r for r in census.results if r.verdict == UNDECIDED and r.banned.role == "candidate"]
    if undecided:
        most = max(undecided, key=lambda r: r.more_problems)
        lines.append(
            f"{len(undecided)} undecided: {min(r.more_problems for r in undecided):,} more problems would probably "
            f"decide the nearest, {most.more_problems:,} the farthest ({most.banned.token!r})"
        )
    return [*lines, *census.notes]
