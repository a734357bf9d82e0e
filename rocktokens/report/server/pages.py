"""The pages that `rocktokens view` makes itself: the list of runs, and two runs side by side. No scripts.

Two runs are compared by what both hold: rock sets by token text (two pairs may number their tokens differently),
footprints and accuracies with their intervals.
"""

from __future__ import annotations

from html import escape
from typing import Any
from urllib.parse import quote

import numpy as np

from rocktokens.core.stats import Estimate, mean_estimate
from rocktokens.report.conclusions.run import answer
from rocktokens.report.figures.compare import finals
from rocktokens.report.figures.detect import SHARES, footprint_row
from rocktokens.report.formats import NONE, code, interval, number, percent, plural, prose, visible
from rocktokens.report.html.page import resource, table_html
from rocktokens.report.run_facts import Facts, estimate


def shell(title: str, body: str) -> str:
    """A page in the report's own dress; the reader's system decides between light and dark."""
    css = resource("report.css")
    dark = css.split('[data-theme="dark"] {', 1)[1].split("}", 1)[0]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{css}@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"
        ".shell { grid-template-columns: minmax(0, 64rem); } .pair { display: flex; flex-wrap: wrap; gap: 0 2.5rem; } "
        ".pair div { flex: 1 1 18rem; min-width: 0; } .pair ol { padding-left: 1.2rem; }</style></head>"
        f'<body><div class="shell"><main><header><p class="brand">rocktokens</p><h1>{escape(title)}</h1></header>'
        f"{body}</main></div></body></html>"
    )


def message_page(title: str, text: str) -> str:
    """One sentence."""
    return shell(title, f'<section><p>{escape(visible(text))}</p><p><a href="/">All runs</a></p></section>')


def index_page(folder: str, runs: dict[str, Facts], have: dict[str, bool]) -> str:
    """The runs of a folder, and a choice of two to compare."""
    rows = []
    for name, facts in runs.items():
        row = footprint_row(facts) if facts.types else {}
        link = f"<bdi>{escape(visible(name))}</bdi>"
        link = f'<a href="/run/{quote(name)}/report.html">{link}</a>' if have[name] else f"{link} (no report yet)"
        student, teacher = facts.pair
        rows.append(
            [
                link,
                f"<bdi>{escape(student)}</bdi> / <bdi>{escape(teacher)}</bdi>",
                str(len(facts.rocks)) if facts.types else NONE,
                interval(estimate(row, "share_positions"), percent),
                interval(estimate(row, "share_loss"), percent),
                interval(estimate(row, "enrichment")),
                _accuracy(facts),
                escape(", ".join(facts.not_run)) or "none",
            ]
        )
    header = ["run", "student / teacher", "rocks", "of positions", "of loss", "enrichment", "accuracy", "not run"]
    table = table_html(header, rows, left=(0, 1, 7))
    return shell(
        f"Runs in {visible(folder)}", f"<section><h2>{plural(len(runs), 'run')}</h2>{table}</section>{_chooser(runs)}"
    )


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
    if len(share_P) < 2 or np.ptp(share_P) == 0:
        value = float(share_P.mean()) if len(share_P) else None
        return None if value is None else Estimate(value, float("nan"), float("nan"), len(share_P))
    return mean_estimate(share_P, rng=np.random.default_rng(0))


def _accuracy(facts: Facts) -> str:
    return interval(sampled_accuracy(facts), percent)


def overlap(a: Facts, b: Facts) -> dict[str, Any]:
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
    return shell(
        f"{names[0]} and {names[1]}",
        f"<section><h2>Rock sets</h2><p>{escape(said)}</p>{sets}</section>"
        f"<section><h2>Footprints</h2>{table_html(header, _footprint_rows(a, b))}</section>"
        f"<section><h2>Accuracy</h2>{table_html(header, _accuracy_rows(a, b))}</section>"
        f'<section><h2>The answers</h2><div class="pair">{answers}</div></section><p><a href="/">All runs</a></p>',
    )


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
