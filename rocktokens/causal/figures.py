"""Knock-outs and grafts as shown: figures of the report, and tables of the terminal.

A figure reads the tables of the run; it is None where one is missing.
"""

from __future__ import annotations

import math
from collections import Counter

import pyarrow as pa

from rocktokens.causal.census import Census, expected_false, median_detectable
from rocktokens.causal.inference import NEUTRAL, NEVER_USED, PILLAR, STUMBLING_BLOCK, UNDECIDED
from rocktokens.causal.inference import VERDICTS as NAMES
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.facts import Facts, once
from rocktokens.show import (
    MUTED,
    REST,
    ROCK,
    THIRD,
    Column,
    Figure,
    Table,
    band,
    errors,
    estimate,
    interval,
    label,
    layout,
    listed,
    names_axis,
    number,
    p_value,
    percent,
    plural,
    points,
    rule,
)
from rocktokens.stats import Estimate
from rocktokens.values import Json, Row

VERDICTS = {
    PILLAR: (REST, "square"),
    STUMBLING_BLOCK: (ROCK, "diamond"),
    NEUTRAL: (THIRD, "circle"),
    UNDECIDED: (MUTED, "circle-open"),
    NEVER_USED: (MUTED, "x"),
}
MAX_BARS = 40


@once
def census_rows(facts: Facts) -> list[Row]:
    """Candidates of the census."""
    table = facts.table("census")
    columns = ("role", "kind", "token_id", "token", "verdict", "delta")
    if table is None or facts.lacks(table, "the knock-outs", *columns):
        return []
    return [row for row in table.to_pylist() if row["role"] == "candidate"]


def verdicts_by_token(facts: Facts) -> dict[int, Json]:
    """Token id to its own census row; single-token knock-outs only."""
    found: dict[int, Row] = {}
    for row in census_rows(facts):
        if row["kind"] == "token":
            found.setdefault(row["token_id"], row)
    return found


def epsilon(facts: Facts) -> float:
    """The smallest effect that counts."""
    return float(facts.stage("knockout").get("epsilon", KnockoutConfig.epsilon))


def noise_floor(facts: Facts) -> float | None:
    """What 95 % of the placebo arm's effects stay within, of the noisiest candidate."""
    recorded = facts.stage("knockout").get("noise_floor")
    return None if recorded is None else float(recorded)


def knockouts(facts: Facts) -> Figure | None:
    """Effect of every knock-out, largest first, with the band that counts as nothing and the noise floor."""
    known = [(row, item) for row in census_rows(facts) if (item := estimate(row, "delta")) is not None]
    table = facts.table("census")
    if table is None or not known:
        return None
    known.sort(key=lambda pair: (-abs(pair[1].value), pair[0]["token"]))
    shown = sorted(known[:MAX_BARS], key=lambda pair: (-pair[1].value, pair[0]["token"]))
    margin, stage, data = epsilon(facts), facts.stage("knockout"), []
    floors = [100 * (row.get("placebo_floor") or 0.0) for row, _ in shown]
    if any(floors):  # a pale bar behind each effect
        pale = {"marker": {"color": MUTED, "opacity": 0.28}, "width": 0.62, "hoverinfo": "skip"}
        ends = {"x": [2 * end for end in floors], "base": [-end for end in floors], "y": list(range(len(shown)))}
        data.append({"type": "bar", "orientation": "h", "name": "noise floor", **ends, **pale})
    for verdict in dict.fromkeys([*VERDICTS, *(row["verdict"] for row, _ in shown)]):
        color, symbol = VERDICTS.get(verdict, (MUTED, "circle"))
        own = [place for place, (row, _) in enumerate(shown) if row["verdict"] == verdict]
        if own:
            drawn: Json = {"type": "scatter", "mode": "markers", "name": label(verdict.lower(), 40), "y": own}
            drawn["marker"] = {"color": color, "symbol": symbol, "size": 10}
            drawn |= _bars([shown[place][1] for place in own], color)
            data.append({**drawn, **_hover([_effect_hover(*shown[place]) for place in own])})
    names = []
    for row, _ in shown:
        mark = "◆ " if row["token_id"] in facts.rock_ids and row["kind"] == "token" else ""
        names.append(mark + label(row["token"]) + _kind(row))
    shape = layout("change of accuracy without the token, points", "", height=120 + 22 * len(shown))
    shape["yaxis"] = names_axis(names)
    shape["shapes"] = [rule(0, color="@ink", dash="solid"), band(-100 * margin, 100 * margin)]
    left = f" The {len(shown)} largest of {len(known)} effects are drawn." if len(known) > len(shown) else ""
    notes: tuple[str, ...] = ()
    if (smallest := stage.get("smallest_detectable_effect")) is not None:
        power = percent(float(stage.get("power", KnockoutConfig.power)), 0)
        effect = number(100 * float(smallest), 1)
        notes = (f"Smallest effect that this census could see with {power} power: {effect} points.",)
    return Figure(
        name="knockouts",
        title="Do they matter at inference?",
        sentence=knockout_sentence(facts) + left,
        estimator=f"Δ = accuracy with the token banned − accuracy, paired by prompt; resumed from the baseline at the "
        f"token's first occurrence. Bars: 95 % bootstrap over prompts. Grey band: ±ε = {points(margin)} points, what "
        "counts as nothing. Noise floor: 95 % of the placebo arm’s effects (resumed at the same places, nothing "
        "banned) lie inside. ◆ marks the rocks.",
        rows=table,
        data=data,
        layout=shape,
        notes=notes,
    )


