"""The card and its states, the viewer's top tokens, slider and links, tables, and the live page, in a real browser."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time

import pyarrow as pa
import pytest
from driving import drain, prefer, screenshot, settle, size, visit
from report_fixture import make_run
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from rocktokens.facts import Facts
from rocktokens.report.build import REPORT, report
from rocktokens.report.card import LABELS
from rocktokens.report.verdict import verdict
from rocktokens.report.view import Viewer
from rocktokens.run import open_run


def ready(driver) -> None:
    """Wait until the viewer has unpacked its rollouts."""
    wait = """const done = arguments[0], look = () => document.documentElement.dataset.viewer
        ? done(true) : setTimeout(look, 20); look();"""
    assert driver.execute_async_script(wait)


def rewrite(run, name: str, make) -> None:
    run.write(name, pa.Table.from_pylist([make(row) for row in run.read(name).to_pylist()]))
    run.finish("score", run.facts("score"))  # records the new file


def frozen(word: str, delta: float):
    known = {"verdict": word, "delta": delta, "delta_low": delta - 0.01, "delta_high": delta + 0.01}
    return lambda run: rewrite(
        run, "compare_summary", lambda row: {**row, **known} if row["regime"].startswith("freeze") else row
    )


def without(*tables: str, pair: bool = True):
    def change(run) -> None:
        for name in tables:
            (run.path / f"{name}.parquet").unlink()
        for stage in ("compare", "knockout", "graft"):
            run.reopen(stage)
        if not pair:
            run.manifest["config"].pop("pair")
            run.save()

    return change


CAUSAL = ("compare", "compare_summary", "census", "knockouts", "grafts")
STATES = {
    "skip": frozen("unchanged", -0.001),
    "keep": frozen("costs", -0.05),
    "cannot tell": frozen("undecided", -0.02),
    "no rocks": lambda run: rewrite(
        run, "types", lambda row: row | {f"in_{name}": False for name in ("certified", "context", "burden", "excess")}
    ),
    "unstable": lambda run: rewrite(run, "types", lambda row: {**row, "confirmed": False}),
    "imported": without(*CAUSAL, pair=False),
    "not run": without(*CAUSAL),
}


@pytest.mark.parametrize("state", STATES)
def test_the_card_has_every_state(driver, reports, tmp_path, state):
    shutil.copytree(reports["whole"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    STATES[state](run)
    report(run.path, again=True)
    driver.get("about:blank")  # a page that is left would draw its charts again for the other width
    size(driver, 390, 844)
    prefer(driver, "light")
    visit(driver, (run.path / REPORT).as_uri())
    card = driver.find_element(By.CSS_SELECTOR, "#verdict .card")
    assert card.get_attribute("data-state") == state
    assert card.find_element(By.CSS_SELECTOR, ".line .badge").text == LABELS[state]
    assert len(card.find_elements(By.CSS_SELECTOR, ".tile")) == 4
    assert driver.find_element(By.TAG_NAME, "h1").text == verdict(Facts(run)).title
    commands = [item.text for item in card.find_elements(By.CSS_SELECTOR, ".paste")]
    assert bool(commands) == (state == "not run")
    assert [entry for entry in drain(driver)[0] if entry["level"] == "SEVERE"] == []
    # Colours change no widths: one state is enough to look at them on a phone.
    looks = [("light", 390), *([("dark", 390)] if state == "skip" else []), ("light", 1280)]
    for scheme, width in looks:
        prefer(driver, scheme)
        size(driver, width, 844)
        settle(driver, scheme, width)
        wide = driver.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, f"the page is {wide} pixels too wide at {width}"
    screenshot(driver, f"card_{state.replace(' ', '_')}")


def test_top_tokens_are_those_of_parquet(page, reports):
    ready(page)
    run = open_run(reports["whole"])
    name = page.execute_script("return rocktokens.viewer.rollouts[0].id")
    last = run.steps()[-1]
    rows = run.query(
        f"select * from top_tokens where rollout_id = '{name}' and step = {last} order by position"
    ).to_pylist()
    for place in (0, 3, len(rows) - 1):
        page.execute_script("document.querySelectorAll('#tokens .t')[arguments[0]].focus()", place)
        cells = page.find_elements(By.CSS_SELECTOR, "#panel .top td[data-logprob]")
        assert len(cells) == 10
        for who, offset in (("student", 0), ("teacher", 1)):
            ids = [int(cell.get_attribute("data-token")) for cell in cells[offset::2]]
            values = [float(cell.get_attribute("data-logprob")) for cell in cells[offset::2]]
            assert ids == rows[place][f"{who}_top_ids"]
            assert values == [pytest.approx(value, rel=6e-3) for value in rows[place][f"{who}_top_logprobs"]]
            shown = [cell.text for cell in cells[offset::2]]
            assert shown[0].startswith(f"{100 * math.exp(values[0]):.0f}")


def test_the_slider_shows_the_same_text_under_every_checkpoint(page, reports):
    ready(page)
    run = open_run(reports["whole"])
    name = page.execute_script("return rocktokens.viewer.rollouts[0].id")
    text = page.find_element(By.ID, "tokens").text
    page.execute_script("document.querySelectorAll('#tokens .t')[2].focus()")
    for place, step in enumerate(run.steps()):
        page.execute_script(
            "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            place,
        )
        assert page.find_element(By.ID, "step-name").text == f"step {step}"
        assert page.find_element(By.ID, "tokens").text == text
        kl = run.query(f"select kl from occurrences where rollout_id = '{name}' and step = {step} and position = 2")
        shown = page.find_element(By.CSS_SELECTOR, '#panel [data-key="kl"]').text
        assert float(shown) == pytest.approx(kl["kl"][0].as_py(), rel=1e-3)
        assert len(page.find_elements(By.CSS_SELECTOR, "#panel .top td[data-logprob]")) == 10


def test_a_link_opens_the_token_it_was_made_for(page, reports):
    ready(page)
    name = page.execute_script("return rocktokens.viewer.rollouts[7].id")
    address = (reports["whole"] / REPORT).as_uri()
    page.get("about:blank")
    page.get(f"{address}#viewer:rollout={name.replace('#', '%23')}&position=5&step=50")
    ready(page)
    assert name in page.find_element(By.ID, "outcome").text
    assert page.switch_to.active_element.get_attribute("data-index") == "5"
    assert page.find_element(By.ID, "step-name").text == "step 50"
    page.execute_script("document.querySelectorAll('#tokens .t')[9].focus()")
    assert "position=9" in page.current_url
    page.execute_script("document.getElementById('link').click()")
    assert "position=9" in page.find_element(By.ID, "link").get_attribute("data-copied")


def test_a_chip_in_a_table_leads_to_its_occurrences(page):
    ready(page)
    chip = page.find_element(By.CSS_SELECTOR, "#rocks a.token")
    token = chip.get_attribute("href").rpartition("type=")[2]
    page.execute_script("arguments[0].click()", chip)
    time.sleep(0.2)
    assert "marked" in page.find_element(By.ID, "count").text
    marked = page.find_element(By.CSS_SELECTOR, "#tokens .hit")
    page.execute_script("arguments[0].focus()", marked)
    assert page.find_element(By.CSS_SELECTOR, '#panel [data-key="token_id"]').text == token


def test_sorting_by_cost_puts_the_costliest_rollout_first(page):
    ready(page)
    Select(page.find_element(By.ID, "order")).select_by_value("cost")
    first = page.find_element(By.ID, "outcome").text
    costliest = page.execute_script("return rocktokens.viewer.rollouts.reduce((a, b) => b.cost > a.cost ? b : a).id")
    assert costliest in first
    assert page.find_elements(By.CSS_SELECTOR, "#strip .bar.rock")


def test_what_a_selector_would_keep_is_laid_over(page):
    ready(page)
    choice = Select(page.find_element(By.ID, "overlay"))
    title = next(item.text for item in choice.options if item.text.startswith("freeze_rocks"))
    choice.select_by_visible_text(title)
    dropped = page.find_elements(By.CSS_SELECTOR, "#tokens .dropped")
    assert dropped
    assert len(dropped) == len(page.find_elements(By.CSS_SELECTOR, "#tokens .rock"))


def test_continuations_of_the_census_stand_in_place(page):
    ready(page)
    Select(page.find_element(By.ID, "source")).select_by_value("census")
    sampled = [item.text for item in page.find_elements(By.CSS_SELECTOR, "#tokens .t")]
    other = Select(page.find_element(By.ID, "other"))
    assert "banned" in other.options[1].text
    other.select_by_index(1)
    changed = page.find_elements(By.CSS_SELECTOR, "#tokens .t")
    from_here = [place for place, item in enumerate(changed) if "other" in item.get_attribute("class").split()]
    assert [item.text for item in changed][: from_here[0]] == sampled[: from_here[0]]
    assert "banned, other from position" in page.find_element(By.ID, "outcome").text
    Select(page.find_element(By.ID, "source")).select_by_value("rollouts")


def test_tables_sort_filter_copy_and_show_that_they_go_on(page):
    block = page.find_element(By.CSS_SELECTOR, "#knockouts .table")
    head = next(item for item in block.find_elements(By.CSS_SELECTOR, "th button") if item.text.startswith("Δ"))
    place = page.execute_script("return arguments[0].closest('th').cellIndex", head)
    page.execute_script("arguments[0].click()", head)
    values = [
        float(row.text.split(" ")[0].replace("−", "-").replace("+", ""))
        for row in block.find_elements(By.CSS_SELECTOR, f"tbody td:nth-child({place + 1})")
    ]
    assert values == sorted(values, reverse=True)
    page.execute_script("arguments[0].click()", head)
    assert page.execute_script("return arguments[0].closest('th').getAttribute('aria-sort')", head) == "ascending"
    sift = block.find_element(By.CSS_SELECTOR, ".sift")
    sift.send_keys("pillar")
    shown = [row for row in block.find_elements(By.CSS_SELECTOR, "tbody tr") if row.is_displayed()]
    assert shown
    assert all("Pillar" in row.text for row in shown)
    copy = block.find_element(By.CSS_SELECTOR, '[data-copy="ids"]')
    page.execute_script("arguments[0].click()", copy)
    time.sleep(0.2)
    assert copy.get_attribute("data-copied") == ",".join(row.get_attribute("data-id") for row in shown)
    sift.clear()
    sift.send_keys(" ")
    sift.send_keys("\b")
    size(page, 390, 844)
    settle(page, "light", 390)
    cue = page.find_element(By.CSS_SELECTOR, "#rocks .table .cue")
    assert cue.is_displayed()
    assert page.find_element(By.CSS_SELECTOR, "#rocks .table").get_attribute("data-more") == "right"
    page.execute_script("const s = document.querySelector('#rocks .scroll'); s.scrollLeft = s.scrollWidth")
    time.sleep(0.2)
    assert page.find_element(By.CSS_SELECTOR, "#rocks .table").get_attribute("data-more") == "left"
    assert not cue.is_displayed()


def test_axes_are_written_out(page):
    ticks = page.execute_script(
        "return [...document.querySelectorAll('.chart[data-figure=\"funnel\"] .xtick text')].map((t) => t.textContent)"
    )
    assert [float(tick) for tick in ticks] == sorted(float(tick) for tick in ticks)
    everything = page.execute_script(
        "return [...document.querySelectorAll('.xtick text, .ytick text')].map((t) => t.textContent)"
    )
    assert not [tick for tick in everything if "µ" in tick]


def test_the_live_page_follows_a_training_record(driver, tmp_path):
    run = make_run(tmp_path / "run", prompts=6)
    table = run.read("training")
    run.write("training", table.slice(0, 20))
    with run.part_writer(10, folder="telemetry") as writer:
        writer.write(run.occurrences("select * exclude (step) from occurrences where step = 100"))
    server = Viewer(tmp_path, port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        size(driver, 1280)
        driver.get(f"{server.url}run/run/live")
        look = """const [wanted, done] = arguments, go = () => document.documentElement.dataset.step === wanted
            ? done(true) : setTimeout(go, 50); go();"""
        assert driver.execute_async_script(look, str(table["step"][19].as_py()))
        assert driver.find_elements(By.CSS_SELECTOR, "#newest .t.rock")
        run.write("training", table)
        assert driver.execute_async_script(look, str(table["step"][len(table) - 1].as_py()))
        assert driver.find_elements(By.CSS_SELECTOR, '#loss path[data-series="rocks"]')
        assert [entry for entry in drain(driver)[0] if entry["level"] == "SEVERE"] == []
        screenshot(driver, "live")
        driver.get(f"{server.url}run/run/rollouts")
        ready(driver)
        assert json.loads(driver.execute_script("return JSON.stringify(rocktokens.viewer.total)")) == 24
    finally:
        server.shutdown()
        server.server_close()
