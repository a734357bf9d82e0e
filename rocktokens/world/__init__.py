"""The built-in worlds: a task whose rocks, pillars, neutrals and stumbling block are known, and a trained pair for it.

    world = get_world("arithmetic")
    world.problems("detection", 3, seed=0)   # held-out problems, disjoint from the other splits
    world.truth().rocks.tokens               # what was planted, by construction of the corpus

Importing this loads no model and no torch. How the pairs were trained is in benchmarks/world_build.py.
"""

from __future__ import annotations

import difflib

from rocktokens.errors import ConfigError
from rocktokens.world.worlds import WORLDS, Problem, TokenSet, Truth, World

__all__ = ["Problem", "TokenSet", "Truth", "World", "get_world", "world_names"]


def world_names() -> tuple[str, ...]:
    """The built-in worlds, the default one first."""
    return tuple(WORLDS)


def get_world(name: str) -> World:
    """A built-in world by name."""
    if name not in WORLDS:
        near = difflib.get_close_matches(name, WORLDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no built-in world is called {name!r}{hint} There are: {', '.join(WORLDS)}.")
    return WORLDS[name]
