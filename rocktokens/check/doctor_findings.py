"""What a check of the doctor says: a verdict, a number, a sentence and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["fine", "note", "wrong", "not checked"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    number: str
    """What was measured, with its unit; empty where nothing could be."""
    sentence: str
    remedy: str = ""


def fine(check: str, number: str, sentence: str) -> Finding:
    """Nothing wrong."""
    return Finding(check, "fine", number, sentence)


def note(check: str, number: str, sentence: str, remedy: str = "") -> Finding:
    """Worth knowing, but no fault."""
    return Finding(check, "note", number, sentence, remedy)


def wrong(check: str, number: str, sentence: str, remedy: str) -> Finding:
    """A fault that spoils distillation."""
    return Finding(check, "wrong", number, sentence, remedy)


def unknown(check: str, why: str) -> Finding:
    """What could not be checked, and why."""
    return Finding(check, "not checked", "", why)
