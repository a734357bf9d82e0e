"""One run with every stage and its report, for all tests here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from report_fixture import make_run

from rocktokens.facts import Facts
from rocktokens.report.stage import REPORT, report
from rocktokens.run import Run, open_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A run with every stage, reported; to be read only."""
    path = tmp_path_factory.mktemp("report") / "whole"
    make_run(path)
    report(path)
    return path


@pytest.fixture(scope="session")
def html(whole) -> str:
    return (whole / REPORT).read_text(encoding="utf-8")


@pytest.fixture
def facts(whole) -> Facts:
    return Facts.of(whole)


@pytest.fixture
def run(whole, tmp_path) -> Run:
    """A copy that a test may change."""
    shutil.copytree(whole, tmp_path / "run")
    return open_run(tmp_path / "run")
