"""Does a saving beat simply sampling less, and who leads when everybody has spent the same tokens?

A regime that samples less is judged against uniform training that samples less too (`FAIR`): fewer rollouts of each
prompt, rollouts drawn at random, fewer steps. What it saves is the tokens that it needs to come within the margin of
uniform's final accuracy, as a share of what the best of those controls needs. Each resample of seeds and prompts
chooses its own best control, so that the choice is part of the interval.

Shapes: B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from rocktokens.compare.curves import Arm, Floats, reach_samples
from rocktokens.compare.judgement import Reading, at_tokens, paired
from rocktokens.compare.regimes import FAIR, SAVERS
from rocktokens.errors import DataError
from rocktokens.stats import Estimate
from rocktokens.values import Row


@dataclass(frozen=True)
class Saving:
    """One regime that samples less, against the best control."""

    regime: str
    control: str
    """The control that needs the fewest tokens; where none arrives, the one that is best at equal tokens."""
    answer: Literal["yes", "no"]
    """yes: the whole interval of what is saved lies above 0."""
    saved: Estimate | None
    """Share of the best control's tokens that are saved on the way to uniform's final accuracy less the margin; None
    where the regime never comes to it."""
    over_control: Estimate
    """Accuracy minus that control's, after the same tokens."""

    def row(self) -> Row:
        """One flat row for a table."""
        found: Row = {"regime": self.regime, "control": self.control, "answer": self.answer}
        for name, value in (("saved", self.saved), ("over_control", self.over_control)):
            low_high = (None, None, None) if value is None else value[:3]
            found |= dict(zip((name, f"{name}_low", f"{name}_high"), map(_finite, low_high)))
        return found


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def savings(
    arms: Mapping[str, Sequence[Arm]],
    *,
    margin: float = 0.01,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    tokens: float | None = None,
) -> list[Saving]:
    """Every regime that saves by sampling less, against the best of the controls that were trained beside it.

    Args:
        arms: regime → its trainings, uniform among them.
        margin: how far below uniform's final accuracy a regime may stay.
        level: coverage of the interval.
        resamples: bootstrap resamples of seeds and prompts.
        seed: of the resamples, the same ones for every regime.
        tokens: where accuracies are compared; unset: what both of a pair have spent.
    """
    savers = [name for name in arms if name in SAVERS]
    if not savers:
        return []
    seeds = set.intersection(*({arm.seed for arm in own} for own in arms.values()))
    if not seeds:
        raise DataError("savings are judged on seeds that every regime was trained with; there is none")
    common = {name: [arm for arm in own if arm.seed in seeds] for name, own in arms.items()}

    def needed(name: str) -> Floats:
        rng = np.random.default_rng(seed)
        ours, theirs = paired(common[name], common["uniform"])
        return reach_samples(ours, theirs, margin=margin, rng=rng, resamples=resamples)["tokens"]

    controls: dict[str, Floats] = {name: needed(name) for name in FAIR if name in common}
    best_B = np.min(np.stack(list(controls.values())), axis=0)
    found = []
    for name in savers:
        own_B = needed(name)
        control = _best_control(common, controls, common[name], tokens, level)
        share_B = 1 - own_B / np.where((best_B > 0) & np.isfinite(best_B), best_B, 1.0)
        share_B = np.where(np.isinf(best_B), math.inf, share_B)  # it arrives where no control does
        share_B = np.where(np.isinf(own_B), -math.inf, share_B)
        saved = None if math.isinf(own_B[0]) else _interval(share_B, level, len(seeds))
        over = at_tokens(*paired(common[name], common[control]), tokens, level=level)[1]
        found.append(Saving(name, control, "yes" if saved is not None and saved.low > 0 else "no", saved, over))
    return found


def _interval(share_B: Floats, level: float, seeds: int) -> Estimate:
    resampled, last = np.sort(share_B[1:]), len(share_B) - 2
    low = float(resampled[math.floor((1 - level) / 2 * last)])
    return Estimate(float(share_B[0]), low, float(resampled[math.ceil((1 + level) / 2 * last)]), seeds)


def _best_control(
    arms: Mapping[str, Sequence[Arm]],
    needed: Mapping[str, Floats],
    own: Sequence[Arm],
    tokens: float | None,
    level: float,
) -> str:
    arrived = {name: float(samples[0]) for name, samples in needed.items() if math.isfinite(samples[0])}
    if arrived:
        return min(arrived, key=lambda name: arrived[name])
    accuracy = {name: at_tokens(*paired(arms[name], own), tokens, level=level)[0].value for name in needed}
    return max(accuracy, key=lambda name: accuracy[name])


# ---------------------------------------------------------------- the league


@dataclass(frozen=True)
class Place:
    """One regime's place when all have spent the same tokens."""

    rank: int
    regime: str
    accuracy: float
    change: float
    change_low: float
    change_high: float
    spent_ratio: float
    bite_tokens: float | None
    bite_loss: float | None
    end_dropped: float | None
    grew: bool | None

    def row(self) -> Row:
        """One flat row for a table."""
        return asdict(self)


def league(readings: Sequence[Reading]) -> list[Place]:
    """Regimes by accuracy at equal tokens, best first; those whose intervals overlap the leader's share its rank.

    The intervals are those of the change against uniform, paired by seed and prompt: what all regimes have in common
    does not widen them. The first regime whose interval lies wholly below the leader's begins the next rank.
    """
    ordered = sorted(readings, key=lambda r: (-r.change_same_tokens.value, r.regime))
    places: list[Place] = []
    leader: Estimate | None = None
    rank = 0
    for number, reading in enumerate(ordered, start=1):
        own = reading.change_same_tokens
        if leader is None or own.high < leader.low:
            leader, rank = own, number
        places.append(
            Place(
                rank,
                reading.regime,
                reading.accuracy_same_tokens.value,
                *own[:3],
                reading.spent_ratio,
                reading.bite_tokens,
                reading.bite_loss,
                reading.end_dropped,
                reading.grew,
            )
        )
    return places


def common_tokens(arms: Mapping[str, Sequence[Arm]], stop_early: Sequence[str]) -> float:
    """The tokens that every training has spent, but for regimes whose saving is to end early."""
    totals = [float(arm.axis("tokens")[-1]) for name, own in arms.items() if name not in stop_early for arm in own]
    return min(totals)
