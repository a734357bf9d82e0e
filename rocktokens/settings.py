"""Configurations from mappings (YAML, manifests) and back; unknown keys are refused with the nearest valid name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rocktokens.errors import ConfigError
from rocktokens.values import Json

if TYPE_CHECKING:
    import yaml

C = TypeVar("C")

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# Marks in a field's metadata; `to_mapping` leaves such fields out of manifests.
IMMATERIAL = "immaterial"
PERMISSION = "permission"


def immaterial(default: Any) -> Any:
    """A field that changes speed or memory, not the result: a run may go on with another value."""
    return dataclasses.field(default=default, metadata={IMMATERIAL: True})


def permission(default: Any = False) -> Any:
    """A field that permits something dangerous. It holds for this call only: no run records it or grants it."""
    return dataclasses.field(default=default, metadata={PERMISSION: True})


# Largest value of a whole number that counts something, by its field's name; what has no entry ends at COUNT.
COUNT = 100_000_000
LARGEST = {
    "seed": 2**63 - 1,
    "port": 65_535,
    "threads": 1024,
    "resamples": 1_000_000,
    "keep": 10_000,
    "seeds": 1000,
    "context_dims": 65_536,
    "max_new_tokens": 10_000_000,
    "corpus_positions": 10**15,
}


class Settings:
    """Base of every configuration: numbers are finite and in bounds, text can be written, before any other check."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            def checked(self: Settings) -> None:
                _check_values(self)
                own(self)

            cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        _check_values(self)


def _check_values(config: Any) -> None:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        for one in value if isinstance(value, tuple) else (value,):
            _check_value(item.name, one)


def _check_value(name: str, value: object) -> None:
    if isinstance(value, float):
        require(math.isfinite(value), f"{name} must be a finite number, got {value}")
    elif isinstance(value, int) and not isinstance(value, bool):
        largest = LARGEST.get(name, COUNT)
        require(value <= largest, f"{name} must be at most {largest:,}, got {value:,}")
        require(name not in ("seed", "port") or value >= 0, f"{name} must be at least 0, got {value}")
    elif isinstance(value, str | Path):
        require(
            "\0" not in str(value) and _is_text(value), f"{name} holds characters that are no text: {ascii(value)[:80]}"
        )


def _is_text(value: str | Path) -> bool:
    try:
        os.fsencode(value) if isinstance(value, Path) else value.encode()
    except UnicodeEncodeError:
        return False
    return True


def require(condition: bool, message: str) -> None:
    """Refuse a setting, saying what would work."""
    if not condition:
        raise ConfigError(message)


def load_yaml(path: str | Path) -> Json:
    """A YAML file as nested mappings."""
    import yaml

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _loader())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # nested thousands deep, or a number of thousands of digits
        raise ConfigError(f"{path} cannot be read as settings: {str(error).splitlines()[0]}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        raise ConfigError(f"{path} holds no setting; leave the file out to run with the defaults")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections and fields, got {type(content).__name__}")
    return content


def _loader() -> type[yaml.SafeLoader]:
    """YAML without Python objects, in which a key may stand once: of two the last would silently hold."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
            if twice is not None and twice != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{twice} stands there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def from_mapping(kind: type[C], values: Mapping[str, Any], where: str = "", default: C | None = None) -> C:
    """An instance of a configuration dataclass from nested mappings; fields not named keep the default's value."""
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    given: Json = {}
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
            raise ConfigError(f"unknown setting {where}{key}; {hint}")
        inner = getattr(default, key) if default is not None else None
        given[key] = _value(hints[key], value, f"{where}{key}", inner)
    if default is not None:
        return dataclasses.replace(default, **given)  # type: ignore[type-var]
    return kind(**given)


def _value(hint: Any, value: Any, where: str, default: object) -> object:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is a section; give its fields, not {value!r}")
        return from_mapping(hint, value, f"{where}.", default)  # type: ignore[arg-type]
    if isinstance(value, str) and _takes_float(hint) and NUMBER.fullmatch(value):
        value = float(value)  # YAML 1.1 reads 1e-4 as text: its numbers need a dot
    if not _fits(hint, value):
        raise ConfigError(f"{where} cannot be {value!r}; it takes {_describe(hint)}")
    if hint is float and isinstance(value, int):
        return float(value)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    takes_path = hint is Path or Path in typing.get_args(hint)
    return Path(value) if takes_path and isinstance(value, str) else value


def _takes_float(hint: object) -> bool:
    return (hint is float or float in typing.get_args(hint)) and str not in typing.get_args(hint)


def _fits(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return isinstance(value, str | int) and value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(argument, value) for argument in arguments)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(arguments[0], item) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, str | Path)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if argument is type(None) else _describe(argument) for argument in arguments)
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))


def to_mapping(config: Any) -> Json:
    """What of a configuration decides the result, as plain values for a manifest: lists for tuples, text for paths."""
    return {
        item.name: _plain(getattr(config, item.name))
        for item in dataclasses.fields(config)
        if not item.metadata.get(IMMATERIAL) and not item.metadata.get(PERMISSION)
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_manifest(kind: type[C], values: Any, where: str) -> C:
    """A configuration as a run recorded it: permissions that somebody wrote into it are not granted.

    Args:
        kind: the configuration's dataclass.
        values: the section of the manifest.
        where: what to call the section where it is not one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is not a section of settings; restore run.json or start a new run")
    return from_mapping(kind, without_permissions(kind, values), f"{where}.")


def without_permissions(kind: type, values: Mapping[str, object]) -> Json:
    """Settings that lie in a run, of a section or of a whole study, without what only a command line may permit."""
    hints = typing.get_type_hints(kind)
    withheld = {item.name for item in dataclasses.fields(kind) if item.metadata.get(PERMISSION)}
    return {
        key: without_permissions(hints[key], value)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hints.get(key))
        else value
        for key, value in values.items()
        if key not in withheld
    }
