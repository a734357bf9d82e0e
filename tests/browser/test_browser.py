"""What people see, in a real browser: card, top five, slider, deep link, sort, phone, dark, live."""

from __future__ import annotations

import math
import threading
import time

import pytest
from driving import await_data, drain, prefer, screenshot, settle, size, visit
from report_fixture import make_run
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from rocktokens.facts import Facts
from rocktokens.report.conclusions import LABELS, verdict
from rocktokens.report.stage import REPORT, report
from rocktokens.report.view import Viewer

# Text whose colour stands out too little from the first background behind it, as the browser computed them.
CONTRASTS = """
const luminance = ([r, g, b]) => { const f = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const background = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const c = channels(getComputedStyle(at).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement, style = getComputedStyle(node);
  if (!walker.currentNode.textContent.trim() || /SCRIPT|STYLE|OPTION/.test(node.tagName)) continue;
  if (node.closest("[disabled]") || !node.checkVisibility?.({ checkOpacity: true, checkVisibilityCSS: true })) continue;
  const ink = channels(node.closest("svg") ? style.fill : style.color);
  const a = luminance(ink), b = luminance(background(node));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push([node.outerHTML.slice(0, 80), ratio]);
}
return found;
"""
TOO_WIDE = """return [...document.querySelectorAll('main *')].filter((node) => {
    if (node.closest('.scroll, pre, svg, .chart, [role=tooltip]')) return false;
    return node.getBoundingClientRect().right > innerWidth + 0.5; }).map((node) => node.outerHTML.slice(0, 80))"""


def one(driver, selector: str):
    return driver.find_element(By.CSS_SELECTOR, selector)


def many(driver, selector: str) -> list:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def focus(driver, place: int) -> None:
    driver.execute_script("document.querySelectorAll('#tokens .t')[arguments[0]].focus()", place)


def severe(driver) -> list[dict]:
    return [entry for entry in drain(driver)[0] if entry["level"] == "SEVERE"]


def test_card_says_the_verdict_and_the_page_asks_nobody(driver, reports):
    """tests/report has all states of the card; hostile texts show as themselves and run nothing."""
    size(driver, 1280)
    prefer(driver, "light")
    visit(driver, (reports["hostile"] / REPORT).as_uri())
    found = verdict(Facts.of(reports["hostile"]))
    assert one(driver, "#verdict .card").get_attribute("data-state") == found.state
    assert one(driver, "#verdict .line .badge").text == LABELS[found.state]
    assert many(driver, "#verdict [data-fact=skipping]")
    assert one(driver, "h1").text == found.title
    driver.execute_script("window.scrollTo(0, document.body.scrollHeight)")
    chart = one(driver, '.chart[data-figure="funnel"]')
    driver.execute_script("arguments[0].focus()", chart)
    for _ in range(6):
        driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert driver.execute_script("return arguments[0].nextElementSibling.textContent", chart)
    console, requested = drain(driver)
    assert console == []
    asked = {url for url in requested if not url.startswith(("data:", "blob:", "chrome:"))}
    assert asked == {(reports["hostile"] / REPORT).as_uri()}
    assert driver.execute_script("return window.hacked") is None
    assert not many(driver, "main img, main b, main svg a")
    for shown in ('<img src=x onerror="window.hacked=1">', "<b>bold</b>", "{{data}}", "⟨U+202E⟩"):
        assert shown in one(driver, "#tokens").text


def test_viewer_shows_the_numbers_and_top_five_of_parquet(page, reports):
    await_data(page, "viewer")
    facts = Facts.of(reports["whole"])
    name, last = page.execute_script("return rocktokens.viewer.rollouts[0].id"), facts.steps[-1]
    where = f"where rollout_id = '{name}' and step = {last} order by position"
    scored, top = (facts.ask(f"select * from {table} {where}") for table in ("occurrences", "top_tokens"))
    for place in (0, 3, len(top) - 1):
        focus(page, place)
        for column in ("kl", "log_ratio", "teacher_logprob", "student_entropy", "grad_norm"):
            shown = one(page, f'#panel [data-key="{column}"]').text.replace("−", "-")
            assert float(shown) == float(f"{scored[place][column]:.4g}")
        assert (one(page, '#panel [data-key="rock"]').text != "no") == (scored[place]["token_id"] in facts.rock_ids)
        cells = many(page, "#panel .top td[data-logprob]")
        assert len(cells) == 10
        for who, offset in (("student", 0), ("teacher", 1)):
            values = [float(cell.get_attribute("data-logprob")) for cell in cells[offset::2]]
            assert [int(cell.get_attribute("data-token")) for cell in cells[offset::2]] == top[place][f"{who}_top_ids"]
            assert values == [pytest.approx(value, rel=6e-3) for value in top[place][f"{who}_top_logprobs"]]
            assert cells[offset].text.startswith(f"{100 * math.exp(values[0]):.0f}")
    # A continuation of the census stands in place.
    Select(one(page, "#source")).select_by_value("census")
    Select(one(page, "#other")).select_by_index(1)
    assert many(page, "#tokens .other")
    assert "banned, other from position" in one(page, "#outcome").text


def test_slider_shows_the_same_text_under_every_checkpoint(page, reports):
    await_data(page, "viewer")
    facts = Facts.of(reports["whole"])
    name, text = page.execute_script("return rocktokens.viewer.rollouts[0].id"), one(page, "#tokens").text
    focus(page, 2)
    move = "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
    for place, step in enumerate(facts.steps):
        page.execute_script(move, place)
        assert one(page, "#step-name").text == f"step {step}"
        assert one(page, "#tokens").text == text
        sql = f"select kl from occurrences where rollout_id = '{name}' and step = {step} and position = 2"
        assert float(one(page, '#panel [data-key="kl"]').text) == pytest.approx(facts.ask(sql)[0]["kl"], rel=1e-3)


