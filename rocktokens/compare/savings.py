"""Does a regime that samples less beat simply sampling less?

It is judged on accuracy after the same tokens (sampled, and scored by the teacher) against uniform training that
samples less too (`FAIR`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rocktokens.compare.curves import Arm
from rocktokens.compare.judgement import at_tokens, paired
from rocktokens.compare.regimes import FAIR, SAVERS
from rocktokens.stats import Estimate
from rocktokens.values import Row


@dataclass(frozen=True)
class Saving:
    """One regime that samples less, against the control that is best at equal tokens."""

    regime: str
    control: str
    answer: Literal["yes", "no"]
    """yes: its accuracy is above the control's, interval and all."""
    over_control: Estimate
    """Accuracy minus that control's, after the same tokens."""

    def row(self) -> Row:
        """One flat row for a table."""
        value, low, high, _ = self.over_control
        found: Row = {"regime": self.regime, "control": self.control, "answer": self.answer}
        return found | {"over_control": value, "over_control_low": low, "over_control_high": high}


def savings(arms: Mapping[str, Sequence[Arm]], *, tokens: float, level: float = 0.95) -> list[Saving]:
    """Every regime that saves by sampling less, against the best of the controls that were trained with it."""
    found = []
    for name in SAVERS:
        if name in arms:
            over = {
                control: at_tokens(*paired(arms[name], arms[control]), tokens, level=level)[1]
                for control in FAIR
                if control in arms
            }
            control = min(over, key=lambda own: over[own].value)
            found.append(Saving(name, control, "yes" if over[control].low > 0 else "no", over[control]))
    return found


def common_tokens(arms: Mapping[str, Sequence[Arm]]) -> float:
    """The tokens that every training has spent."""
    return min(float(arm.axis("tokens")[-1]) for own in arms.values() for arm in own)
