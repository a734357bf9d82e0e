"""The pages that `rocktokens view` makes itself: the list of runs, and two runs side by side.

Two runs are compared by what both hold: rock sets by token text (two pairs may number their tokens differently),
footprints and accuracies with their intervals.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rocktokens.accuracy import accuracy_estimate
from rocktokens.compare.figures import finals
from rocktokens.detect.figures import SHARES, footprint_row
from rocktokens.errors import RockTokensError
from rocktokens.facts import Facts, understood
from rocktokens.report.card import LABELS
from rocktokens.report.evidence import comparison
from rocktokens.report.page import own_policy, resource, served_style
from rocktokens.report.run_conclusions import answer
from rocktokens.report.tables import table_html
from rocktokens.report.verdict import verdict
from rocktokens.run import MANIFEST
from rocktokens.show import NONE, at_home, code, estimate, interval, number, percent, plural, points, prose, visible
from rocktokens.stats import Estimate
from rocktokens.values import Json, Row

CARDS = 24
REPORT, TIMES = "report.html", "times.json"
TABLES_SCRIPT = resource("tables.js")
"""The one script of these pages: tables that sort, filter and copy."""
PAGE_STYLE = served_style() + (
    ".shell { grid-template-columns: minmax(0, 64rem); } .pair { display: flex; flex-wrap: wrap; gap: 0 2.5rem; } "
    ".pair div { flex: 1 1 18rem; min-width: 0; } .pair ol { padding-left: 1.2rem; } "
    ".plain { padding-left: 1.1rem; margin: .3rem 0; font-size: .88rem; }"
)


def shell(title: str, body: str) -> str:
    """A page with the report's stylesheet; the reader's system decides between light and dark."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head>"
        f'<body><div class="shell"><main><header><p class="brand">rocktokens</p><h1>{escape(title)}</h1></header>'
        f"{body}</main></div><script>{TABLES_SCRIPT}</script></body></html>"
    )


def of_another(html: bytes, run: Path) -> bytes:
    """A run's report as it is served: one whose scripts are not this version's says so, since they will not run."""
    if escape(own_policy()).encode() in html[:20_000]:
        return html
    said = (
        "<p>This report was not written by this version of rocktokens, so its scripts are not run and its charts stay "
        f"empty. <code>rocktokens report {escape(shlex.quote(at_home(str(run))))} --again</code> makes it again.</p>"
    )
    return re.sub(rb"(<body[^>]*>)|$", lambda found: found[0] + said.encode(), html, count=1)


def message_page(title: str, text: str) -> str:
    """One sentence."""
    return shell(title, f'<section><p>{escape(visible(text))}</p><p><a href="/">All runs</a></p></section>')


def index_page(folder: str, runs: dict[str, Facts], have: dict[str, bool]) -> str:
    """The runs of a folder: a card and a row each, a chart over them, and a choice of two to compare."""
    rows, cards, failed = [], [], []
    shown: dict[str, Facts] = {}
    for name, facts in runs.items():
        try:
            with understood(facts.run.path):
                rows.append(_row(name, facts, have[name]))
                cards.append(small_card(name, facts, have[name]))
                charts_over({name: facts, f"{name}'": facts})
        except RockTokensError as error:  # one run that cannot be shown must not hide the others
            del rows[len(shown) :], cards[len(shown) :]
            failed.append(f"<li><bdi>{escape(visible(name))}</bdi>: {escape(visible(str(error)))}</li>")
        else:
            shown[name] = facts
    header = ["run", "verdict", "last change", "took", "rocks", "of loss", "of positions", "enrichment", "accuracy"]
    header += ["student / teacher", "not run"]
    table = table_html(header, rows, left=(0, 1, 2, 9, 10), name="runs")
    left_out = f'<h3>Cannot be shown</h3><ul class="plain">{"".join(failed)}</ul>' if failed else ""
    return shell(
        f"Runs in {visible(folder)}",
        f"<section><h2>{plural(len(shown), 'run')}</h2>{table}{left_out}</section>"
        f'<section><h2>Verdicts</h2><div class="cards">{"".join(cards[:CARDS])}</div></section>'
        f"{charts_over(shown)}{_chooser(shown)}",
    )


