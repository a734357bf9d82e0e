"""The account at the end of a training: where time and work went, and whether the loss had stopped falling."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.table import Table

from rocktokens.progress import console
from rocktokens.show import percent
from rocktokens.tables import STEP_STAGES
from rocktokens.train.record import Saturation


def show_account(title: str, summary: Mapping[str, float], saturation: Saturation | None) -> None:
    """Print the account to standard error.

    Args:
        title: which training.
        summary: totals over the training (`TrainingRecord.summary`); empty if there was no step.
        saturation: the slope test at the end; None where the training was too short for it.
    """
    if summary:
        console(stderr=True).print(account_table(title, summary))
    if saturation is not None:
        print(saturation_sentence(saturation), file=sys.stderr)


def account_table(title: str, summary: Mapping[str, float]) -> Table:
    """Seconds and floating-point operations by stage of a step."""
    table = Table(title=title, caption=_caption(summary))
    for column in ("stage", "seconds", "share of time", "TFLOP", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    total, named = summary["seconds"], 0.0
    for stage in STEP_STAGES:
        seconds, flops = summary[f"seconds_{stage}"], summary.get(f"flops_{stage}", 0.0)
        named += seconds
        if seconds > 0:
            speed = f"{flops / seconds / 1e9:.1f}" if flops else ""
            work = f"{flops / 1e12:.3g}" if flops else ""
            table.add_row(stage, f"{seconds:.1f}", percent(seconds / total), work, speed)
    other = total - named
    table.add_row("other", f"{other:.1f}", percent(other / total), "", "")
    table.add_section()
    table.add_row("all", f"{total:.1f}", percent(1.0), "", "")
    return table


def _caption(summary: Mapping[str, float]) -> str:
    return (
        f"{summary['steps']:.0f} steps, {summary['tokens']:.0f} rollout tokens, "
        f"{summary['tokens_per_second']:.0f} per second; "
        f"{percent(summary['kept_share'])} of them carried loss, "
        f"which allows at most {summary['ceiling']:.2f}× the speed"
    )


def saturation_sentence(found: Saturation) -> str:
    """Whether the loss had stopped falling, with the slope test's numbers."""
    verdict = "the loss has stopped falling" if found.saturated else "the loss may still fall"
    return (
        f"saturation: {verdict}: over the last {found.num_steps} steps it fell by {percent(found.fall)} "
        f"[{percent(found.low)}, {percent(found.high)}] of its level; over {found.horizon} more its slope "
        f"would bring at most {percent(max(found.still_high, 0.0))}"
    )
