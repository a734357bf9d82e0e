"""The verdict and the rocks' table for the trackers that a run logs to: W&B, TensorBoard, trackio.

Training series go through transformers' own callbacks; this sends what is known only at the end. Tables where the
tracker takes tables, text where it takes text, and the card as a picture where a Chromium is at hand to draw it. A
package that is not installed is one sentence.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.facts import Facts
from rocktokens.report.images import picture
from rocktokens.report.notebook import run_html
from rocktokens.report.verdict import verdict
from rocktokens.run import Run
from rocktokens.show import NONE, number, visible

log = logging.getLogger(__name__)

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
COLUMNS = ("token", "token_id", "class", "count", "loss_pre", "loss_post")
MAX_ROWS = 200


def require_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed, before anything has run."""
    for name in names:
        package = PACKAGES.get(name)
        if package is not None and find_spec(package) is None:
            raise ConfigError(f"the tracker {name} needs the package {package}: pip install {package}, or leave it out")


def rock_rows(facts: Facts) -> list[list[Any]]:
    """One row per declared token, in the order of `COLUMNS`."""
    rows = facts.rocks[:MAX_ROWS]
    return [[visible(row["token"]), *(row.get(name) for name in COLUMNS[1:])] for row in rows]


def markdown(facts: Facts) -> str:
    """The verdict and the rocks as Markdown, for trackers that take text."""
    found = verdict(facts)
    tiles = [f"- {tile.question} **{tile.value}** ({tile.chip}). {tile.detail}" for tile in found.tiles]
    table = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rock_rows(facts):
        table.append(f"| {' | '.join(_cell(value) for value in row)} |")
    return "\n".join([f"**{found.title}**", "", found.line, "", *tiles, "", *(table if facts.rocks else [])])


def _cell(value: object) -> str:
    if value is None:
        return NONE
    return number(value, 3) if isinstance(value, float) else str(value).replace("|", "\\|")


def send_findings(run: Run, names: Sequence[str], *, folder: str | None = None) -> list[str]:
    """Send the verdict and the rocks' table to every named tracker.

    Args:
        run: The run.
        names: Trackers, as `--distill.report-to` names them.
        folder: Where TensorBoard writes; unset: tensorboard/ in the run.

    Returns:
        The trackers that took them; what went wrong with another is logged in one sentence and stops nothing.
    """
    facts, took = Facts(run), []
    ways: dict[str, Callable[[], None]] = {
        "tensorboard": lambda: _to_tensorboard(facts, folder or str(run.path / "tensorboard")),
        "wandb": lambda: _to_wandb(facts),
        "trackio": lambda: _to_trackio(facts),
    }
    for name in names:
        if name not in ways:
            continue
        try:
            ways[name]()
            took.append(name)
        except Exception as error:  # other people's packages raise what they like, and the study is done
            log.warning("%s did not take the findings: %s", name, str(error).splitlines()[0] if str(error) else error)
    return took


def card_picture(facts: Facts) -> Any | None:
    """The verdict card as a Pillow image; None where no browser or no Pillow is installed."""
    if find_spec("PIL") is None:
        return None
    page = f'<!doctype html><meta charset="utf-8"><body style="margin:24px;background:#fff">{run_html(facts.run)}'
    drawn = picture(page)
    return None if drawn is None else import_module("PIL.Image").open(io.BytesIO(drawn)).convert("RGB")


def _to_tensorboard(facts: Facts, folder: str) -> None:
    writer = import_module("torch.utils.tensorboard").SummaryWriter(folder)
    writer.add_text("rocktokens/verdict", markdown(facts))
    writer.add_scalar("rocktokens/rocks", len(facts.rocks))
    card = card_picture(facts)
    if card is not None:
        writer.add_image("rocktokens/card", np.asarray(card), dataformats="HWC")
    writer.close()


def _to_wandb(facts: Facts) -> None:
    wandb = import_module("wandb")
    own = wandb.run is None
    session = wandb.init(project="rocktokens", name=facts.name) if own else wandb.run
    table = wandb.Table(columns=list(COLUMNS), data=rock_rows(facts))
    card = card_picture(facts)
    pictures = {} if card is None else {"rocktokens/card": wandb.Image(card)}
    session.log({"rocktokens/rocks": table, "rocktokens/verdict": wandb.Html(run_html(facts.run)), **pictures})
    if own:
        session.finish()


def _to_trackio(facts: Facts) -> None:
    trackio, pandas = import_module("trackio"), import_module("pandas")
    trackio.init(project="rocktokens", name=facts.name)
    frame = pandas.DataFrame(rock_rows(facts), columns=list(COLUMNS))
    card = card_picture(facts)
    pictures = {} if card is None else {"rocktokens/card": trackio.Image(card)}
    line = verdict(facts).line
    trackio.log({"rocktokens/rocks": trackio.Table(dataframe=frame), "rocktokens/verdict": line, **pictures})
    trackio.finish()
