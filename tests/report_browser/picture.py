"""Take the README's picture: the rollout viewer of a run's report.

python tests/report_browser/picture.py RUN docs/viewer.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from driving import prefer, settle, size, start, visit
from selenium.webdriver.common.by import By


def main(run: str, picture: str) -> None:
    """Open the report from disk and keep its viewer."""
    with tempfile.TemporaryDirectory() as profile:
        driver = start(Path(profile))
        try:
            size(driver, 1120, 900)
            prefer(driver, "light")
            visit(driver, (Path(run).resolve() / "report.html").as_uri())
            settle(driver, "light", 1120)
            driver.execute_script("document.getElementById('viewer').scrollIntoView()")
            Path(picture).write_bytes(driver.find_element(By.ID, "viewer").screenshot_as_png)
        finally:
            driver.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
