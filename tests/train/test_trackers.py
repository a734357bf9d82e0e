"""Our series in a tracker that `report_to` names; TensorBoard, for it writes files that can be read back."""

from __future__ import annotations

import pytest
from distilling import pair, prompts

from rocktokens import Run
from rocktokens.train.distill import distill
from rocktokens.train.settings import DistillConfig

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="runs where tensorboard is installed"
)


def test_rocks_and_rest_go_to_the_tracker_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run = Run.create(tmp_path / "run")
    config = DistillConfig(steps=3, prompts_per_step=2, max_new_tokens=8, keep=1, report_to=("tensorboard",))
    distill(config, pair(), prompts(), run, rocks=range(3, 15), show=False)
    found = accumulator.EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    found.Reload()
    tags = {tag.removeprefix("train/"): tag for tag in found.Tags()["scalars"]}
    rows = [row for row in run.read("training").to_pylist() if row["step"] > 0]
    for series, column in (("rocks/loss", "loss_rocks"), ("rest/loss", "loss_rest"), ("kept_share", "kept_share")):
        assert [event.step for event in found.Scalars(tags[series])] == [1, 2, 3]
        values = [event.value for event in found.Scalars(tags[series])]
        assert values == pytest.approx([row[column] for row in rows], rel=1e-4)
