"""From figures and sentences to one self-contained HTML page, by jinja2 templates that escape what they are given.

Scripts and styles are allowed by their hash alone and a report may open no connection, so text from a tokenizer or a
prompt can neither run nor leave, whatever it is. Everything a page holds follows from the run: the same run, the same
bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rocktokens.facts import Facts
from rocktokens.report.conclusions import TONES, verdict
from rocktokens.report.tables import census_table, footprints_table, measured_table, regimes_table, types_table
from rocktokens.show import Figure, at_home, interval, percent, plural, significant, to_csv, visible
from rocktokens.values import Json, Row

REPORT = "report.html"
EMBED_CSV_BYTES = 150_000
CHIPS = 24
MAX_VALUE = 2_000
# Section → (title, its figures). A section without anything to show is left out.
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "verdict": ("Verdict", ()),
    "viewer": ("Read the rollouts", ()),
    "cost": ("What they cost", ("footprint", "funnel", "clusters")),
    "learn": ("Do they learn", ("training_loss", "persistence", "gradients", "alignment")),
    "needed": ("Does the student need them", ("knockouts", "grafts")),
    "without": ("What training without them does", ("accuracy_tokens",)),
    "appendix": ("Appendix", ("sensitivity", "time")),
}
GLOSSARY = {
    "loss": "Reverse KL of a sampled token in nats, from full distributions in float32: the student samples, and "
    "student and teacher are scored on the same prefixes at every kept checkpoint.",
    "rock": "A token type whose loss is high before and after distillation. Rocks are chosen on one half of the "
    "prompts; every number about them is measured on the other half, with 95 % intervals over prompts.",
    "certified, confirmed": "Certified: declared by tests that bound the share of false rocks. Confirmed: the other "
    "half of the prompts says the same.",
    "burden R": "The total loss of a token type, nats.",
    "enrichment": "Share of the loss over share of the positions; 1 means merely frequent.",
    "knock-out, census": "A knock-out bans a token at inference and resumes the baseline where it was first used. The "
    "census bans every candidate in turn. A placebo resumes at the same places with nothing banned: the noise floor.",
    "ε, proven neutral": "The largest change of accuracy that does not matter. Neutral is proven by an equivalence "
    "test within ±ε, never assumed.",
    "pillar, stumbling block": "A token that the student needs (banning it costs accuracy), or that hurts it.",
    "graft": "The teacher draws the token in the student's place: what learning it perfectly would gain.",
    "bypass list": "The rocks that are proven neutral and that training may skip.",
    "regime, freeze": "A way of training on part of the tokens; freeze gives the tokens of the bypass list no loss.",
    "ceiling": "The largest speed-up that leaving tokens out could give: one over the kept share.",
}
LEVELS = (0.01, 0.03, 0.1, 0.3, 1, 3)
"""Nats at which a token's colour changes, as in the viewer."""
SAMPLE_TOKENS = 110  # of the rollout on the first screen

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'"
# What only a header can say, a page's own element cannot: nobody may show the page inside theirs.
UNFRAMED = "frame-ancestors 'none'"
DATA_POLICY = f"{NOTHING}; {UNFRAMED}; sandbox"


def resource(name: str) -> str:
    """A file of this package."""
    return resources.files("rocktokens.report").joinpath(name).read_text(encoding="utf-8")


@cache
def templates() -> Environment:
    """The templates of the report and of the pages that `view` makes."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"prose": prose, "visible": visible, "interval": interval, "plural": plural}
    found.globals |= {"percent": percent, "chips": CHIPS, "tones": TONES}
    return found


def prose(sentence: str) -> Markup:
    """A sentence as HTML: `commands` and “tokens” set as code."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(sentence)))
    return Markup(re.sub(r"“([^”]*)”", r"<code><bdi>\1</bdi></code>", text))


# What a page may run, load and send


def content_hash(text: str) -> str:
    """How a policy names an inline script or stylesheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_policy(scripts: Sequence[str], style: str, *, more: str = "") -> str:
    """A page with these scripts and this stylesheet; nothing else is run, fetched, framed or sent."""
    return f"{NOTHING}; script-src {' '.join(map(content_hash, scripts))}; style-src {content_hash(style)}{more}"


@cache
def own_policy() -> str:
    """The policy of every report that this version writes; `view` sends it as a header too.

    Plotly adds an empty style element, which has a hash too, and fills it through the document's own interface.
    """
    more = f" {content_hash('')}; img-src data: blob:"
    return page_policy([plotly_script(), *report_scripts()], resource("report.css"), more=more)


@cache
def plotly_script() -> str:
    """Plotly's own bundle, as it ships with the Python package."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


def report_scripts() -> list[str]:
    """The report's own scripts, in the order of the page."""
    return [resource(f"{name}.js") for name in ("charts", "tables", "viewer")]


