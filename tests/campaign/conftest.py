"""The campaign runs when asked for: `make campaign`, or a tenth of it in .ci/run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from faults import Faults

from rocktokens.study import STAGES


@pytest.fixture(scope="session")
def faults(tmp_path_factory) -> Faults:
    """A small study stage by stage, with the number of its file operations."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def finished(faults) -> Path:
    """The same with every stage complete; attempts work on copies."""
    return faults.states[list(STAGES)[-1]].after


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, caplog):
    monkeypatch.setenv("ROCKTOKENS_BROWSER", "")
    caplog.set_level(logging.CRITICAL)
