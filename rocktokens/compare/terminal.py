"""The comparison of training regimes on the terminal: accuracy, time, and where the time went."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from rocktokens.compare.judgement import Reach, Reading
from rocktokens.compare.settings import CompareConfig
from rocktokens.progress import console
from rocktokens.show import percent, plural, points
from rocktokens.stats import Estimate
from rocktokens.tables import TRAINING_STAGES

WIDTH = 150  # of the tables where there is no terminal


def show(readings: Mapping[str, Reading], config: CompareConfig, facts: Mapping[str, Any]) -> None:
    """Print the tables (accuracy, time, time by stage, equal tokens, overlap of selectors) and the verdicts.

    Args:
        readings: Every regime's results, uniform first.
        config: The comparison's settings.
        facts: What the stage recorded: steps, what the loss was divided by, and the verdicts' sentences.
    """
    out = console(width=None if sys.stdout.isatty() else WIDTH)
    first = next(iter(readings.values()))
    out.print(_accuracy_table(readings, config, first, facts))
    out.print(_time_table(readings, config))
    out.print(_stage_table(readings))
    out.print(_token_table(readings, facts))
    if facts["overlap"]:
        out.print(_overlap_table(facts["overlap"]))
    for sentence in facts["verdicts"]:
        out.print(sentence, markup=False)  # “[never arrives, …]” is an interval, not a style


def _start(facts: Mapping[str, Any]) -> str:
    """Where all trainings begin, in words."""
    step = facts.get("start", 0)
    return f"the checkpoint at step {step}" if step else "one start"


def _accuracy_table(
    readings: Mapping[str, Reading], config: CompareConfig, first: Reading, facts: Mapping[str, Any]
) -> Table:
    table = Table(
        title=f"Regimes from {_start(facts)}: {facts['steps']} steps, {plural(first.num_seeds, 'seed')}, "
        f"{first.num_problems} problems",
        caption=f"loss divided by {facts['normalise']} tokens; changes in points against uniform, "
        f"{100 * config.level:.0f} % intervals over {_over(first)}; losses in nats on common held-out rollouts, and "
        "their changes",
    )
    for name in ("regime", "accuracy %", "change", "same seconds", "area", "loss rocks", "loss rest", "verdict"):
        table.add_column(name, justify="left" if name in ("regime", "verdict") else "right")
    for name, r in readings.items():
        own = name == "uniform"
        table.add_row(
            name,
            f"{100 * r.accuracy.value:.1f}",
            "" if own else _signed(r.change),
            "" if own else _signed(r.change_same_seconds),
            "" if own else _signed(r.area_steps_change),
            _loss(r.loss_rocks, r.loss_rocks_change),
            _loss(r.loss_rest, r.loss_rest_change),
            "" if own else r.verdict,
        )
    return table


def _time_table(readings: Mapping[str, Reading], config: CompareConfig) -> Table:
    clock = "wall-clock" if config.clock == "wall" else "processor"
    table = Table(
        title="What it took, and when it came to uniform's final accuracy",
        caption=f"{clock} seconds of training alone, mean over seeds; × is the share of uniform's; reached: "
        f"uniform's final accuracy less {points(config.margin, signed=False)} points",
    )
    names = ("regime", "seconds", "time ×", "FLOPs ×", "kept", "sampled ×", "ceiling", "reached: steps", "seconds")
    for name in (*names, "FLOPs"):
        table.add_column(name, justify="left" if name == "regime" else "right")
    for name, r in readings.items():
        ratio = r.seconds_ratio
        bounds = " (no interval)" if np.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
        bounds = "" if name == "uniform" else bounds
        table.add_row(
            name,
            f"{r.seconds.value:.0f}",
            f"{ratio.value:.2f}{bounds}",
            "not recorded" if np.isnan(r.flops_ratio) else f"{r.flops_ratio:.2f}",
            percent(r.kept_share),
            f"{r.tokens_ratio:.2f}",
            f"{r.ceiling:.2f}",
            _reach(r.reach["steps"]),
            _reach(r.reach["seconds"]),
            _reach(r.reach["flops"], ".2g"),
        )
    return table


def _token_table(readings: Mapping[str, Reading], facts: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"At equal tokens: {facts['equal_tokens']:.0f} sampled and scored",
        caption="changes in points against uniform; bite: share of the tokens, and of the loss, that the regime "
        "changed; end dropped: share of end tokens without loss; grew: whether lengths or truncation did",
    )
    names = ("regime", "accuracy %", "change", "tokens × at equal steps", "bite: tokens", "loss", "end dropped")
    for name in (*names, "grew"):
        table.add_column(name, justify="left" if name == "regime" else "right")
    for name, r in readings.items():
        shares = (r.bite_tokens, r.bite_loss, r.end_dropped)
        table.add_row(
            name,
            f"{100 * r.accuracy_same_tokens.value:.1f}",
            "" if name == "uniform" else _signed(r.change_same_tokens),
            f"{r.spent_ratio:.2f}",
            *("" if share is None else percent(share) for share in shares),
            {True: "yes", False: "no", None: ""}[r.grew],
        )
    return table


def _overlap_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in (row["first"], row["second"])))
    kept = {row["first"]: row["kept_first"] for row in rows} | {row["second"]: row["kept_second"] for row in rows}
    shared = {(row["first"], row["second"]): row["overlap"] for row in rows}
    table = Table(
        title="What selectors would keep of uniform's rollouts, and how far they agree",
        caption="kept: share of tokens with a weight; elsewhere sum of the smaller over sum of the larger weights",
    )
    for name in ("selector", "kept", *names[1:]):
        table.add_column(name, justify="left" if name == "selector" else "right")
    for row in names[:-1]:
        cells = (shared.get((row, column)) for column in names[1:])
        table.add_row(row, percent(kept[row]), *("" if cell is None else f"{cell:.2f}" for cell in cells))
    return table


def _stage_table(readings: Mapping[str, Reading]) -> Table:
    stages = (*TRAINING_STAGES, "other")
    table = Table(title="Where the time went", caption="wall-clock seconds by stage, mean over seeds")
    for name in ("regime", *stages):
        table.add_column(name, justify="left" if name == "regime" else "right")
    for name, r in readings.items():
        total = max(sum(r.stages.values()), 1e-9)
        shares = ((r.stages.get(stage, 0.0), r.stages.get(stage, 0.0) / total) for stage in stages)
        table.add_row(name, *(f"{seconds:.1f} ({percent(share, 0)})" for seconds, share in shares))
    return table


def _over(reading: Reading) -> str:
    """What the intervals account for."""
    return "seeds and problems" if reading.over_seeds else "problems only (an interval over seeds needs three of them)"


def _signed(estimate: Estimate) -> str:
    return f"{points(estimate.value)} [{points(estimate.low)}, {points(estimate.high)}]"


def _loss(loss: Estimate | None, change: Estimate | None) -> str:
    """A loss and, below it, its change against uniform."""
    if loss is None:
        return ""
    if change is None or not np.isfinite(change.low):
        return f"{loss.value:.3f}"
    return f"{loss.value:.3f}\n{change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"


def _reach(reach: Reach, form: str = ".0f") -> str:
    low, value, high = ("never" if np.isinf(x) else f"{x:{form}}" for x in (reach.low, reach.value, reach.high))
    return f"{value} [{low}, {high}]"
