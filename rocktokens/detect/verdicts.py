"""What the half of the prompts that had no say thinks of the choice, and what rests on both halves' sums.

This module knows halves and tests; it does not know footprints, controls or reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.detect.certified import Certified, TypeTests, confirm, falls
from rocktokens.detect.enough import EnoughData, enough_data
from rocktokens.detect.halves import Choice, Halves
from rocktokens.detect.occurrences import Array
from rocktokens.detect.pair_sums import PairSums
from rocktokens.detect.positions import Concentration, concentration
from rocktokens.detect.scores import rng_for
from rocktokens.detect.settings import DetectConfig
from rocktokens.stats import Intervals

# Shapes: V token types.


@dataclass(frozen=True)
class Verdicts:
    """The declared classes with the other half's opinion, and what rests on both halves' sums."""

    certified: Certified
    fall: Intervals
    """How far each type's loss fell, on the other half."""
    prompts_V: Array
    """Prompts of the other half that each type occurs in."""
    has_late: bool
    """Whether a checkpoint begins the last third of training."""
    enough: EnoughData
    concentration: Concentration


def reach_verdicts(halves: Halves, choice: Choice, config: DetectConfig) -> Verdicts:
    """Ask the other half of the prompts, and say what both halves' sums say together."""
    pairs = PairSums.of(halves.measurement)
    certified = confirm(choice.certified, TypeTests.of(pairs, config.kappa), config.q)
    enough = enough_data(choice.pairs, pairs, certified, kappa=config.kappa, q=config.q)
    fall = falls(pairs, config.level, non_negative=halves.loss_range[0] >= 0)
    prompts_V, has_late = pairs.prompts_V, pairs.late_S is not None
    del pairs  # gigabytes, where there are very many occurrences
    spread = concentration(
        halves.selection,
        halves.measurement,
        rng=rng_for(config.seed, "concentration"),
        resamples=config.resamples,
        level=config.level,
    )
    return Verdicts(certified, fall, prompts_V, has_late, enough, spread)
