"""What this call may do that a run or a settings file cannot allow by itself: run code, read pickles.

Permissions come from the command line of this call (`--allow-code`, `--pair.trust-remote-code`,
`--pair.allow-pickle`) or from Python (`granting`), and end with it. Nothing that lies in a run grants one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rocktokens.errors import ConfigError, RunError

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
    """Refuse a Python function or class that a run's settings name, unless this call allows code.

    Args:
        where: whose settings name it.
        what: what it would be used as, e.g. answer checker.
        name: package.module:function.
    """
    if ":" in name and not is_granted("code"):
        raise RunError(
            f"{where} names Python code as its {what}: {name} (from {file_of(name)}). Importing it runs that file. "
            "If you trust it, pass --allow-code."
        )


def file_of(name: str) -> str:
    """The file that importing package.module:function would run, as far as it can be told without importing it."""
    module = name.partition(":")[0]
    local = Path(*module.split(".")) if module else Path()
    for candidate in (local.with_suffix(".py") if module else local, local / "__init__.py"):
        if candidate.is_file():
            return str(candidate.resolve())
    return f"the installed module {module}"


def permissions_of(command: object, *, allow_code: bool) -> list[Permission]:
    """What the words of this call permit; code that they name without --allow-code is refused.

    Args:
        command: the parsed command; what it names in `prompts`, `distill` and `pair` is looked at.
        allow_code: whether --allow-code was among the words.
    """
    from rocktokens.train.settings import DistillConfig

    named = [("answer checker", getattr(getattr(command, "prompts", None), "checker", ""))]
    distill = getattr(command, "distill", None)
    if isinstance(distill, DistillConfig):
        named += [("selector", name) for name in (distill.selector.name, *distill.shadows)]
    for what, name in named:
        if ":" in name and not allow_code:
            raise ConfigError(
                f"the {what} {name} is Python code from {file_of(name)}; importing it runs that file. If you trust it, "
                f"pass {ALLOW_CODE}."
            )
    pair = getattr(command, "pair", None)
    granted: list[Permission] = ["code"] if allow_code else []
    granted += ["model code"] if getattr(pair, "trust_remote_code", False) else []
    return granted + (["pickle"] if getattr(pair, "allow_pickle", False) else [])