def test_deep_link_opens_the_token_it_was_made_for(page, reports):
    await_data(page, "viewer")
    name = page.execute_script("return rocktokens.viewer.rollouts[7].id")
    address = (reports["whole"] / REPORT).as_uri()
    page.get("about:blank")
    page.get(f"{address}#viewer:rollout={name.replace('#', '%23')}&position=5&step=50")
    await_data(page, "viewer")
    assert name in one(page, "#outcome").text
    assert page.switch_to.active_element.get_attribute("data-index") == "5"
    assert one(page, "#step-name").text == "step 50"
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert "position=6" in page.current_url
    chip = one(page, "#cost a.token")
    page.execute_script("arguments[0].click()", chip)
    time.sleep(0.2)
    page.execute_script("arguments[0].focus()", one(page, "#tokens .hit"))
    assert one(page, '#panel [data-key="token_id"]').text == chip.get_attribute("href").rpartition("type=")[2]


def test_sort_filter_and_copy(page):
    await_data(page, "viewer")
    Select(one(page, "#order")).select_by_value("cost")
    costliest = page.execute_script("return rocktokens.viewer.rollouts.reduce((a, b) => b.cost > a.cost ? b : a).id")
    assert costliest in one(page, "#outcome").text
    one(page, "#search").send_keys("no such words anywhere")
    assert one(page, "#count").text == "No rollout matches"
    block = one(page, "#needed .table")
    head = next(item for item in many(block, "th button") if item.text.startswith("Δ"))
    place = page.execute_script("return arguments[0].closest('th').cellIndex", head)
    page.execute_script("arguments[0].click()", head)
    cells = [cell.text for cell in many(block, f"tbody td:nth-child({place + 1})")]
    values = [float(text.split(" ")[0].replace("−", "-").replace("+", "")) for text in cells]
    assert values == sorted(values, reverse=True)
    sift = one(block, ".sift")
    sift.send_keys("pillar")
    shown = [row for row in many(block, "tbody tr") if row.is_displayed()]
    assert shown
    assert all("Pillar" in row.text for row in shown)
    copy = one(block, '[data-copy="ids"]')
    page.execute_script("arguments[0].click()", copy)
    time.sleep(0.2)
    assert copy.get_attribute("data-copied") == ",".join(row.get_attribute("data-id") for row in shown)
    sift.send_keys(Keys.BACKSPACE * 6)


def test_phone_never_scrolls_sideways_and_tables_show_that_they_are_wider(page):
    size(page, 390, 844)
    settle(page, "light", 390)
    wide = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    assert page.execute_script(TOO_WIDE) == []
    charts = "return [...document.querySelectorAll('.chart svg.main-svg')].map((s) => s.getBoundingClientRect().right)"
    assert max(page.execute_script(charts)) <= 390
    assert one(page, "#cost .table .cue").is_displayed()
    page.execute_script("const s = document.querySelector('#cost .table .scroll'); s.scrollLeft = s.scrollWidth")
    time.sleep(0.2)
    assert not one(page, "#cost .table .cue").is_displayed()
    screenshot(page, "report_phone")


def test_dark_by_the_system_and_by_the_button_and_text_stands_out(page):
    paper, ink = (
        f"return getComputedStyle({node}).{key}"
        for node, key in (
            ("document.body", "backgroundColor"),
            ("document.querySelector('.chart .xtick text')", "fill"),
        )
    )
    light = page.execute_script(paper), page.execute_script(ink)
    assert page.execute_script(CONTRASTS) == []
    prefer(page, "dark")
    settle(page, "dark", 1280)
    assert page.execute_script(paper) != light[0]
    assert page.execute_script(ink) != light[1]
    assert page.execute_script(CONTRASTS) == []
    screenshot(page, "report_dark")
    page.execute_script("document.getElementById('theme').click()")
    settle(page, "light", 1280)
    assert (page.execute_script(paper), page.execute_script(ink)) == light
    page.execute_script("localStorage.clear()")
    page.get("about:blank")


def test_live_page_follows_a_training_record_and_no_page_breaks_its_policy(driver, tmp_path):
    run = make_run(tmp_path / "run", prompts=20)
    report(run.path)
    table = run.read("training")
    run.write("training", table.slice(0, 20))
    rows = run.occurrences("select * exclude (step) from occurrences where step = 100")
    run.write_part(10, rows, folder="telemetry")
    server = Viewer(tmp_path, port=0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    size(driver, 1280)
    try:
        drain(driver)
        driver.get(f"{server.url}run/run/live")
        await_data(driver, "step", str(table["step"][19].as_py()))
        assert many(driver, "#newest .t.rock")
        run.write("training", table)
        await_data(driver, "step", str(table["step"][len(table) - 1].as_py()))
        assert many(driver, '#loss path[data-series="rocks"]')
        screenshot(driver, "live")
        assert severe(driver) == []
        for page in ("", "run/run/rollouts", "run/run/report.html"):
            driver.get(server.url + page)
            font = driver.execute_script("return getComputedStyle(document.querySelector('h1')).fontFamily")
            assert "Charter" in font, "the stylesheet is in force"
            assert severe(driver) == [], page
        (run.path / REPORT).write_text("<html><body><script>window.ran = 1</script>old</body></html>")
        driver.get(f"{server.url}run/run/report.html")
        assert driver.execute_script("return window.ran") is None
    finally:
        server.shutdown()
        server.server_close()
        drain(driver)
