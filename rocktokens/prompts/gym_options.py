"""Settings of a reasoning-gym task as a user writes them: KEY=VALUE, checked against the task's own configuration.

Values are YAML: 3, 0.5, true, word, [a, b]. The package itself checks ranges but not types, so that a wrong type would
show only when problems are made, as an error of something else.
"""

from __future__ import annotations

import datetime
import difflib
import re
import types
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Literal, Union

import yaml

from rocktokens.errors import ConfigError

OURS = {"seed": "prompts.seed", "size": "prompts.limit"}
PLAIN: dict[object, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")  # YAML takes 1e-3 for a word
DATES: dict[object, str] = {datetime.date: "a date such as 2026-01-31", datetime.time: "a time such as 08:30"}


class NotThat(Exception):
    """A value is not what a setting takes; says what it takes."""


def read_options(name: str, config: type, options: Sequence[str]) -> dict[str, object]:
    """A task's settings by their names, in the types that the task wants; ConfigError where one does not fit.

    Args:
        name: The task.
        config: The task's configuration class.
        options: KEY=VALUE each.
    """
    hints = {key: hint for key, hint in typing.get_type_hints(config).items() if key not in OURS}
    # Some settings of the package are called whole numbers and are none.
    hints |= {key: float for key in hints if isinstance(getattr(config, key, None), float)}
    found: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"prompts.options are KEY=VALUE, got {option!r}")
        if key in OURS:
            raise ConfigError(f"prompts.options cannot set {key}; use {OURS[key]}")
        if key in found:
            raise ConfigError(f"prompts.options set {key} twice; give it once")
        if key not in hints:
            raise ConfigError(f"reasoning-gym:{name} has no setting {key!r}; {_nearest(key, list(hints))}")
        try:
            found[key] = _as(hints[key], _yaml(option, value), value.strip())
        except NotThat as error:
            raise ConfigError(f"reasoning-gym:{name}: {key} must be {error}, got {value!r}") from None
    return found


def shown(options: Sequence[str]) -> str:
    """Options for a sentence."""
    return " ".join(options) if options else "its own settings"


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"it has {', '.join(known)}" if known else "it has none"


def _yaml(option: str, value: str) -> object:
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(
            f"prompts.options: the value of {option!r} is not YAML; put signs in quotes, as in operators=['+', '*']"
        ) from None


def _as(hint: object, value: object, written: str | None = None) -> object:
    """A value as a type hint wants it; `written` are its own letters, for texts that YAML takes for other things."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        kinds, wanted = PLAIN[hint]
        if hint is float and isinstance(value, str) and EXPONENT.fullmatch(value):
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            raise NotThat(wanted)
        return float(typing.cast(float, value)) if hint is float else value
    if hint is str:
        return value if isinstance(value, str) else _text(written)
    if hint in DATES:
        return _date(hint, _text(written))
    if origin in (Union, types.UnionType):
        return None if value is None else _as(next(kind for kind in inner if kind is not type(None)), value, written)
    if origin is Literal:
        if value not in inner:
            raise NotThat(f"one of {', '.join(map(str, inner))}")
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(hint, value)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        return _several(tuple if origin is tuple or hint is tuple else list, inner, value)
    raise NotThat(f"a {getattr(hint, '__name__', hint)}, which cannot be written as an option: leave it out")


def _text(written: str | None) -> str:
    if written is None:
        raise NotThat("text; put it in quotes")
    return written


def _date(hint: object, written: str) -> object:
    kind = datetime.date if hint is datetime.date else datetime.time
    try:
        return kind.fromisoformat(written)
    except ValueError:
        raise NotThat(DATES[hint]) from None


def _member(kind: type[Enum], value: object) -> Enum:
    for member in kind:
        if value in (member.value, member.name):
            return member
    raise NotThat(f"one of {', '.join(str(member.value) for member in kind)}")


def _several(kind: type, inner: tuple[object, ...], value: object) -> object:
    """A list, whose parts are all of one type or, in a tuple of several, each of its own."""
    if not isinstance(value, list):
        raise NotThat("a list such as [a, b]")
    hints = [part for part in inner if part is not Ellipsis]
    if len(hints) > 1 and len(hints) != len(value):
        raise NotThat(f"lists of {len(hints)}")
    each = hints if len(hints) > 1 else hints * len(value)
    try:
        return kind(_as(hint, part) for hint, part in zip(each, value)) if hints else kind(value)
    except NotThat as error:
        raise NotThat(f"a list, each part of it {error}") from None
