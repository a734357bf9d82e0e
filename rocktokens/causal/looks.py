"""Looking at a census more than once without raising its error rate.

Alpha spending by the union bound: look k may spend the share f_k of α, and the shares sum to 1. The chance of a wrong
verdict at any look is then at most Σ f_k·α = α, whatever the looks have in common and however the p values were made;
and min over looks of p_k / f_k is itself a p value, which Bonferroni and Benjamini–Hochberg may go on with. This module
knows numbers of prompts; it does not know what is measured on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocktokens.errors import ConfigError

GROWTH = 2.0  # every look spends this many times the α of the one before it: late looks decide the close calls


@dataclass(frozen=True)
class Schedule:
    """After how many prompts the census is looked at, and the share of α that each look may spend."""

    problems: tuple[int, ...]
    shares: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.problems)


def make_schedule(num_problems: int, rounds: int) -> Schedule:
    """Looks at doubling numbers of prompts, the last at all of them; a single look spends all of α at the end."""
    if rounds < 1 or num_problems < 2:
        raise ConfigError(f"a census needs at least 1 look and 2 prompts, got {rounds} and {num_problems}")
    ends = sorted({max(2, num_problems >> back) for back in range(rounds)})
    spends = [GROWTH**look for look in range(len(ends))]
    return Schedule(tuple(ends), tuple(spend / sum(spends) for spend in spends))
