"""Selectors by name: what the settings, `make_selector` and a bypass file ask for."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable

from rocktokens.errors import ConfigError
from rocktokens.select.adaptive import Adaptive
from rocktokens.select.interface import (
    AdaKd,
    Entropy,
    Fire,
    Freeze,
    FreezeRocks,
    HighDivergence,
    Iw,
    Position,
    Prefix,
    Random,
    SelectKd,
    Selector,
    Soft,
    Teachable,
    Tip,
    Uniform,
)
from rocktokens.select.settings import SelectorConfig
from rocktokens.settings import require


def make_selector(name: str, **options: object) -> Selector:
    """A selector by name, e.g. make_selector("freeze", rocks=[11, 42]); or your own class as "package.module:Class"."""
    kinds = selector_kinds()
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"selector {name} cannot be loaded: {error}") from None
        is_one = isinstance(kind, type) and issubclass(kind, Selector)
        require(is_one, f"{name} is not a Selector; derive it from rocktokens.Selector")
    else:
        near = difflib.get_close_matches(name, kinds, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = f"There are: {', '.join(kinds)}; or package.module:Class."
        require(name in kinds, f"no selector is called {name!r}.{hint} {known}")
        kind = kinds[name]
    takes = list(inspect.signature(kind).parameters)
    for option in options:
        said = f"it takes: {', '.join(takes)}" if takes else "it takes no options"
        require(option in takes, f"selector {name} has no option {option!r}; {said}")
    return kind(**options)


def selector_of(config: SelectorConfig, rocks: Iterable[int] = (), bypass: Iterable[int] | None = None) -> Selector:
    """The selector a configuration asks for.

    Args:
        config: which selector, and its settings.
        rocks: the declared rocks; they stand in where a selector needs some and the configuration names none.
        bypass: the bypass list, likewise for `freeze` (unset: there is no such list, and `freeze` takes the rocks); for
            `adaptive` it counts where the configuration asks for one.
    """
    options = config.options()
    if config.name == "adaptive":
        named = options.pop("rocks", ())
        options["allowed"] = (() if bypass is None else tuple(bypass)) if config.bypass else (named or None)
    elif "rocks" in options and not config.rocks:
        options["rocks"] = tuple(bypass if config.name == "freeze" and bypass is not None else rocks)
    return make_selector(config.name, **options)


def selector_kinds() -> dict[str, type[Selector]]:
    """Every selector of ours by name."""
    ours: tuple[type[Selector], ...] = (Uniform, Freeze, FreezeRocks, Soft, Random, Adaptive, Entropy, HighDivergence)
    ours += (Prefix, Tip, Teachable, Iw, Fire, SelectKd, Position, AdaKd)
    return {kind.name: kind for kind in ours}