def _row(name: str, facts: Facts, has_report: bool) -> list[str]:
    """A run's line in the list."""
    row = footprint_row(facts) if facts.types else {}
    found = verdict(facts)
    student, teacher = facts.pair
    after = next((item.value for item in found.accuracies if item.name == "after"), None)
    return [
        _link(name, has_report),
        f'<span class="badge {found.tone}">{LABELS[found.state]}</span>',
        changed_on(facts),
        lasted(facts),
        str(len(facts.rocks)) if facts.types else NONE,
        interval(estimate(row, "share_loss"), percent),
        interval(estimate(row, "share_positions"), percent),
        interval(estimate(row, "enrichment")),
        interval(after, percent) if after else _accuracy(facts),
        f"<bdi>{escape(student)}</bdi> / <bdi>{escape(teacher)}</bdi>",
        escape(", ".join(facts.not_run)) or "none",
    ]


def _link(name: str, has_report: bool) -> str:
    text = f"<bdi>{escape(visible(name))}</bdi>"
    if has_report:
        return f'<a href="/run/{quote(name)}/report.html">{text}</a>'
    return f'<a href="/run/{quote(name)}/live">{text}</a> (no report yet)'


def small_card(name: str, facts: Facts, has_report: bool) -> str:
    """A run's verdict in a few lines, with the ways on."""
    found = verdict(facts)
    tiles = "".join(
        f"<li>{escape(tile.question)} <strong>{escape(tile.value)}</strong> "
        f'<span class="badge {tile.tone}">{escape(tile.chip)}</span></li>'
        for tile in found.tiles
    )
    at = f"/run/{quote(name)}"
    ways = [(f"{at}/report.html", "report")] if has_report else []
    ways += [(f"{at}/rollouts", "all rollouts"), (f"{at}/live", "live")]
    links = " ".join(f'<a href="{href}">{text}</a>' for href, text in ways)
    return (
        f'<div class="card" data-state="{found.state}"><h3><bdi>{escape(visible(name))}</bdi></h3>'
        f'<p class="line"><span class="badge {found.tone}">{LABELS[found.state]}</span> {prose(found.line)}</p>'
        f'<ul class="plain">{tiles}</ul><p class="note">{links}</p></div>'
    )


def changed_on(facts: Facts) -> str:
    """When the run's manifest was last written, in the reader's time zone."""
    written = (facts.run.path / MANIFEST).stat().st_mtime
    return datetime.fromtimestamp(written).strftime("%Y-%m-%d %H:%M")


def lasted(facts: Facts) -> str:
    """How long the stages took, where `study` recorded it."""
    try:
        seconds = json.loads((facts.run.path / TIMES).read_text(encoding="utf-8"))
        whole = round(sum(float(value) for value in seconds.values()))
    except (OSError, ValueError, AttributeError, TypeError):
        return NONE
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02d} min"


def charts_over(runs: dict[str, Facts]) -> str:
    """Share of the loss, accuracy and the change without the rocks, run by run, with their intervals."""
    if len(runs) < 2:
        return ""
    wanted: list[tuple[str, Callable[[Facts], Estimate | None], bool]] = [
        ("share of the loss that the rocks carry, %", lambda f: estimate(_footprint(f), "share_loss"), False),
        ("accuracy after distillation, %", lambda f: _after(f), False),
        ("change of accuracy trained without them, points", lambda f: comparison(f).change, True),
    ]
    parts = []
    for title, measure, signed in wanted:
        found = [(name, item) for name, facts in runs.items() if (item := measure(facts)) is not None]
        if len(found) > 1:
            parts.append(f"<h3>{escape(title)}</h3>{_dots(found, signed)}")
    return f"<section><h2>Over the runs</h2>{''.join(parts)}</section>" if parts else ""


