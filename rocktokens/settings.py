"""Settings: frozen dataclasses with constraints in their types; from YAML and manifests and back; JSON Schema.

A settings class derives from `Settings` and says where it stands in the tree (`section="rollouts"`). What one field
takes is in its type (`Count`, `Share`, a Literal, Annotated with msgspec.Meta); rules between fields stand in its
`__post_init__`, after `super().__post_init__()`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from rocktokens.errors import ConfigError
from rocktokens.values import Json

C = TypeVar("C")
MOST_VALUES = 10_000  # of a YAML file

# Types of fields. Upper bounds are far above any use: they turn typing errors, NaN and infinity into a sentence.
Count = Annotated[int, Meta(ge=1, le=100_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=100_000_000)]
Pair = Annotated[int, Meta(ge=2, le=100_000_000)]  # prompts that are split into halves, or compared
Resamples = Annotated[int, Meta(ge=100, le=1_000_000)]
Length = Annotated[int, Meta(ge=1, le=10_000_000)]  # tokens of a response
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-1e12, le=1e12)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Share = Annotated[float, Meta(gt=0, lt=1)]
ShareOrAll = Annotated[float, Meta(gt=0, le=1)]
ShareOrNone = Annotated[float, Meta(ge=0, le=1)]

# Marks in a field's metadata; `to_mapping` leaves such fields out of manifests.
IMMATERIAL = "immaterial"
PERMISSION = "permission"


def immaterial(default: Any) -> Any:
    """A field that changes speed or memory, not the result: a resumed run may change it."""
    return dataclasses.field(default=default, metadata={IMMATERIAL: True})


def permission(default: Any = False) -> Any:
    """A field that permits something dangerous. It holds for this call only: no run records it or grants it."""
    return dataclasses.field(default=default, metadata={PERMISSION: True})


class Settings:
    """Base of every settings class: each value is checked against its field's type, and converted to it."""

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = "", **options: object) -> None:
        super().__init_subclass__(**options)
        cls.section = section

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if dataclasses.is_dataclass(hint):
                continue  # a section of its own has checked itself
            try:
                checked = msgspec.convert(value, hint, dec_hook=lambda kind, given: kind(given))
                texts = [
                    text for text in (checked if isinstance(checked, tuple) else (checked,)) if isinstance(text, str)
                ]
                fits = not any(b"\0" in text.encode() for text in texts)
            except (msgspec.ValidationError, UnicodeError):  # UnicodeError: half a surrogate pair
                fits = False
            where = f"{self.section}.{name}".lstrip(".")
            require(fits, f"{where} takes {takes(hint)}, got {ascii(value)[:80]}")
            object.__setattr__(self, name, checked)


def require(condition: bool, message: str) -> None:
    """Refuse a setting, saying what would work."""
    if not condition:
        raise ConfigError(message)


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Field → its type with constraints."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def takes(hint: Any) -> str:
    """What a field of this type takes, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if part is type(None) else takes(part) for part in arguments)
    if origin is tuple:
        return f"a list, each item {takes(arguments[0])}"
    plain, *marks = arguments if origin is Annotated else (hint,)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    said = words.get(plain) or takes(plain)
    for mark in (mark for mark in marks if isinstance(mark, Meta)):
        bounds = {"at least": mark.ge, "above": mark.gt, "at most": mark.le, "below": mark.lt}
        said += "".join(f", {word} {limit:,}" for word, limit in bounds.items() if limit is not None)
    return said


def load_yaml(path: str | Path) -> Json:
    """A YAML file as nested mappings; duplicate keys are refused, and 1e-4 is a number."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
            if twice is not None and twice != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{twice} stands there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    scientific = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")  # YAML 1.1 wants a dot in it
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", scientific, list("-+.0123456789"))
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: not UTF-8, or thousands of digits
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    todo: list[Any] = [content]
    for number, part in enumerate(todo):  # which grows, and without end where aliases name aliases
        require(number < MOST_VALUES, f"{path} holds more than {MOST_VALUES:,} values; write it without aliases")
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigError(f"{path} must hold sections with settings, and it holds {found}")
    return content


