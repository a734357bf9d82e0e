"""All rollouts of a run, a page at a time, in the report's own viewer; read from Parquet when they are asked for."""

from __future__ import annotations

from html import escape

from rocktokens.facts import Facts
from rocktokens.report.page import as_json, packed, resource, served_style, viewer_html
from rocktokens.report.viewer import payload, rollout_list
from rocktokens.report.viewer_tokens import Decode
from rocktokens.show import plural, visible

PER_PAGE = 50


def rollouts_page(facts: Facts, page: int, decode: Decode | None) -> tuple[str, str] | None:
    """(the page, its one script) with rollouts 50 × page … of the run; None where there is nothing to show."""
    everything = rollout_list(facts) if facts.columns("rollouts") else []
    last = max(0, (len(everything) - 1) // PER_PAGE)
    page = min(max(page, 0), last)
    names = [row["rollout_id"] for row in everything[page * PER_PAGE : (page + 1) * PER_PAGE]]
    found = payload(facts, decode, names=names) if names else None
    if found is None:
        return None
    script = resource("viewer.js")
    title = f"Rollouts of {visible(facts.name)}"
    part = "The rollouts in the order of the table; the most probable tokens were kept for those that the report shows"
    first, end = page * PER_PAGE + 1, page * PER_PAGE + len(names)
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{served_style()}</style>"
        '</head><body><div class="shell live"><main><header><p class="brand">rocktokens <span class="links">'
        '<a href="report.html">Report</a> <a href="live">Live</a> <a href="/">Runs</a></span></p>'
        f"<h1>{escape(title)}</h1><p>{plural(len(everything), 'rollout')}, {first} to {end} on this page. "
        f'{_links(page, last)}</p></header><section id="viewer">{viewer_html(found, part)}</section></main></div>'
        f'<script type="text/plain" id="viewer-packed">{packed(as_json(found))}</script><script>{script}</script>'
        "</body></html>"
    )
    return html, script


def _links(page: int, last: int) -> str:
    places = sorted({0, max(0, page - 1), page, min(last, page + 1), last})
    return " ".join(
        f"<strong>{place + 1}</strong>"
        if place == page
        else f'<a href="rollouts?page={place + 1}">page {place + 1}</a>'
        for place in places
    )
