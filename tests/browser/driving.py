"""A headless Chromium for tests: empty profile, console and network recorded, nothing fetched from anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync", "force-device-scale-factor=1", "window-size=1280,1000")
SCREENSHOTS = Path(__file__).parents[2] / "artifacts"


def start(profile: Path) -> webdriver.Chrome:
    """A browser with its own empty profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
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
    wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def await_data(driver: webdriver.Chrome, key: str, wanted: str | None = None) -> None:
    """Wait until the page has marked itself with this key, or with this value of it."""
    wait = """const [key, wanted, done] = arguments, look = () => { const now = document.documentElement.dataset[key];
        (wanted === null ? now : now === wanted) ? done(true) : setTimeout(look, 20); }; look();"""
    assert driver.execute_async_script(wait, key, wanted)


def settle(driver: webdriver.Chrome, theme: str, width: int) -> None:
    """Wait until every chart is drawn for this theme and width."""
    await_data(driver, "drawn", f"{theme} {width}")


def visit(driver: webdriver.Chrome, url: str) -> None:
    """Open a report and wait until its charts are drawn."""
    drain(driver)
    driver.get(url)
    await_data(driver, "ready", "yes")


def drain(driver: webdriver.Chrome) -> tuple[list[dict[str, Any]], list[str]]:
    """(console messages, addresses requested) since the last call."""
    console, requested = driver.get_log("browser"), []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            requested.append(message["params"].get("request", message["params"])["url"])
    return console, requested


def screenshot(driver: webdriver.Chrome, name: str) -> None:
    """Keep a picture among the artefacts."""
    SCREENSHOTS.mkdir(exist_ok=True)
    driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))
