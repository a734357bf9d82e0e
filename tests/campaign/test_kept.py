"""Cases that once failed in a campaign, tried again in every test run."""

from __future__ import annotations

import json

import attacks
import pytest
import test_artefacts
import test_settings

CASES = json.loads(attacks.KEPT.read_text()) if attacks.KEPT.exists() else []
RETRY = {
    "wrong settings": test_settings.try_one,
    "damaged files": test_artefacts.try_one,
    "wrong values in run.json": test_artefacts.try_manifest,
}


@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] in RETRY], ids=str)
def test_a_case_that_failed_once_holds(case, finished, tmp_path):
    run = attacks.copy_of(finished, tmp_path / "run")
    assert RETRY[case["kind"]](case, run) is None