def _footprint(facts: Facts) -> Row:
    return footprint_row(facts) if facts.rocks else {}


def _after(facts: Facts) -> Estimate | None:
    return next((item.value for item in verdict(facts).accuracies if item.name == "after"), sampled_accuracy(facts))


def _dots(found: list[tuple[str, Estimate]], signed: bool) -> str:
    """One line per run: a mark and its interval."""
    ends = [100 * end for _, item in found for end in item[:3] if end == end]
    low, high = (min(0.0, *ends), max(0.0, *ends)) if signed else (0.0, max(100.0, *ends))
    reach = max(high - low, 1e-9)

    def x(value: float) -> float:
        return 190 + 500 * (100 * value - low) / reach

    lines = []
    for place, (name, item) in enumerate(found):
        y = 18 + 24 * place
        bar = ""
        if item.low == item.low:
            bar = f'<line class="line rest" x1="{x(item.low):.1f}" x2="{x(item.high):.1f}" y1="{y}" y2="{y}"/>'
        text = points(item.value) if signed else percent(item.value)
        lines.append(
            f'<text x="180" y="{y + 4}" class="end">{escape(visible(name))[:28]}</text>{bar}'
            f'<circle class="dot rock" cx="{x(item.value):.1f}" cy="{y}" r="4"><title>{text}</title></circle>'
        )
    zero = f'<line class="grid" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="4" y2="{24 * len(found) + 8}"/>'
    return f'<svg class="plot" viewBox="0 0 720 {24 * len(found) + 14}" role="img">{zero}{"".join(lines)}</svg>'


def _chooser(runs: dict[str, Facts]) -> str:
    if len(runs) < 2:
        return ""

    def select(name: str, chosen: int) -> str:
        options = "".join(
            f'<option value="{escape(run)}"{" selected" if place == chosen else ""}>{escape(visible(run))}</option>'
            for place, run in enumerate(runs)
        )
        return f'<label>Run {name.upper()} <select name="{name}">{options}</select></label>'

    return (
        '<section><h2>Compare two</h2><form action="/compare" method="get"><div class="filters">'
        f"{select('a', 0)}{select('b', 1)}</div><button>Side by side</button></form></section>"
    )


def sampled_accuracy(facts: Facts) -> Estimate | None:
    """Share of right answers among the sampled rollouts, with an interval over prompts."""
    if not {"prompt_id", "correct"} <= set(facts.columns("rollouts")):
        return None
    found = facts.query(
        "select avg(correct::int) as share from rollouts where correct is not null group by prompt_id order by share"
    )
    share_P = np.zeros(0) if found is None else found["share"].to_numpy()
    return accuracy_estimate(share_P, rng=np.random.default_rng(0)) if len(share_P) else None


def _accuracy(facts: Facts) -> str:
    return interval(sampled_accuracy(facts), percent)


def overlap(a: Facts, b: Facts) -> Json:
    """Rock sets of two runs by token text: shared, only in one, and their Jaccard overlap."""
    first, second = ([row["token"] for row in facts.rocks] for facts in (a, b))
    union = set(first) | set(second)
    shared = [token for token in first if token in set(second)]
    return {
        "shared": shared,
        "only_a": [token for token in first if token not in set(second)],
        "only_b": [token for token in second if token not in set(first)],
        "jaccard": len(set(shared)) / len(union) if union else None,
    }


