"""Killed, or out of space, at every file operation of a small study: the same command completes the same tables."""

from __future__ import annotations

import pytest
from faults import attack

from rocktokens.study import STAGES

SIZES = (0, 200, 2_000, 20_000, 60_000)
"""Bytes that a file may have: from none to nearly a checkpoint of the tiny student."""


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["kills", "full disk"])
def test_faults_at_file_operations(faults, kind):
    assert all(own.events for own in faults.states.values())
    attack(faults, kind, faults.points(kind))


@pytest.mark.campaign
def test_files_that_may_not_grow(faults):
    """A write that fails in the middle, inside Parquet, safetensors and torch too."""
    kind = "files that may not grow"
    attack(faults, kind, [{"kind": kind, "stage": stage, "at": size} for stage in STAGES for size in SIZES])
