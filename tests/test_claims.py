"""Every number that README's and the results pages' tables claim stands in a file of docs/results that names its maker.

A number holds if a JSON file that its row links to has a value that rounds to it (as it stands, in per cent, or per
thousand), or, for `×`, two values of one name whose quotient does.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
NUMBER = re.compile(r"(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?")
SCALES = (1, 100, 1000, 0.001)


def values(content: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document with the name of its field."""
    if isinstance(content, dict):
        for key, part in content.items():
            yield from values(part, str(key))
    elif isinstance(content, list):
        for part in content:
            yield from values(part, name)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield name, abs(float(content))


def rounds_to(value: float, shown: str) -> bool:
    if "e" in shown:
        return float(f"{value:.{len(shown.partition('.')[2].split('e')[0])}e}") == float(shown)
    return round(value, len(shown.partition(".")[2])) == float(shown)


def claims() -> list[tuple[str, str, tuple[str, ...]]]:
    """(page and row, result, files) of the evidence tables."""
    found = []
    for page in (ROOT / "README.md", RESULTS / "README.md"):
        for line in page.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            files = re.findall(r"\(((?:docs/results/)?[\w./]+\.json)\)", cells[-1])
            if line.startswith("|") and len(cells) == 3 and files:
                found.append((cells[0], cells[1], tuple(Path(file).name for file in files)))
    return found


@pytest.mark.parametrize(("what", "result", "files"), claims(), ids=lambda value: str(value)[:60])
def test_a_claim_stands_in_its_file(what, result, files):
    by_name = defaultdict(list)
    for file in files:
        for name, value in values(json.loads((RESULTS / file).read_text())):
            by_name[name].append(value)
    known = {value * scale for own in by_name.values() for value in own for scale in SCALES}
    if "×" in result:
        known |= {a / b for own in by_name.values() if len(own) < 50 for a in own for b in own if b}
    for shown in NUMBER.findall(result):
        plain = shown.replace(",", "")
        assert any(rounds_to(value, plain) for value in known), f"{what}: {shown} is not in {', '.join(files)}"


def test_rows_of_evidence_name_a_file():
    for page in (ROOT / "README.md", RESULTS / "README.md"):
        rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and NUMBER.search(line)]
        assert all(re.search(r"\.(json|md)\)", row) for row in rows), page
    assert len(claims()) > 30


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_its_maker(path):
    made = json.loads(path.read_text())["made_by"]
    assert re.match(r"\d+\.\d+", made["rocktokens"])
    assert made.get("commit") or made.get("landed")


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_results_says_which_version_made_it(page):
    assert re.search(r"version[s]? 0\.\d", "\n".join(page.read_text().splitlines()[:6]))
