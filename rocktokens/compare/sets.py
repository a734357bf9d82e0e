"""Which token types the regimes of a comparison leave out, and which regimes have anything to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rocktokens.compare.regimes import FrozenSets
from rocktokens.compare.settings import CompareConfig, Regime
from rocktokens.errors import RunError
from rocktokens.run import Run
from rocktokens.train.settings import DistillConfig

log = logging.getLogger(__name__)


def frozen_sets(run: Run, config: CompareConfig) -> FrozenSets:
    """Token ids named by the user, else the rocks, declared or by the definition asked for, and the bypass list."""
    if config.rocks:
        return FrozenSets(config.rocks, config.rocks)
    bypass = tuple(run.facts("bypass")["ids"]) if run.done("bypass") else ()
    if config.definition is not None:
        return FrozenSets(_named_by(run, config.definition), bypass)
    return FrozenSets(tuple(run.facts("detect")["rocks"]) if run.done("detect") else (), bypass)


def _named_by(run: Run, definition: str) -> tuple[int, ...]:
    """Types that a definition names, in the order of its ranks, whether or not `detect` declares rocks by it."""
    if not run.done("detect"):
        raise RunError(f"definition = {definition} needs a detection; run `rocktokens detect {run.path}` first")
    found = run.query(f"select token_id from types where in_{definition} order by rank_{definition}, token_id")
    return tuple(found["token_id"].to_pylist())


def regimes_to_train(run: Run, config: CompareConfig, sets: FrozenSets) -> tuple[Regime, ...]:
    """The regimes asked for, uniform first, without those that have nothing to do; it says which and why."""
    asked = [name for name in dict.fromkeys(config.regimes) if name != "uniform"]
    if not run.done("detect"):
        return ("uniform", *asked)  # nothing was looked for: a regime that needs it is refused
    if not sets.rocks:
        log.warning(
            "%s", f"no type is a rock by {config.definition}" if config.definition else "detect declared no rocks"
        )
    if "freeze" in asked and not sets.bypass:
        why = "the bypass list is empty" if run.done("bypass") else f"no bypass list; `rocktokens bypass {run.path}`"
        log.warning("there is nothing for freeze to leave out: %s", why)
    left_out = [name for name in asked if not sets.allows(name)]
    if left_out:
        log.warning("not compared, for there is nothing to leave out: %s", ", ".join(left_out))
    asked = [name for name in asked if name not in left_out]
    if {"freeze", "freeze_rocks"} <= set(asked) and sorted(sets.rocks) == sorted(sets.bypass):
        log.info("the bypass list holds every rock: freeze_rocks is freeze, and is not trained twice")
        asked.remove("freeze_rocks")
    return ("uniform", *asked)


def frozen_ids(arms: Mapping[tuple[int, str], DistillConfig]) -> dict[str, tuple[int, ...]]:
    """Regime → the token types that it was given to leave out or to be the control of."""
    return {regime: config.selector.rocks for (_, regime), config in arms.items() if config.selector.rocks}
