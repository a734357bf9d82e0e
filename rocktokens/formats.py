"""How numbers, tokens and tables are written: formats, visible forms of invisible characters, CSV.

Token texts come from a tokenizer and prompts from strangers: nothing in this module trusts them. What a browser would
hide or act upon is shown by its code point, and markup is escaped by whoever puts text into HTML.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from rocktokens.stats import Estimate

NBSP = "\u00a0"
MINUS = "\u2212"
NONE = "–"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_JOINER = 0x200D
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals, a true minus sign, and thousands apart; a dash for nothing."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:,.{digits}f}".replace(",", "\u202f")
    if float(f"{value:.{digits}f}") == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def significant(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return number(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return NONE if value is None or not math.isfinite(value) else f"{number(100 * value, digits)}{NBSP}%"


def points(value: float | None, digits: int = 1, *, signed: bool = True) -> str:
    """A change of a share in percentage points, by default with its sign."""
    if value is None or not math.isfinite(value):
        return NONE
    text = number(100 * value, digits)
    return f"+{text}" if signed and float(f"{100 * value:.{digits}f}") > 0 else text


def p_value(value: float | None) -> str:
    """A p value; tiny ones as a bound."""
    if value is None or not math.isfinite(value):
        return NONE
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def bracket(estimate: Estimate | None, form: Any = number, **options: Any) -> str:
    """The interval alone; nothing where there is none."""
    if estimate is None or not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return ""
    ends = [form(end, **options).removesuffix(f"{NBSP}%") for end in (estimate.low, estimate.high)]
    return f"[{ends[0]}, {ends[1]}]"


def interval(estimate: Estimate | None, form: Any = number, **options: Any) -> str:
    """A value with its interval."""
    if estimate is None:
        return NONE
    ends = bracket(estimate, form, **options)
    return form(estimate.value, **options) + (f" {ends}" if ends else "")


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count with its noun."""
    return f"{count:,}".replace(",", "\u202f") + " " + (noun if count == 1 else many or noun + "s")


def listed(words: Sequence[str], limit: int = 12) -> str:
    """Words as a list in a sentence; the rest counted."""
    shown = list(words[:limit])
    rest = len(words) - len(shown)
    if rest:
        return ", ".join(shown) + f" and {rest} more"
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1] if shown else ""


def at_home(text: str) -> str:
    """The same with `~` for the reader's home directory: reports are passed on, and whose machine it was is no finding.

    Only where a path begins, so that a shell still expands it; within quotes it would not.
    """
    home = re.escape(str(Path.home()).rstrip("/"))
    return re.sub(rf"(?:^|(?<=\s)){home}(?=/|\s|$)", "~", text) if home else text


def visible(token: str, *, flow: bool = False) -> str:
    """A token so that nothing in it is hidden or acts: controls as pictures, direction marks by code point.

    `flow`: as it stands in running text, where spaces stay spaces and a line break also breaks the line.
    """
    if token == "":
        return "" if flow else "∅"
    out = []
    for place, letter in enumerate(token):
        code = ord(letter)
        if letter == "\n":
            out.append("↵\n" if flow else "↵")
        elif letter == "\t":
            out.append("⇥\t" if flow else "⇥")
        elif letter == " ":
            out.append(" ")
        elif code < 0x20:
            out.append(chr(0x2400 + code))
        elif code == 0x7F:
            out.append("\u2421")
        elif code == _JOINER and _pictured(token[place - 1 : place]) and _pictured(token[place + 1 : place + 2]):
            out.append(letter)  # holds one emoji together
        elif unicodedata.category(letter) in _HIDDEN or (letter.isspace() and letter != "\u00a0"):
            out.append(f"⟨U+{code:04X}⟩")
        else:
            out.append(letter)
    if not flow:
        text = "".join(out)
        bare = text.strip(" ")
        lead, tail = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
        return "␣" * len(text) if not bare else "␣" * lead + bare + "␣" * tail
    return "◌" + "".join(out) if unicodedata.combining(token[0]) else "".join(out)


def _pictured(letter: str) -> bool:
    return bool(letter) and unicodedata.category(letter) in ("So", "Sk", "Mn")


def code(token: str) -> str:
    """A token as HTML, isolated from the direction of the text round it."""
    return f"<code><bdi>{escape(visible(token))}</bdi></code>"


def prose(sentence: str) -> str:
    """A sentence as HTML: `commands` and “tokens” set as code."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(sentence, quote=False))
    return re.sub(r"“([^”]*)”", r"<code><bdi>\1</bdi></code>", text)


def label(token: str, limit: int = 18) -> str:
    """Text of a run inside a chart, e.g. a token: Plotly reads a few tags, so they are escaped; long ones are cut."""
    text = visible(token)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    # Plotly resolves entities once; a bare $…$ would be read as TeX where MathJax is loaded, and the page takes a text
    # that begins with @ for the name of a colour.
    return escape(text, quote=False).replace("$", "&#36;").replace("@", "&#64;")


def to_csv(table: pa.Table) -> str:
    """A table as CSV. Text that a spreadsheet would run, or that holds control characters, is written as JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in zip(*(column.to_pylist() for column in table.columns)):
        writer.writerow([_cell(value) for value in row])
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str) and (
        value.startswith(_FORMULA) or any(c in value for c in "\x00\r\n") or value != value.strip()
    ):
        return json.dumps(value)
    return value
