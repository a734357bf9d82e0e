"""The page's own tables. The first columns say what matters: a phone shows three of them, a desktop seven."""

from __future__ import annotations

from typing import Any

from rocktokens.causal.figures import census_rows, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.facts import Facts
from rocktokens.report.conclusions import bypass
from rocktokens.show import NONE, Column, Table, estimate, interval, number, percent, points, text

ROCK_ROWS = 200
# What else a comparison measures: header, column, format, whether it has an interval.
MEASURED = (
    ("change at equal seconds", "change_same_seconds", "points", True),
    ("change at equal tokens", "change_same_tokens", "points", True),
    ("loss of rocks", "loss_rocks", "nats", False),
    ("its change", "loss_rocks_change", "nats", True),
    ("loss of the rest", "loss_rest", "nats", False),
    ("its change", "loss_rest_change", "nats", True),
    ("tokens × at equal steps", "spent_ratio", "nats", False),
    ("changed tokens", "bite_tokens", "share", False),
    ("changed loss", "bite_loss", "share", False),
    ("end tokens dropped", "end_dropped", "share", False),
    ("steps to uniform's accuracy", "steps_to", "count", True),
    ("seconds", "seconds_to", "count", True),
    ("tokens", "tokens_to", "count", True),
)


def footprints_table(facts: Facts) -> Table:
    """Footprints of every definition and control, side by side."""
    rows = facts.rows("footprints")
    names = [row["name"] for row in rows]
    shares = {
        "of positions": "share_positions",
        "median rollout": "share_positions_median",
        "of loss": "share_loss",
        "of gradient norm": "share_grad",
    }
    columns = [
        Column("set", "set"),
        Column("types", "num_types", number, {"digits": 0}),
        Column("of types", "share_types", percent),
        *(Column(title, key, percent, interval=True) for title, key in shares.items()),
        Column("enrichment", "enrichment", number, interval=True),
    ]
    named = [{**row, "set": row["name"].replace("_", ", matched on ")} for row in rows]
    chosen = names.index(facts.definition) if facts.definition in names else None
    return Table(columns, named, name="footprints", chosen=chosen)


def types_table(facts: Facts, *, rocks: bool = False) -> Table:
    """Rocks, or the other costly types: what each costs, whether it learns, what banning it does, and the decision."""
    kinds = ("learning", "unclear", "costly", "not yet")
    costly = [row for row in facts.types if str(row.get("class")).startswith(kinds)]
    types = facts.rocks if rocks else [row for row in costly if row["token_id"] not in facts.rock_ids]
    verdicts, decided, rows = verdicts_by_token(facts), {}, []
    for row in bypass(facts).get("decisions") or []:
        if isinstance(row, dict) and isinstance(row.get("token_id"), int) and row.get("decision"):
            decided[row["token_id"]] = row["decision"], row.get("why") or row.get("reason")
    for row in types:
        census = verdicts.get(row["token_id"], {})
        confirmed = {True: ", confirmed", False: ", not confirmed"}.get(row.get("confirmed"), "")  # type: ignore[arg-type]
        rows.append(
            {
                **row,
                "losses": f"{number(row.get('loss_pre'), 3)} → {number(row.get('loss_post'), 3)}",
                "class": f"{row['class']}{confirmed}" if row.get("class") else None,
                "verdict": census.get("verdict"),
                **{f"delta{end}": census.get(f"delta{end}") for end in ("", "_low", "_high")},
                **dict(zip(("decision", "why"), decided.get(row["token_id"], ()))),
            }
        )
    columns = [
        Column("token", "token", token=True),
        Column("class", "class"),
        Column("decision", "decision"),
        Column("fall", "fall", percent, {"digits": 0}, interval=True),
        Column("loss before → after", "losses", text),
        Column("banned at inference", "verdict"),
        Column("Δ, points", "delta", points, interval=True),
        Column("kind", "cluster"),
        Column("count", "count", number, {"digits": 0}),
        Column("burden R", "r", number, {"digits": 1}, interval=True),
        Column("id", "token_id", text),
        Column("why", "why"),
    ]
    # What no row can fill is no column.
    shown = [item for item in columns if any(row.get(item.key) is not None for row in rows)]
    return Table(shown, rows, name="rocks" if rocks else "costly", ids="token_id", limit=ROCK_ROWS)


def census_table(facts: Facts) -> Table:
    """Every candidate of the census, rocks marked."""
    rows = []
    for row in census_rows(facts):
        members: list[int] = row.get("members") or []
        floor = row.get("placebo_floor")
        rows.append(
            {
                **row,
                "single": members[0] if len(members) == 1 else None,
                "id": str(members[0]) if len(members) == 1 else NONE,
                "rock": "◆ rock" if members and all(token_id in facts.rock_ids for token_id in members) else "",
                "floor": None if floor is None else 100 * floor,
            }
        )
    columns = [
        Column("banned", "token", token=True),
        Column("verdict", "verdict"),
        Column("Δ, points", "delta", points, interval=True),
        Column("rock?", "rock"),
        Column("used in", "used_share", percent),
        Column("noise floor", "floor", number, {"digits": 1}),
        Column("kind", "kind"),
        Column("id", "id", text),
    ]
    return Table(columns, rows, name="census", ids="single")


def regimes_table(facts: Facts) -> Table:
    """What the comparison found for every regime. Seconds only where they have an interval; compute in FLOPs."""
    rows = []
    for regime, row in finals(facts).items():
        base, seconds = regime == "uniform", estimate(row, "seconds_ratio")
        timed = not base and seconds is not None and seconds.low == seconds.low
        rows.append(
            {
                **row,
                "regime": regime,
                "verdict": None if base else row.get("verdict"),
                "delta": None if base else row.get("delta"),
                "seconds": interval(seconds) if timed else NONE,
                "ceiling": f"{number(row['ceiling'])} ×" if row.get("ceiling") else NONE,
            }
        )
    columns = [
        Column("regime", "regime"),
        Column("accuracy is", "verdict"),
        Column("change, points", "delta", points, interval=True),
        Column("accuracy", "accuracy", percent, interval=True),
        Column("FLOPs ×", "flops_ratio", number, {"digits": 3}),
        Column("seconds ×", "seconds", text),
        Column("kept", "kept_share", percent),
        Column("ceiling", "ceiling", text),
        Column("seeds", "num_seeds", number, {"digits": 0}),
    ]
    return Table(columns, rows, name="regimes")


def measured_table(facts: Facts) -> Table:
    """What else the comparison measured: at equal seconds and tokens, losses, and what a regime changed."""
    form: dict[str, tuple[Any, dict[str, int]]] = {
        "points": (points, {}),
        "nats": (number, {"digits": 3}),
        "share": (percent, {}),
        "count": (number, {"digits": 0}),
    }
    columns = [Column("regime", "regime")]
    for header, key, kind, interval_ in MEASURED:
        columns.append(Column(header, key, *form[kind], interval=interval_))
    rows = [{**row, "regime": regime} for regime, row in finals(facts).items()]
    return Table(
        [item for item in columns if any(row.get(item.key) is not None for row in rows)], rows, name="measured"
    )