def from_mapping(kind: type[C], values: Mapping[str, Any], where: str = "", default: C | None = None) -> C:
    """A settings object from nested mappings; fields not named keep the default's value.

    Args:
        kind: The settings class.
        values: Field → value, or section → mapping.
        where: What to put before the name of an unknown field, e.g. `rollouts.`.
        default: Where to take the other fields from; unset: the class's own defaults.
    """
    types_of, given = field_types(kind), dict[str, Any]()  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in types_of:
            near = difflib.get_close_matches(str(key), types_of, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(types_of)}"
            raise ConfigError(f"unknown setting {where}{key}; {hint}")
        if dataclasses.is_dataclass(types_of[key]):
            require(isinstance(value, Mapping), f"{where}{key} is a section; give its fields, not {value!r}")
            value = from_mapping(types_of[key], value, f"{where}{key}.", getattr(default, key, None))
        given[key] = value
    return kind(**given) if default is None else dataclasses.replace(default, **given)  # type: ignore[type-var]


def to_mapping(config: Any) -> Json:
    """What of a configuration decides the result, as plain values for a manifest: lists for tuples, text for paths."""
    found = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if not {IMMATERIAL, PERMISSION} & set(item.metadata):
            is_section = dataclasses.is_dataclass(value)
            found[item.name] = to_mapping(value) if is_section else json.loads(json.dumps(value, default=str))
    return found


def from_manifest(kind: type[C], values: Json, where: str) -> C:
    """A configuration as a run recorded it: permissions in it are not granted."""
    return from_mapping(kind, without_permissions(kind, values), f"{where}.")


def without_permissions(kind: type, values: Mapping[str, object]) -> Json:
    """Settings that lie in a run, of a section or of a whole study, without what only a command line may permit."""
    withheld = {item.name for item in dataclasses.fields(kind) if item.metadata.get(PERMISSION)}
    return {
        key: without_permissions(field_types(kind)[key], value)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(field_types(kind).get(key))
        else value
        for key, value in values.items()
        if key not in withheld
    }


def schema(kind: type) -> Json:
    """The JSON Schema of a settings tree, with each field's docstring as its description."""
    found, parts = msgspec.json.schema_components([kind], schema_hook=lambda _: {"type": "string"})
    todo: list[Any] = [kind]
    for part in todo:  # which grows by the sections inside
        parts[part.__name__]["additionalProperties"] = False
        for name, said in field_docs(part).items():
            parts[part.__name__]["properties"][name]["description"] = said
        todo += [hint for hint in field_types(part).values() if dataclasses.is_dataclass(hint)]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found[0], "$defs": parts}


def field_docs(kind: type) -> dict[str, str]:
    """Field → the string below it in the class's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        item.target.id: " ".join(str(below.value.value).split())
        for item, below in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


# ---------------------------------------------------------------- what this call may do

# Permissions come from this call's command line (--allow-code, --pair.trust-remote-code, --pair.allow-pickle) or from
# Python (`granting`), and end with it. Nothing that lies in a run grants one.
Permission = Literal["code", "model code", "pickle"]
ALLOW_CODE = "--allow-code"
_granted: set[Permission] = set()


@contextmanager
def granting(*permissions: Permission) -> Iterator[None]:
    """Grant permissions inside the block; "code" includes "model code"."""
    before = set(_granted)
    _granted.update(permissions)
    try:
        yield
    finally:
        _granted.clear()
        _granted.update(before)


def is_granted(permission: Permission) -> bool:
    """Whether this call has the permission."""
    return permission in _granted or (permission == "model code" and "code" in _granted)


def granted() -> list[Permission]:
    """What this call may do, to be handed to the processes that work for it."""
    return sorted(_granted)


def refuse_code(where: str, what: str, name: str) -> None:
    """Refuse code, given as package.module:function, that settings of `where` name, unless this call allows it."""
    if ":" in name and not is_granted("code"):
        said = f"{where} names Python code as its {what}: {name} (from {file_of(name)}). Importing it runs that file."
        raise ConfigError(f"{said} If you trust it, pass {ALLOW_CODE}.")


def file_of(name: str) -> str:
    """The file that importing package.module:function would run, as far as it can be told without importing it."""
    module = name.partition(":")[0]
    local = Path(*module.split(".")) if module else Path()
    for candidate in (local.with_suffix(".py") if module else local, local / "__init__.py"):
        if candidate.is_file():
            return str(candidate.resolve())
    return f"the installed module {module}"
