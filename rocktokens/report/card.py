"""The first screen: the verdict's line, its four tiles, and the accuracies before, after and of the teacher."""

from __future__ import annotations

from html import escape

from rocktokens.facts import STAGES, Facts
from rocktokens.report.evidence import all_accuracies
from rocktokens.report.tables import chip, table_html
from rocktokens.report.verdict import Accuracy, Tile, Verdict
from rocktokens.show import interval, percent, prose

CHIPS = 24
LABELS = {
    "skip": "Skip them",
    "keep": "Keep them",
    "no rocks": "No rocks",
    "unstable": "Unstable",
    "cannot tell": "Cannot tell",
    "not run": "Not tested",
    "imported": "Imported run",
}


def card_html(facts: Facts, found: Verdict) -> str:
    """The whole card."""
    label = f'<span class="badge {found.tone}">{LABELS[found.state]}</span>'
    tiles = "".join(_tile(facts, tile) for tile in found.tiles)
    return (
        f'<div class="card" data-state="{found.state}"><p class="line">{label} {prose(found.line)}</p>'
        f'<div class="tiles">{tiles}</div>{_accuracies(found.accuracies)}</div>'
    )


def _tile(facts: Facts, tile: Tile) -> str:
    chips = ""
    if tile.name == "which" and facts.rocks:
        shown = "".join(f"<li>{chip(row['token'], row['token_id'])}</li>" for row in facts.rocks[:CHIPS])
        rest = len(facts.rocks) - CHIPS
        more = f'<li><a href="#rocks">and {rest} more</a></li>' if rest > 0 else ""
        chips = f'<ul class="chips" aria-label="Rocks">{shown}{more}</ul>'
    ask = f'<p class="ask">Run <code class="paste">{escape(tile.command)}</code></p>' if tile.command else ""
    return (
        f'<div class="tile" data-tile="{tile.name}"><h3>{escape(tile.question)}</h3>'
        f'<p class="value">{escape(tile.value)}</p><p><span class="badge {tile.tone}">{escape(tile.chip)}</span></p>'
        f'{chips}<p class="detail">{prose(tile.detail)}</p>{ask}</div>'
    )


def _accuracies(found: tuple[Accuracy, ...]) -> str:
    """Before → after → teacher, as words and as a line from 0 to 100 %."""
    if not found:
        return '<p class="note accuracy">Whether distillation worked is not known: no answers were checked.</p>'
    words = {"before": "before distillation", "after": "after", "teacher": "teacher"}
    steps = ' <span class="arrow">→</span> '.join(
        f'<span class="step {item.name}"><strong>{interval(item.value, percent)}</strong> {words[item.name]}</span>'
        for item in found
    )
    marks = "".join(_mark(item) for item in found)
    picture = (
        '<svg class="strip" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="Accuracies from 0 to '
        f'100 %"><line class="axis" x1="0" x2="100" y1="3" y2="3"/>{marks}</svg>'
    )
    return f'<div class="accuracy"><p>Accuracy: {steps}</p>{picture}</div>'


def _mark(item: Accuracy) -> str:
    value, low, high = (100 * end for end in item.value[:3])
    reach = ""
    if low == low and high == high:
        reach = f'<line class="reach {item.name}" x1="{low:.2f}" x2="{high:.2f}" y1="3" y2="3"/>'
    return f'{reach}<line class="mark {item.name}" x1="{value:.2f}" x2="{value:.2f}" y1="0.6" y2="5.4"/>'


def answer_html(facts: Facts, sentences: list[str]) -> str:
    """The answer in sentences, every accuracy explained, and what was not run."""
    items = "".join(f"<li>{prose(sentence)}</li>" for sentence in sentences)
    missing = facts.not_run
    left = ""
    if missing:
        named = ", ".join(f"<code>{name}</code> ({escape(STAGES[name][1])})" for name in missing)
        left = f'<p class="note" id="not-run">Not run, and so not in this report: {named}.</p>'
    return f'<ol class="answer">{items}</ol>{left}{_explained(facts)}'


def _explained(facts: Facts) -> str:
    found = all_accuracies(facts)
    if len(found) < 2:
        return ""
    rows = [[escape(name), interval(value, percent), prose(where)] for name, value, where in found]
    table = table_html(["accuracy of", "value", "measured on"], rows, left=(0, 2), name="accuracies")
    note = "Each stage holds out prompts of its own, so that no stage is judged on what another one chose."
    title = f"Why this run has {len(found)} accuracies"
    return f'<details id="accuracies"><summary>{title}</summary><p class="note">{note}</p>{table}</details>'
