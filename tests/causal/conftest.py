"""Runs of these tests name a checker of their own: the tests trust it."""

from __future__ import annotations

import pytest

from rocktokens.settings import granting


@pytest.fixture(autouse=True)
def _trusted_code():
    with granting("code"):
        yield
