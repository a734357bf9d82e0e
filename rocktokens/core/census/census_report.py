"""A census as tables: for the store, and for the terminal. It formats and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from rocktokens.core.census.census import Census, SetResult
from rocktokens.core.census.correlates import Correlation
from rocktokens.core.census.inference import NEVER_USED, UNDECIDED, VERDICTS

LEVELS = (0.05, 0.10, 0.20)
NUMBERS = (
    *("num_used", "used_share", "num_problems", "num_changed", "delta", "low", "high"),
    *("outer_low", "outer_high", "inner_low", "inner_high", "accuracy_with"),
    *("p", "p_bonferroni", "p_bh", "p_max_t", "p_sign", "p_neutral", "sd", "detectable"),
    *("placebo_delta", "placebo_floor", "round", "alpha_share", "more_problems", "num_resumed", "num_tokens"),
)


def census_table(census: Census, predictors: Mapping[str, Mapping[int, float]] | None = None) -> pa.Table:
    """census.parquet: one row a set; what is not known is null."""
    results = census.results
    columns: dict[str, pa.Array] = {
        "set_id": pa.array([r.banned.set_id for r in results]),
        "role": pa.array([r.banned.role for r in results]),
        "kind": pa.array([r.banned.kind for r in results]),
        "token_id": pa.array([r.banned.token_id for r in results], pa.int32()),
        "token": pa.array([r.banned.token for r in results]),
        "members": pa.array([list(r.banned.members) for r in results], pa.list_(pa.int32())),
        "control_of": pa.array([r.banned.control_of for r in results], pa.string()),
        "verdict": pa.array([r.verdict for r in results]),
    }
    for name in NUMBERS:
        label = {"low": "delta_low", "high": "delta_high"}.get(name, name)
        columns[label] = _numbers([getattr(r, name) for r in results])
    columns["accuracy_without"] = _numbers([min(max(r.accuracy_with + r.delta, 0.0), 1.0) for r in results])
    for level in LEVELS:
        columns[f"bh_{round(100 * level):02d}"] = pa.array([bool(r.p_bh <= level) for r in results])
    for name, known in (predictors or {}).items():
        columns[name] = _numbers([known.get(r.banned.token_id, float("nan")) for r in results])
    return pa.table(columns)


def _numbers(values: Sequence[float]) -> pa.Array:
    array = np.asarray(values)
    return pa.array(array, mask=~np.isfinite(array)) if array.dtype.kind == "f" else pa.array(array)


def census_facts(census: Census, correlations: Sequence[Correlation], missing: Sequence[str]) -> dict:
    """The few numbers a manifest keeps."""
    used = [r for r in census.results if r.verdict != NEVER_USED]
    floors = [r.placebo_floor for r in used if np.isfinite(r.placebo_floor)]
    resumed = sum(r.num_tokens for r in census.results)
    return {
        "verdicts": census.counts(),
        "control_verdicts": census.counts("control"),
        "accuracy": census.accuracy.value,
        "accuracy_low": census.accuracy.low,
        "accuracy_high": census.accuracy.high,
        "num_problems": census.accuracy.num_prompts,
        "num_rollouts": census.baseline_rollouts,
        "rounds": census.num_rounds,
        "epsilon": census.epsilon,
        "alpha": census.alpha,
        "smallest_detectable_effect": _plain(_median(last_look(census))),
        "noise_floor": max(floors, default=None),
        "placebo_strong": list(census.placebo_strong),
        "baseline_tokens": census.baseline_tokens,
        "resumed_tokens": resumed,
        "exact_resume": census.exact_resume,
        "more_problems": max((r.more_problems for r in census.results), default=0),
        "correlations": {c.predictor: [_plain(c.r), _plain(c.p)] for c in correlations},
        "missing_predictors": list(missing),
        "notes": list(census.notes),
    }


def _plain(value: float) -> float | None:
    return value if np.isfinite(value) else None


def render(census: Census, correlations: Sequence[Correlation] = (), limit: int = 40) -> Table:
    """The candidates as a table for the terminal, verdict by verdict, largest effect first."""
    rows = [r for r in census.results if r.banned.role == "candidate"]
    rows.sort(key=lambda r: (VERDICTS.index(r.verdict), -abs(r.delta), r.banned.token_id))
    counts = census.counts()
    title = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    lines = [*summary(census), *_correlation_lines(correlations)]
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
        f"{100 * r.used_share:.0f} %" if r.used_share >= 0.1 else f"{100 * r.used_share:.1f} %",
        str(r.num_problems),
        f"{100 * r.delta:+.1f} [{100 * r.low:+.1f}, {100 * r.high:+.1f}]",
        "–" if np.isnan(r.p_bh) else f"{r.p_bh:.2g}",
        f"{UNDECIDED}: {r.more_problems:,} more" if r.verdict == UNDECIDED else r.verdict,
    )


def last_look(census: Census) -> list[SetResult]:
    """The sets that were tested on every problem; all others were decided before."""
    return [r for r in census.results if r.num_problems == census.accuracy.num_prompts and r.verdict != NEVER_USED]


def _median(results: Sequence[SetResult]) -> float:
    return float(np.median([r.detectable for r in results])) if results else float("nan")


def summary(census: Census) -> list[str]:
    """What the table rests on, in a few lines."""
    accuracy = census.accuracy
    lines = [
        f"baseline accuracy {100 * accuracy.value:.1f} % [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}] on "
        f"{accuracy.num_prompts} problems, {census.baseline_rollouts} rollouts; "
        f"looks: {census.num_rounds}, α = {census.alpha} in all; ε = {100 * census.epsilon:g} points"
    ]
    full = last_look(census)
    floors = [r.placebo_floor for r in full if np.isfinite(r.placebo_floor)]
    lines.append(
        f"on all {accuracy.num_prompts} problems: smallest effect seen at 80 % power {100 * _median(full):.2f} points "
        f"(median of {len(full)} sets)"
        + (f"; without a ban, two arms differ by up to ±{100 * max(floors):.1f} by chance" if floors else "")
    )
    strong, placebos = census.placebo_strong
    if placebos:
        lines.append(
            f"A/A on {census.placebo_problems} problems: resumed with nothing banned, {strong} of {placebos} came out "
            f"as strong ({100 * census.alpha:g} % expected on average; they share one baseline)"
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


def _correlation_lines(correlations: Sequence[Correlation]) -> list[str]:
    known = [c for c in correlations if np.isfinite(c.r)]
    if not known:
        return []
    return ["Δ goes with: " + ", ".join(f"{c.predictor} r = {c.r:+.2f} (p {c.p:.2g})" for c in known)]
