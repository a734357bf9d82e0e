"""Out of space at every file operation of a small study: one sentence, and the same command goes on when there is."""

from __future__ import annotations

import pytest
from attacks import STAGES
from faults import attack

SIZES = (0, 200, 2_000, 20_000, 60_000)
"""Bytes that a file may have: from none to nearly a checkpoint of the tiny student."""


@pytest.mark.campaign
def test_full_disk(faults):
    attack(faults, "full disk", faults.points("full disk"))


@pytest.mark.campaign
def test_files_that_may_not_grow(faults):
    """A write that fails in the middle, inside Parquet, safetensors and torch too."""
    kind = "files that may not grow"
    attack(faults, kind, [{"kind": kind, "stage": stage, "at": size} for stage in STAGES for size in SIZES])
