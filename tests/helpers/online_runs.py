"""Simulated trainings with known truth, for what decides while a model trains: adaptive, monitor, saturation.

Losses are gamma distributed round a mean that the scenario gives to every token type at every step; frequencies follow
Zipf's law. Shared by benchmarks/online.py, which saves the results, and by the small versions in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.signal import lfilter

from rocktokens.divergence.monitor import TokenMonitor
from rocktokens.select.interface import Adaptive, SelectorBatch
from rocktokens.train.record import saturation

# Shapes: V token types, N rows of a step, S steps.


@dataclass(frozen=True)
class Scenario:
    """A training: how far everything falls, how fast, after which warm-up, and how many rocks do not."""

    name: str
    fall: float
    """Share by which the loss of a learning type has fallen in the end, on average over types."""
    rocks: int = 0
    warmup: int = 0
    """Steps in which the learning rate rises from 0."""
    speed: float = 0.25
    """Share of the training after which two thirds of the fall are reached."""


ADAPTIVE = (
    Scenario("fall of 30 %", 0.30),
    Scenario("fall of 30 %, warm-up", 0.30, warmup=60),
    Scenario("fall of 50 %", 0.50),
    Scenario("fall of 50 %, warm-up", 0.50, warmup=60),
    Scenario("fall of 90 %", 0.90),
    Scenario("fall of 90 %, warm-up", 0.90, warmup=60),
    Scenario("rocks, fast", 0.90, rocks=4, speed=0.08),
    Scenario("rocks, slow", 0.50, rocks=4, speed=0.4, warmup=60),
)


@dataclass(frozen=True)
class Found:
    """What adaptive did in one training."""

    false_freezes: int
    """Types that learn and were frozen at some step."""
    found_rocks: int
    """Rocks that were frozen in the end."""
    frozen_loss: float
    """Largest share of the loss that was frozen at any step."""


def progress(step: int, warmup: int) -> float:
    """Steps' worth of learning: the sum of a learning rate that rises from 0 to 1 over the warm-up."""
    return step**2 / (2 * warmup) if step < warmup else step - warmup / 2


def simulate_adaptive(
    scenario: Scenario, seed: int, *, types: int = 200, steps: int = 600, rows: int = 1000, half_life: float = 50.0
) -> Found:
    """Train on simulated losses; what is frozen is measured only where audited."""
    rng = np.random.default_rng([seed, *scenario.name.encode()])
    share_V = 1.0 / np.arange(1, types + 1)
    share_V = rng.permutation(share_V / share_V.sum())
    start_V = rng.lognormal(0.0, 1.0, types)
    final_V = np.clip(scenario.fall * rng.uniform(0.8, 1.2, types), 0, 0.99)
    speed_V = scenario.speed * rng.uniform(0.5, 2.0, types)
    rocks = rng.choice(np.argsort(-share_V)[:40], scenario.rocks, replace=False)
    start_V[rocks], final_V[rocks] = 3.0, rng.uniform(-0.05, 0.05, len(rocks))
    adaptive, monitor = Adaptive(seed=seed), TokenMonitor(types, half_life=half_life)
    ever, frozen_loss = set(), 0.0
    for step in range(1, steps + 1):
        mean_V = start_V * (1 - final_V * (1 - np.exp(-progress(step, scenario.warmup) / steps / speed_V)))
        token = rng.choice(types, size=rows, p=share_V)
        value = torch.from_numpy(rng.gamma(0.5, 1 / 0.5, rows) * mean_V[token])  # KL is skewed: most rows near 0
        batch = SelectorBatch(
            torch.from_numpy(token), torch.zeros(rows, dtype=torch.long), torch.arange(rows), step, rows
        )
        kept = adaptive.weights(batch) > 0
        monitor.update(batch.token_N[kept], value[kept])
        adaptive.observe(monitor)
        frozen = list(adaptive.frozen)
        ever |= set(frozen)
        loss_V = share_V * mean_V
        frozen_loss = max(frozen_loss, float(loss_V[frozen].sum() / loss_V.sum()))
    return Found(len(ever - set(rocks.tolist())), len(set(adaptive.frozen) & set(rocks.tolist())), frozen_loss)


def simulate_monitor(kind: str, seed: int, *, types: int, updates: int = 200, rows: int = 4000) -> int:
    """False rocks of one training. kinds: `equal` (every type costs the same and nothing is learned), `learning`
    (types differ and all of them fall by half), `skewed` (as `learning`, with losses far more skewed)."""
    rng = np.random.default_rng([seed, types, *kind.encode()])
    share_V = 1.0 / np.arange(1, types + 1)
    share_V /= share_V.sum()
    mean_V = np.ones(types) if kind == "equal" else rng.lognormal(0.0, 1.0, types)
    shape = 0.2 if kind == "skewed" else 1.0
    monitor = TokenMonitor(types)
    for update in range(1, updates + 1):
        fall = 1.0 if kind == "equal" else 1.0 - 0.5 * (1 - np.exp(-update / 40))
        token = rng.choice(types, size=rows, p=share_V)
        value = rng.gamma(shape, 1 / shape, rows) * mean_V[token] * fall
        monitor.update(torch.from_numpy(token), torch.from_numpy(value))
    return len(monitor.rocks())


LOSSES = {
    "slow decay": lambda step, steps: 0.3 + 0.7 * np.exp(-step / (0.5 * steps)),
    "power law": lambda step, steps: (1 + step / (0.02 * steps)) ** -0.3,
    "linear": lambda step, steps: 1 - 0.6 * step / steps,
    "late start": lambda step, steps: 0.3 + 0.7 / (1 + np.exp((step / steps - 0.35) / 0.08)),
    "flat": lambda step, steps: np.ones_like(step, dtype=float),
    "early end": lambda step, steps: 0.2 + 0.8 * np.exp(-step / (0.04 * steps)),
}
TOLERANCE = 0.10


def simulate_saturation(kind: str, seed: int, *, noise: float, warmup: int, steps: int = 3000) -> tuple[int, bool]:
    """(step at which training stops, whether the stop was false: more than the tolerance was still to be gained).

    Tested every 10 steps, believed when it holds three times in a row, as training does. In the warm-up nothing is
    learned; noise is half white, half a slow wave (AR(1)).
    """
    rng = np.random.default_rng([seed, warmup, round(1000 * noise), *kind.encode()])
    at = np.maximum(np.arange(steps + 1) - warmup, 0)
    mean = LOSSES[kind](at, steps)
    wave = lfilter([0.6], [1.0, -0.8], rng.normal(0, 1, steps + 1))
    loss = mean * (1 + noise * np.sqrt(0.5) * (rng.normal(0, 1, steps + 1) + wave))
    held = 0
    for step in range(10, steps, 10):
        found = saturation(loss[warmup:step], remaining=steps - step, tolerance=TOLERANCE)
        held = held + 1 if found is not None and found.saturated else 0
        if held == 3:
            return step, bool(1 - mean[steps] / mean[step] > TOLERANCE)
    return steps, False
