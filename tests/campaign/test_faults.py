"""Killed at every file operation of a small study: the same command goes on to the same tables."""

from __future__ import annotations

import pytest
from faults import attack


@pytest.mark.campaign
def test_kills(faults):
    attack(faults, "kills", faults.points("kills"))


@pytest.mark.campaign
def test_every_stage_has_fault_points(faults):
    assert all(own.events for own in faults.states.values())
