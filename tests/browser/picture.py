"""Take the README's picture: the rollout viewer of a run's report.

python tests/browser/picture.py RUN docs/viewer.png
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from driving import prefer, settle, size, start, visit

MARGIN = 24  # pixels of the page's own ground on either side


def main(run: str, picture: str) -> None:
    """Open the report from disk and keep its viewer."""
    with tempfile.TemporaryDirectory() as profile:
        driver = start(Path(profile))
        try:
            size(driver, 1120, 900)
            prefer(driver, "light")
            visit(driver, (Path(run).resolve() / "report.html").as_uri())
            settle(driver, "light", 1120)
            box = driver.execute_script(
                "const box = document.getElementById('viewer').getBoundingClientRect();"
                "return [box.x + scrollX, box.y + scrollY, box.width, box.height]"
            )
            clip = {"x": box[0] - MARGIN, "y": box[1] + 1, "width": box[2] + 2 * MARGIN, "height": box[3], "scale": 2}
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
            Path(picture).write_bytes(base64.b64decode(shot["data"]))
        finally:
            driver.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
