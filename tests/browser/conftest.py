"""One browser and one set of reports for all tests here; without a browser they are skipped and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_once import made_once
from report_fixture import make_run

from rocktokens.report.stage import REPORT, report

REPORTS = {"whole": {}, "hostile": {"hostile": True, "prompts": 24}}
# The viewer as it is when a page has been opened: what a test chose is taken back without loading the page again.
AFRESH = """const set = (id, value, kind) => {
  const node = document.getElementById(id); node.value = value; node.dispatchEvent(new Event(kind)); };
set("step", document.getElementById("step").max, "input");
set("column", "kl", "change");
set("source", "rollouts", "change");
document.getElementById("clear").click();
document.activeElement.blur();
scrollTo(0, 0);"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a browser where there is none."""
    from driving import CHROMIUM, DRIVER

    skip = pytest.mark.skip(reason="no chromium and chromedriver; runs where Debian's are installed")
    for item in items:
        if not (CHROMIUM and DRIVER) and Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A headless Chromium."""
    from driving import start

    browser = start(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def reports(tmp_path_factory) -> dict[str, Path]:
    """Run directories with their reports."""

    def make(base: Path) -> None:
        for name, options in REPORTS.items():
            make_run(base / name, **options)
            report(base / name)

    base, _ = made_once(tmp_path_factory, "reports", make)
    return {name: base / name for name in REPORTS}


@pytest.fixture
def page(driver, reports):
    """The whole report, opened from disk on a wide light screen, with no filter set."""
    from driving import prefer, settle, size, visit

    size(driver, 1280)
    prefer(driver, "light")
    address = (reports["whole"] / REPORT).as_uri()
    if driver.current_url.partition("#")[0] != address:  # behind the # stands what the reader looks at
        visit(driver, address)
    driver.execute_script(AFRESH)
    settle(driver, "light", 1280)
    return driver
