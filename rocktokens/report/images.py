"""Figures as SVG and PNG files for papers, drawn by the same Plotly in a headless Chromium where there is one.

The browser opens a copy of the report from disk with an empty profile and no network, draws every figure, and hands
the images back through the page's own document.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rocktokens.report.policy import content_hash

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=60000",
    "--dump-dom",
)
SECONDS = 300
# Plotly names clip paths at random; with a counter in its place the same figure gives the same file.
DRAW = """
window.imagesOnly = true;
let drawn = 0;
Math.random = () => (drawn = (drawn * 16807 + 11) % 2147483647) / 2147483647;
addEventListener("load", async () => {
  const wait = (ms) => new Promise((go) => setTimeout(go, ms));
  while (!document.documentElement.dataset.ready) await wait(20);
  const images = {};
  for (const name of NAMES) for (const format of ["svg", "png"]) {
    drawn = 1;
    images[name + "." + format] = await rocktokens.image(name, format);
  }
  const out = document.createElement("pre");
  out.id = "images";
  out.textContent = btoa(JSON.stringify(images));
  document.body.replaceChildren(out);
});
"""


def browser() -> str | None:
    """A Chromium on this machine; ROCKTOKENS_BROWSER names another, or none when empty."""
    named = os.environ.get("ROCKTOKENS_BROWSER")
    if named is not None:
        return shutil.which(named) if named else None
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def export(report: Path, folder: Path, names: list[str]) -> tuple[int, str | None]:
    """(files written, why not). The report's own buttons save the same images without any of this."""
    program = browser()
    if program is None:
        return 0, "no Chromium on this machine; install one and repeat, or use the SVG and PNG buttons in the report"
    script = DRAW.replace("NAMES", json.dumps(names))
    with tempfile.TemporaryDirectory(prefix="rocktokens-figures-") as directory:
        page = Path(directory) / "figures.html"
        page.write_text(_with_script(report.read_text(encoding="utf-8"), script), encoding="utf-8")
        command = [program, *FLAGS, f"--user-data-dir={directory}/profile", page.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return 0, f"{Path(program).name} gave no answer ({type(error).__name__})"
    found = re.search(r'<pre id="images">([A-Za-z0-9+/=]*)</pre>', done.stdout)
    if not found:
        return 0, f"{Path(program).name} drew nothing (exit status {done.returncode})"
    images = json.loads(base64.b64decode(found[1]))
    folder.mkdir(parents=True, exist_ok=True)
    for name, url in images.items():
        (folder / name).write_bytes(_decoded(url))
    return len(images), None


def picture(html: str, width: int = 900, height: int = 560) -> bytes | None:
    """A page of our own as PNG; None without a Chromium, or where it draws nothing. No script runs in it."""
    program = browser()
    if program is None:
        return None
    with tempfile.TemporaryDirectory(prefix="rocktokens-picture-") as directory:
        page, target = Path(directory) / "page.html", Path(directory) / "page.png"
        page.write_text(html, encoding="utf-8")
        flags = [flag for flag in FLAGS if flag != "--dump-dom"]
        sized = [f"--window-size={width},{height}", f"--screenshot={target}", f"--user-data-dir={directory}/profile"]
        try:
            subprocess.run([program, *flags, *sized, page.as_uri()], capture_output=True, timeout=SECONDS, check=False)
            return target.read_bytes()
        except (OSError, subprocess.TimeoutExpired):
            return None


def _with_script(html: str, script: str) -> str:
    """The report with one more script that its policy allows."""
    allowed = content_hash(script).replace("'", "&#x27;")
    html = html.replace("script-src ", f"script-src {allowed} ", 1)
    return html.replace("<script>", f"<script>{script}</script><script>", 1)


def _decoded(url: str) -> bytes:
    from urllib.parse import unquote_to_bytes

    head, _, body = url.partition(",")
    return base64.b64decode(body) if head.endswith("base64") else unquote_to_bytes(body)
