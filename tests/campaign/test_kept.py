"""Cases that once failed in a campaign, tried again in every test run."""

from __future__ import annotations

import json

import attacks
import pytest
import test_artefacts
import test_foreign
import test_wrong_settings
from small_runs import save_pair

CASES = json.loads(attacks.KEPT.read_text()) if attacks.KEPT.exists() else []
RETRY = {
    "wrong settings": test_wrong_settings.try_one,
    "damaged files": test_artefacts.try_one,
    "wrong values in run.json": test_artefacts.try_manifest,
}
FOREIGN = "foreign files"
FAULTS = ("kills", "full disk", "files that may not grow")


@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] in (*RETRY, *FAULTS, FOREIGN)], ids=str)
def test_a_case_that_failed_once_holds(case, request, tmp_path):
    if case["kind"] in FAULTS:
        assert request.getfixturevalue("faults").try_one(case) is None
    elif case["kind"] == FOREIGN:
        assert test_foreign.try_one(case, tmp_path, save_pair(tmp_path / "pair")) is None
    else:
        run = attacks.copy_of(request.getfixturevalue("finished"), tmp_path / "run")
        assert RETRY[case["kind"]](case, run) is None
