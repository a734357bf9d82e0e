"""Pages of `rocktokens view` in a real browser: no page breaks its own policy, and the live page follows a training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import drain, screenshot, size
from forking import ending, fork
from report_fixture import make_run
from selenium.webdriver.common.by import By
from small_runs import save_pair

from rocktokens import cli
from rocktokens.report.build import report
from rocktokens.report.view import Viewer

STEPS = 30


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Viewer]:
    server = Viewer(folder, port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("served")
    for name, seed in (("one", 0), ("two", 1)):
        make_run(home / name, prompts=6, seed=seed)
        report(home / name)
    return home


def severe(driver) -> list[dict]:
    return [entry for entry in drain(driver)[0] if entry["level"] == "SEVERE"]


def test_no_page_breaks_its_own_policy(driver, folder):
    size(driver, 1280)
    with serving(folder) as server:
        for page in ("", "compare?a=one&b=two", "run/one/rollouts", "run/one/live", "nowhere"):
            drain(driver)
            driver.get(server.url + page)
            style = driver.execute_script("return getComputedStyle(document.querySelector('h1')).fontFamily")
            assert "Charter" in style, "the stylesheet is in force"
            found = [entry for entry in severe(driver) if "404" not in entry["message"]]
            assert found == [], page


def test_a_served_report_draws_its_charts_and_a_foreign_one_runs_nothing(driver, folder, tmp_path):
    size(driver, 1280)
    with serving(folder) as server:
        driver.get(f"{server.url}run/one/report.html")
        wait = """const done = arguments[0], look = () => document.documentElement.dataset.ready
            ? done(document.documentElement.dataset.ready) : setTimeout(look, 20); look();"""
        assert driver.execute_async_script(wait) == "yes"
        assert severe(driver) == []
    make_run(tmp_path / "evil", stages="detect", prompts=4)
    page = (
        "<!doctype html><html><body><img src=x onerror='window.ran=1'><script>window.ran = 1</script>old</body></html>"
    )
    (tmp_path / "evil" / "report.html").write_text(page)
    with serving(tmp_path) as server:
        driver.get(f"{server.url}run/evil/report.html")
        assert driver.execute_script("return window.ran") is None
        assert "was not written by this version" in driver.find_element(By.TAG_NAME, "body").text
    drain(driver)


def test_the_live_page_follows_a_real_training(driver, tmp_path):
    """A training in a process of its own; the page shows a step in the middle and then the last one, by itself."""
    pair, prompts = save_pair(tmp_path / "pair")
    run = tmp_path / "runs" / "run"
    flags = ["--pair.student", pair.student, "--pair.teacher", pair.teacher, "--prompts.source", prompts.source]
    flags += ["--prompts.checker", "exact", "--problems", "4", "--steps", str(STEPS), "--prompts-per-step", "4"]
    flags += ["--max-new-tokens", "8", "--telemetry-every", "2", "--evaluate-every", "10", "--keep", "1"]
    (tmp_path / "runs").mkdir()
    training = fork(lambda: cli.main(["distill", str(run), *flags]), tmp_path / "training.log")
    try:
        with serving(tmp_path / "runs") as server:
            deadline = time.monotonic() + 120
            while not (run / "training.parquet").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            size(driver, 1280)
            driver.get(f"{server.url}run/run/live")
            seen = """const [least, done] = arguments, go = () => Number(document.documentElement.dataset.step) >= least
                ? done(Number(document.documentElement.dataset.step)) : setTimeout(go, 50); go();"""
            first = driver.execute_async_script(seen, 1)
            last = driver.execute_async_script(seen, STEPS)
            assert first < last == STEPS
            assert driver.find_elements(By.CSS_SELECTOR, "#newest .tokens .t")
            assert driver.find_elements(By.CSS_SELECTOR, "#accuracy circle")
            assert severe(driver) == []
            screenshot(driver, "live_training")
    finally:
        status = ending(training)
    assert status == 0, (tmp_path / "training.log.err").read_text()[-500:]
