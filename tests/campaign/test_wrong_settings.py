"""Every field of the configuration tree × values that are wrong for it: one clear sentence, and no stage is lost."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from attacks import Account, attempt, chosen, copy_of, lost

from rocktokens.cli import stage_command, study_command
from rocktokens.run import open_run
from rocktokens.study import STAGES

FLOATS = ("nan", "inf", "-inf", "-1", "1e400", "abc", "")
INTEGERS = ("-1", "999999999999", "1.5", "abc", "inf", "9" * 5000)
TEXTS = ("\ud800", "x\0y", "nosuch", "a" * 5000)
COMMANDS = {**{name: stage_command(spec) for name, spec in STAGES.items()}, "study": study_command(short=False)}
LEFT_OUT = {"again", "recipe", "stages"}


def wrong_values(hint: Any) -> tuple[str, ...]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ("nosuch", "")
    if origin in (typing.Union, types.UnionType, typing.Annotated, tuple):
        return tuple(dict.fromkeys(value for one in arguments for value in wrong_values(one)))
    return {float: FLOATS, int: INTEGERS, str: TEXTS, Path: TEXTS}.get(hint, ())


def flags_of(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(flag, wrong value) for every field of a configuration tree."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint, name = hints[item.name], f"{prefix}{item.name.replace('_', '-')}"
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint, f"{name}.")
        elif item.name not in LEFT_OUT and not (not prefix and item.name == "path"):
            for value in wrong_values(hint):
                yield f"--{name}", value


def cases() -> list[dict[str, str]]:
    found = []
    for command in COMMANDS:
        for flag, value in flags_of(COMMANDS[command]):
            if command != "study" or "." not in flag or flag.startswith(("--pair", "--prompts")):
                found.append({"command": command, "flag": flag, "value": value})
    return found


def try_one(case: dict[str, str], run: Path) -> str | None:
    before = set(open_run(run).manifest["stages"])
    words = [case["command"], str(run), f"{case['flag']}={case['value']}"]
    if case["command"] == "study":
        words = ["study", "--path", str(run), f"{case['flag']}={case['value']}"]
    status, _, problem = attempt(words)
    return problem or lost(run, before, case["command"] if status == 0 else None)


@pytest.mark.campaign
def test_wrong_settings(finished, tmp_path):
    account = Account("wrong settings")
    run = copy_of(finished, tmp_path / "run")
    for case in chosen(cases(), account.kind):
        problem = try_one(case, run)
        account.note(case, problem)
        if problem:
            run = copy_of(finished, tmp_path / "run")
    account.close()