@lru_cache(maxsize=2)  # Plotly's bundle takes a second, and is the same in every report
def packed(text: str) -> str:
    """Text as the page carries it: gzip, then base64; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no < > & and no line separators in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


# The report


def page(facts: Facts, figures: list[Figure], viewer: Json | None) -> str:
    """The whole report."""
    found, shown = verdict(facts), {}
    for figure in figures:  # its rows travel inside the page if they are few, else lie in a file next to it
        rows = to_csv(figure.rows).encode()
        embedded = "data:text/csv;charset=utf-8;base64," + base64.b64encode(rows).decode()
        href = embedded if len(rows) <= EMBED_CSV_BYTES else f"figures/{figure.name}.csv"
        shown[figure.name] = {"figure": figure, "href": href}
    tables = {
        "cost": {"": types_table(facts, rocks=True), "Costly, but not proven to be rocks": types_table(facts)},
        "needed": {"": census_table(facts)},
        "without": {"": regimes_table(facts)},
        "appendix": {
            "Footprints of every definition and control": footprints_table(facts),
            "Everything the comparison measured": measured_table(facts),
        },
    }
    tables = {name: {title: table for title, table in own.items() if table.data} for name, own in tables.items()}
    sections = {}
    for name, (title, names) in SECTIONS.items():
        own = [shown[figure] for figure in names if figure in shown]
        if own or tables.get(name) or name in ("verdict", "appendix") or (name == "viewer" and viewer is not None):
            sections[name] = {"title": title, "figures": own, "tables": tables.get(name, {})}
    detect, compared, needed = facts.stage("detect"), facts.stage("compare"), found.tiles[2]
    counts = {"rollout": facts.stage("sample").get("rollouts"), "prompt": detect.get("num_prompts")}
    sizes = [plural(count, noun) for noun, count in counts.items() if count]
    if len(facts.steps) > 1:
        sizes.append(f"checkpoints {', '.join(map(str, facts.steps))}")
    return (
        templates()
        .get_template(REPORT)
        .render(
            csp=own_policy(),
            css=Markup(resource("report.css")),
            scripts=[Markup(script) for script in report_scripts()],
            plotly=Markup(packed(plotly_script())),
            data=Markup(as_json({"figures": [figure.spec() for figure in figures]})),
            viewer_packed="" if viewer is None else Markup(packed(as_json(viewer))),
            sections=sections,
            facts=facts,
            found=found,
            sizes=sizes,
            sample=_sample(viewer),
            says={
                "needed": [f"{needed.value}, {needed.answer}. {needed.detail}"],
                "without": [*compared.get("verdicts", ()), compared.get("estimators", "")],
            },
            glossary=GLOSSARY,
            **appendix(facts),
            **viewer_values(viewer),
        )
    )


def viewer_values(viewer: Row | None, part: str | None = None) -> Json:
    """What the viewer's template shows; its data travel apart, compressed. `part` says which rollouts these are."""
    if part is None and viewer is not None:
        shown, total = len(viewer["rollouts"]), viewer["total"]
        part = f"{shown} of {plural(total, 'rollout')}, taken evenly over the run; `rocktokens view` pages through all"
        part = f"All {total} rollouts" if shown == total else f"{part} of them"
    return {"part": part, "levels": ["< 0.01", "0.01", "0.03", "0.1", "0.3", "1", "≥ 3"]}


def _sample(viewer: Json | None) -> list[tuple[str, int, bool]]:
    """The rollout of the first screen, the one with most rocks among the first few: (text, colour, rock) by token."""
    shown = [] if viewer is None else [row for row in viewer["rollouts"][:12] if row["columns"].get("kl")]
    if viewer is None or not shown:
        return []
    cut = [list(zip(row["tokens"], row["columns"]["kl"]))[:SAMPLE_TOKENS] for row in shown]
    best = max(cut, key=lambda pairs: sum(viewer["types"][place]["rock"] for place, _ in pairs))
    types = [(viewer["types"][place], cost or 0.0) for place, cost in best]
    return [(own["flow"], sum(cost >= edge for edge in LEVELS), own["rock"]) for own, cost in types]


def appendix(facts: Facts) -> Json:
    """Notes of the stages, and every recorded value by section, without the reader's home directory."""
    notes = [str(note) for stage in facts.stages for note in facts.stage(stage).get("notes") or []]
    detect = facts.stage("detect")
    values = {
        "Thresholds": {**(detect.get("thresholds") or {}), **{name: detect.get(name) for name in ("k", "signal")}},
        **{f"Settings: {name}": facts.config[name] for name in sorted(facts.config)},
        "Versions": facts.run.manifest.get("versions", {}),
        **{f"Stage: {name}": facts.stage(name) for name in facts.stages},
    }
    shown: dict[str, dict[str, str]] = {}
    for name, own in values.items():
        known = {
            key: value for key, value in (own if isinstance(own, dict) else {name: own}).items() if value is not None
        }
        shown[visible(name)] = {
            visible(str(key)): significant(value) if isinstance(value, float) else at_home(visible(str(value)))
            for key, value in known.items()
            if len(str(value)) < MAX_VALUE  # a list of every token id tells a reader nothing
        }
    return {"notes": [visible(note) for note in dict.fromkeys([*notes, *facts.notes])], "values": shown}