def compare_page(a: Facts, b: Facts) -> str:
    """Two runs side by side."""
    found = overlap(a, b)
    names = [visible(a.name), visible(b.name)]
    sets = "".join(
        f"<h3>{escape(title)} ({len(found[key])})</h3>{_chips(found[key])}"
        for key, title in (("shared", "Rocks in both"), ("only_a", f"Only {names[0]}"), ("only_b", f"Only {names[1]}"))
    )
    said = (
        f"The rock sets share {plural(len(found['shared']), 'token')}: Jaccard {number(found['jaccard'])}."
        if found["jaccard"] is not None
        else "Neither run has rocks."
    )
    header = ["", *(f"<bdi>{escape(name)}</bdi>" for name in names)]
    answers = "".join(_answers(name, facts) for name, facts in zip(names, (a, b)))
    cards = "".join(small_card(facts.name, facts, (facts.run.path / REPORT).is_file()) for facts in (a, b))
    return shell(
        f"{names[0]} and {names[1]}",
        f'<section><h2>Verdicts</h2><div class="cards">{cards}</div></section>'
        f"<section><h2>Settings that differ</h2>{settings_diff(a, b)}</section>"
        f"<section><h2>Rock sets</h2><p>{escape(said)}</p>{sets}</section>"
        f"<section><h2>Footprints</h2>{table_html(header, _footprint_rows(a, b))}</section>"
        f"<section><h2>Accuracy</h2>{table_html(header, _accuracy_rows(a, b))}</section>"
        f'<section><h2>The answers</h2><div class="pair">{answers}</div></section><p><a href="/">All runs</a></p>',
    )


def settings_diff(a: Facts, b: Facts) -> str:
    """Settings that are not the same in both runs, by section and field."""

    def flat(prefix: str, values: Any) -> dict[str, str]:
        if not isinstance(values, dict):
            return {prefix: json.dumps(values, ensure_ascii=False)}
        found: dict[str, str] = {}
        for key, value in values.items():
            found |= flat(f"{prefix}.{key}" if prefix else str(key), value)
        return found

    ours, theirs = flat("", a.config), flat("", b.config)
    rows = [
        [
            escape(visible(key)),
            *(f"<bdi>{escape(at_home(visible(side.get(key, NONE))))}</bdi>" for side in (ours, theirs)),
        ]
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
    if not rows:
        return "<p>None: both were made with the same settings.</p>"
    header = ["setting", *(f"<bdi>{escape(visible(facts.name))}</bdi>" for facts in (a, b))]
    return table_html(header, rows, left=(0, 1, 2), name="settings")


def _answers(name: str, facts: Facts) -> str:
    said = "".join(f"<li>{prose(sentence)}</li>" for sentence in answer(facts))
    return f"<div><h3><bdi>{escape(name)}</bdi></h3><ol>{said}</ol></div>"


def _chips(tokens: list[str]) -> str:
    return '<ul class="chips">' + "".join(f"<li>{code(token)}</li>" for token in tokens) + "</ul>" if tokens else ""


def _footprint_rows(a: Facts, b: Facts) -> list[list[str]]:
    both = [footprint_row(facts) if facts.types else {} for facts in (a, b)]
    rows = [["definition", *(escape(facts.definition) if facts.types else NONE for facts in (a, b))]]
    rows.append(["rocks", *(str(row.get("num_types", NONE)) for row in both)])
    for key, title in SHARES:
        rows.append([f"share of {title}", *(interval(estimate(row, key), percent) for row in both)])
    rows.append(["enrichment", *(interval(estimate(row, "enrichment")) for row in both)])
    return rows


def _accuracy_rows(a: Facts, b: Facts) -> list[list[str]]:
    rows = [["sampled rollouts", _accuracy(a), _accuracy(b)]]
    last = [_last_evaluation(facts) for facts in (a, b)]
    rows.append(["end of training, held-out problems", *last])
    ends = [finals(facts) for facts in (a, b)]
    for regime in dict.fromkeys([*ends[0], *ends[1]]):
        cells = [interval(estimate(end.get(regime, {}), "accuracy"), percent) for end in ends]
        rows.append([f"regime {escape(regime)}", *cells])
    return rows


def _last_evaluation(facts: Facts) -> str:
    table = facts.table("training")
    if table is None or "accuracy" not in table.column_names:
        return NONE
    rows = [row for row in table.to_pylist() if row["accuracy"] is not None]
    return interval(estimate(rows[-1], "accuracy"), percent) if rows else NONE
