"""A headless Chromium for tests: empty profile, console and network recorded, nothing fetched from anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)
SCREENSHOTS = Path(__file__).parents[2] / "artifacts"


def start(profile: Path, width: int = 1280, height: int = 1000) -> webdriver.Chrome:
    """A browser with its own empty profile."""
    options = webdriver.ChromeOptions()
    assert CHROMIUM
    assert DRIVER
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(120)
    return driver


def size(driver: webdriver.Chrome, width: int, height: int = 1000) -> None:
    """The viewport, exactly; a window has a least width."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: webdriver.Chrome, scheme: str) -> None:
    """What the reader's system asks for: light or dark; and no motion, so that a click meets what it aims at."""
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def settle(driver: webdriver.Chrome, theme: str, width: int) -> None:
    """Wait until every chart is drawn for this theme and width."""
    wait = """const [wanted, done] = arguments, look = () => document.documentElement.dataset.drawn === wanted
        ? done(true) : setTimeout(look, 20); look();"""
    assert driver.execute_async_script(wait, f"{theme} {width}")


def visit(driver: webdriver.Chrome, url: str) -> None:
    """Open a report and wait until its charts are drawn."""
    drain(driver)
    driver.get(url)
    wait = """const done = arguments[0], look = () => document.documentElement.dataset.ready
        ? done(document.documentElement.dataset.ready) : setTimeout(look, 20); look();"""
    assert driver.execute_async_script(wait) == "yes"


def drain(driver: webdriver.Chrome) -> tuple[list[dict[str, Any]], list[str]]:
    """(console messages, addresses requested) since the last call."""
    console = driver.get_log("browser")
    requested = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            requested.append(message["params"].get("request", message["params"])["url"])
    return console, requested


def screenshot(driver: webdriver.Chrome, name: str, *, whole: bool = False) -> Path:
    """Keep a picture among the artefacts."""
    import base64

    SCREENSHOTS.mkdir(exist_ok=True)
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
    path = SCREENSHOTS / f"{name}.png"
    if whole:
        high = driver.execute_script("return document.documentElement.scrollHeight")
        wide = driver.execute_script("return document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": wide, "height": high, "scale": 1}
        shot = driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
    path.write_bytes(base64.b64decode(shot["data"]))
    return path