def _kind(row: Row) -> str:
    return "" if row["kind"] == "token" else f" ({label(row['kind'])})"


def _bars(items: list[Estimate], color: str) -> Json:
    """Values in points, with their intervals."""
    value = [100 * item.value for item in items]
    low, high = ([100 * e if math.isfinite(e) else None for e in ends] for ends in zip(*(item[1:3] for item in items)))
    return {"x": value, "error_x": errors(value, low, high, color)}


def _hover(texts: list[str]) -> Json:
    return {"text": texts, "hovertemplate": "%{text}<extra></extra>"}


def _effect_hover(row: Row, item: Estimate) -> str:
    adjusted, used = row.get("p_bh"), row.get("num_used")
    lines = [
        f"{label(row['token'], 40)}{_kind(row)}: {label(row['verdict'], 40)}",
        f"Δ {interval(item, points)} points, {p_value(row.get('p'))}",
        *([f"after Benjamini–Hochberg {p_value(adjusted)}"] if adjusted is not None else []),
        *([f"{number(used, 0)} rollouts used it"] if used is not None else []),
    ]
    return "<br>".join(lines)


def knockout_sentence(facts: Facts) -> str:
    """Verdicts counted, and the pillars and stumbling blocks named."""
    rows, floor = census_rows(facts), noise_floor(facts)
    counts = Counter(row["verdict"] for row in rows)
    named = []
    for name in (PILLAR, STUMBLING_BLOCK):
        tokens = [f"“{row['token']}”" for row in rows if row["verdict"] == name]
        named += [f"{name.lower()}s: {listed(tokens, 6)}"] if tokens else []
    tail = f" ({'; '.join(named)})" if named else ""
    noise = f"; the noise floor is {number(100 * floor, 1)} points or less" if floor is not None else ""
    kinds = listed([counted(name, counts[name]) for name in dict.fromkeys([*NAMES, *counts]) if counts[name]])
    return f"Banned one at a time, {plural(len(rows), 'candidate')} gave {kinds}{tail}{noise}."


def counted(verdict: str, count: int) -> str:
    """A number of verdicts; pillars and stumbling blocks have a plural, the others are adjectives."""
    return plural(count, verdict.lower(), verdict.lower() + "s" * verdict.startswith("Strong"))


ARMS = {"all": "all positions", "rest": "all but the rocks", "control": "control positions"}


def graft_rows(facts: Facts) -> list[Row]:
    """Grafts by the names that a reader knows."""
    table = facts.table("grafts")
    if table is None or facts.lacks(table, "the grafts", "arm", "gain"):
        return []
    # Halves of the bypass list's candidates are steps of a search: the list tells of them.
    rows = [row for row in table.to_pylist() if not row["arm"].startswith("skippable ")]
    return [{**row, "arm": ARMS.get(row["arm"], row["arm"].removeprefix("cluster "))} for row in rows]


def grafts(facts: Facts) -> Figure | None:
    """Gain in accuracy when the teacher redraws the set's tokens."""
    known = [(row, item) for row in graft_rows(facts) if (item := estimate(row, "gain")) is not None][::-1]
    table = facts.table("grafts")
    if table is None or not known:
        return None
    hover = []
    for row, item in known:
        lines = [f"{label(row['arm'], 40)}: gain {interval(item, points)} points"]
        accuracy = estimate(row, "accuracy")
        lines += [f"accuracy {interval(accuracy, percent)}"] if accuracy else []
        for name, what in (("grad_share", "the gradient norm"), ("share_positions", "the positions")):
            lines += [f"{percent(row[name])} of {what}"] if row.get(name) is not None else []
        hover.append("<br>".join(lines))
    bars = _bars([item for _, item in known], "@ink")
    colors = [ROCK if row["arm"] == "rocks" else REST for row, _ in known]
    drawn = {"type": "bar", "orientation": "h", "name": "gain", "y": list(range(len(known))), "width": 0.5}
    shape = layout("gain in accuracy, points", "", height=120 + 44 * len(known), showlegend=False)
    shape["yaxis"] = names_axis([label(row["arm"], 26) for row, _ in known])
    shape["shapes"] = [rule(0, color="@ink", dash="solid")]
    return Figure(
        name="grafts",
        title="What would learning them gain?",
        sentence=graft_sentence(facts),
        estimator="The student samples; where the drawn token is in the set, the teacher draws again. Accuracy less "
        "that without grafts, paired by prompt, 95 % bootstrap. It bounds the direct gain from learning the set.",
        rows=table,
        data=[{**drawn, **bars, "marker": {"color": colors}, "textposition": "none", **_hover(hover)}],
        layout=shape,
    )


def graft_sentence(facts: Facts) -> str:
    """Gains at the rocks, at the control and everywhere; and the kind of token that gains most."""
    main = ("rocks", *ARMS.values())
    gains = {row["arm"]: item for row in graft_rows(facts) if (item := estimate(row, "gain")) is not None}
    said = [f"{interval(gains[arm], points)} points at {arm}" for arm in main if arm in gains]
    if not said:
        return "No graft was measured."
    kinds = {arm: item for arm, item in gains.items() if arm not in (*main, "placebo", "skippable", "candidates")}
    best = max(kinds, key=lambda arm: (kinds[arm].value, arm), default=None)
    most = f"; of the kinds of token, most at {best}: {interval(kinds[best], points)}" if best is not None else ""
    return f"Letting the teacher draw instead changes accuracy by {listed(said)}{most}."


# ---------------------------------------------------------------- on the terminal


def census_terminal(census: Census, limit: int = 40) -> Table:
    """The candidates, verdict by verdict, largest effect first, and what the table rests on."""
    rows = [r for r in census.results if r.banned.role == "candidate"]
    rows.sort(key=lambda r: (NAMES.index(r.verdict), -abs(r.delta), r.banned.token_id, r.banned.set_id))
    data: list[Row] = []
    for r in rows:
        kind = "" if r.banned.kind == "token" else f" {r.banned.kind} of {len(r.banned.members)}"
        known = r.verdict != NEVER_USED
        data.append(
            {
                "token": f"{r.banned.token!r}{kind}",
                "used": percent(r.used_share, 0 if r.used_share >= 0.1 or not r.used_share else 1),
                "n": str(r.num_problems),
                "delta": r.delta if known else None,
                "delta_low": r.low,
                "delta_high": r.high,
                "p_bh": f"{r.p_bh:.2g}" if known and math.isfinite(r.p_bh) else "–",
                "verdict": f"{r.verdict}: {r.more_problems:,} more" if r.verdict == UNDECIDED else r.verdict,
            }
        )
    columns = (
        Column("token", "token"),
        Column("used", "used", str),
        Column("n", "n", str),
        Column("Δ points [interval]", "delta", points, interval=True),
        Column("p (BH)", "p_bh", str),
        Column("verdict", "verdict"),
    )
    counts, accuracy, config = census.counts(), census.accuracy, census.config
    title = ", ".join(f"{counts[verdict]} {verdict}" for verdict in NAMES if verdict in counts)
    caption = [
        f"baseline accuracy {interval(accuracy, percent)} on {plural(accuracy.num_prompts, 'prompt')}, "
        f"{plural(census.baseline_rollouts, 'rollout')}; "
        f"looks: {census.num_rounds}, α = {config.alpha} in all; ε = {100 * config.epsilon:g} points"
    ]
    if (smallest := median_detectable(census)) is not None:
        caption.append(
            f"on all {accuracy.num_prompts} prompts: smallest effect seen at {percent(config.power, 0)} power "
            f"{points(smallest, 2, signed=False)} points (median of the sets)"
        )
    survive = sum(r.verdict.startswith("Strong") and r.p_bh <= 0.1 for r in rows)
    caption.append(
        f"if no candidate had an effect, chance alone would give up to {expected_false(census):.1f} Strong verdicts "
        f"({percent(config.alpha / 2)} of those always used); {survive} are left after Benjamini–Hochberg at 0.10"
    )
    strong, placebos = census.placebo_strong
    if placebos:
        caption.append(
            f"A/A on {census.placebo_problems} prompts: resumed with nothing banned, {strong} of {placebos} had a "
            f"strong verdict ({100 * config.alpha:g} % expected on average; they share one baseline)"
        )
    if controls := census.counts("control"):
        caption.append("controls as frequent as the rocks: " + ", ".join(f"{n} {name}" for name, n in controls.items()))
    return Table(columns, data, title, [*caption, *census.notes], name="census.parquet", limit=limit)


def graft_terminal(table: pa.Table, accuracy: float) -> Table:
    """What each set costs, and what learning it perfectly would gain."""
    columns = (
        Column("set", "arm"),
        Column("types", "num_types", number, {"digits": 0}),
        Column("positions", "share_positions", percent),
        Column("loss", "loss_share", percent),
        Column("gradient", "grad_share", percent),
        Column("gain [95 %]", "gain", points, interval=True),
    )
    title = f"grafts: the teacher draws in the student's place ({percent(accuracy)} right without)"
    return Table(columns, table.to_pylist(), title, name="grafts.parquet")
