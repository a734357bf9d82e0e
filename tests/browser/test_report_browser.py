"""The report in a real browser: it asks nobody for anything, the viewer works, and everyone can read it."""

from __future__ import annotations

import pytest
from driving import SCREENSHOTS, drain, prefer, screenshot, settle, size, visit
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from rocktokens.facts import Facts
from rocktokens.report.build import REPORT

# Text with its colour and the first background behind it, as the browser computed them.
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


def tokens(driver) -> list:
    return driver.find_elements(By.CSS_SELECTOR, "#tokens .t")


def reading(driver, key: str) -> str:
    return driver.find_element(By.CSS_SELECTOR, f'#panel [data-key="{key}"]').text.replace("−", "-")


def press(driver, button: str) -> None:
    driver.execute_script("document.getElementById(arguments[0]).click()", button)


def count(driver) -> str:
    return driver.find_element(By.ID, "count").text


def test_no_error_and_no_request_off_the_page(page, reports):
    visit(page, (reports["whole"] / REPORT).as_uri())
    page.execute_script("window.scrollTo(0, document.body.scrollHeight)")
    prefer(page, "dark")
    settle(page, "dark", 1280)
    console, requested = drain(page)
    assert console == []
    asked = [url for url in requested if not url.startswith(("data:", "blob:", "chrome:"))]
    assert set(asked) == {(reports["whole"] / REPORT).as_uri()}


def test_every_chart_is_drawn(page):
    charts = page.find_elements(By.CSS_SELECTOR, ".chart[data-figure]")
    assert len(charts) == 16
    for chart in charts:
        assert chart.find_elements(By.CSS_SELECTOR, "svg.main-svg"), chart.get_attribute("data-figure")
    screenshot(page, "report_light")


def test_searching_finds_marks_and_counts(page):
    box = page.find_element(By.ID, "search")
    box.send_keys("thus we")
    assert "marked" in count(page)
    marked = [token.text for token in page.find_elements(By.CSS_SELECTOR, "#tokens .hit")]
    assert "Thus" in " ".join(marked)
    box.clear()
    box.send_keys("no such words anywhere")
    assert count(page) == "No rollout matches"
    press(page, "clear")
    assert count(page).startswith("Rollout 1 of 120")


def test_filters_leave_what_they_say(page, reports):
    facts = Facts.of(reports["whole"])
    Select(page.find_element(By.ID, "answered")).select_by_visible_text("wrong")
    seen = set()
    for _ in range(5):
        seen.add(page.find_element(By.ID, "outcome").text.split(" ")[0])
        press(page, "next")
    assert seen == {"Wrong"}
    Select(page.find_element(By.ID, "cluster")).select_by_visible_text("digits")
    marked = page.find_elements(By.CSS_SELECTOR, "#tokens .hit")
    assert marked
    assert all(token.text.strip().isdigit() for token in marked)
    press(page, "clear")
    rock = facts.rocks[0]
    choice = Select(page.find_element(By.ID, "type"))
    choice.select_by_index(1)
    assert choice.first_selected_option.text.startswith("◆")
    assert page.find_elements(By.CSS_SELECTOR, "#tokens .hit.rock")
    assert rock["token"]


def test_keys_turn_pages_and_walk_tokens(page):
    body = page.find_element(By.TAG_NAME, "body")
    body.send_keys("j")
    assert count(page).startswith("Rollout 2 of")
    body.send_keys("k")
    assert count(page).startswith("Rollout 1 of")
    first = tokens(page)[0]
    page.execute_script("arguments[0].focus()", first)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("data-index") == "1"
    assert reading(page, "position") == "1"
    page.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert "rock" in page.switch_to.active_element.get_attribute("class")
    page.switch_to.active_element.send_keys(Keys.END)
    assert reading(page, "position") == str(len(tokens(page)) - 1)
    body.send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "search"


def test_hover_and_focus_show_the_numbers_that_parquet_holds(page, reports):
    facts = Facts.of(reports["whole"])
    rollout = page.find_element(By.ID, "outcome").text.split(" · ")[1]
    stored = {
        step: facts.run.query(
            f"select * from occurrences where step = {step} and rollout_id = '{rollout}' order by position"
        ).to_pylist()
        for step in (0, 100)
    }
    columns = (
        "kl",
        "log_ratio",
        "student_logprob",
        "teacher_logprob",
        "student_entropy",
        "teacher_entropy",
        "grad_norm",
    )
    for place, how in ((0, "hover"), (3, "hover"), (5, "focus"), (11, "focus")):
        token = tokens(page)[place]
        if how == "hover":
            ActionChains(page).move_to_element(token).perform()
        else:
            page.execute_script("arguments[0].focus()", token)
        row = stored[100][place]
        assert reading(page, "position") == str(place)
        assert reading(page, "token_id") == str(row["token_id"])
        for column in columns:
            assert float(reading(page, column)) == float(f"{row[column]:.4g}")
        assert float(reading(page, "kl_pre")) == float(f"{stored[0][place]['kl']:.4g}")
        assert (reading(page, "rock") != "no") == (row["token_id"] in facts.rock_ids)


def test_the_viewer_is_pictured(page):
    page.execute_script("document.getElementById('viewer').scrollIntoView()")
    viewer = page.find_element(By.ID, "viewer")
    SCREENSHOTS.mkdir(exist_ok=True)
    (SCREENSHOTS / "viewer.png").write_bytes(viewer.screenshot_as_png)
    assert viewer.size["height"] > 400


def test_rocks_are_underlined_and_loss_is_coloured(page):
    rock, plain = (page.find_element(By.CSS_SELECTOR, f"#tokens .t{kind}") for kind in (".rock", ":not(.rock)"))
    assert rock.value_of_css_property("border-bottom-color") != plain.value_of_css_property("border-bottom-color")
    levels = {token.get_attribute("class").split()[1] for token in tokens(page)}
    assert len(levels) >= 3


def test_dark_by_the_system_and_by_the_button(page):
    def paper() -> str:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = paper()
    prefer(page, "dark")
    settle(page, "dark", 1280)
    assert paper() != light
    title = "return getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    dark_ink = page.execute_script(title)
    screenshot(page, "report_dark")
    press(page, "theme")
    settle(page, "light", 1280)
    assert paper() == light
    assert page.execute_script(title) != dark_ink
    page.execute_script("localStorage.clear()")
    page.get("about:blank")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page, scheme):
    prefer(page, scheme)
    settle(page, scheme, 1280)
    assert page.execute_script(CONTRASTS) == []
    levels = """return [...Array(7).keys()].map((level) => { const s = document.createElement('span');
        s.className = 't l' + level; s.textContent = 'x'; document.getElementById('tokens').append(s); return s; });"""
    assert len(page.execute_script(levels)) == 7
    assert page.execute_script(CONTRASTS) == []


def test_a_phone_never_scrolls_sideways(page, reports):
    size(page, 390, 844)
    settle(page, "light", 390)
    wide = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    over = """return [...document.querySelectorAll('main *')].filter((node) => {
        if (node.closest('.scroll, pre, svg, .chart, [role=tooltip]')) return false;
        return node.getBoundingClientRect().right > innerWidth + 0.5; }).map((node) => node.outerHTML.slice(0, 80))"""
    assert page.execute_script(over) == []
    charts = "return [...document.querySelectorAll('.chart svg.main-svg')].map((s) => s.getBoundingClientRect().right)"
    assert max(page.execute_script(charts)) <= 390
    screenshot(page, "report_phone")


def test_everything_hoverable_is_reached_by_keyboard(page):
    unreachable = page.execute_script(
        """return [...document.querySelectorAll('.chart, .est, button, a[href], select, input, summary')]
           .filter((node) => node.tabIndex < 0).map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert unreachable == []
    assert page.execute_script("return document.querySelectorAll('#tokens [tabindex=\"0\"]').length") == 1
    estimator = page.find_element(By.CSS_SELECTOR, "#funnel .est")
    page.execute_script("arguments[0].focus()", estimator)
    assert estimator.find_element(By.CSS_SELECTOR, "[role=tooltip]").is_displayed()


@pytest.mark.parametrize("name", ["funnel", "knockouts", "accuracy_seconds", "clusters"])
def test_arrow_keys_read_a_charts_points(page, name):
    chart = page.find_element(By.CSS_SELECTOR, f'.chart[data-figure="{name}"]')
    page.execute_script("arguments[0].focus()", chart)
    figure = page.execute_script("return rocktokens.report.figures.find((f) => f.name === arguments[0])", name)
    texts = [trace["text"] for trace in figure["data"] if "text" in trace]
    read = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN):
        page.switch_to.active_element.send_keys(key)
        read.append(page.execute_script("return arguments[0].nextElementSibling.textContent", chart))
    assert len(set(read)) >= 2
    assert all(read)
    assert texts[0][0].split("<br>")[0].replace("<b>", "").split("</b>")[0][:3] in read[0]
    if name != "accuracy_seconds":
        assert chart.find_elements(By.CSS_SELECTOR, ".hoverlayer .hovertext")


def test_hostile_text_shows_as_itself_and_runs_nothing(driver, reports):
    size(driver, 1280)
    visit(driver, (reports["hostile"] / REPORT).as_uri())
    for _ in range(3):
        press(driver, "next")
    for token in tokens(driver)[-16::2]:
        ActionChains(driver).move_to_element(token).perform()
    chart = driver.find_element(By.CSS_SELECTOR, '.chart[data-figure="funnel"]')
    driver.execute_script("arguments[0].focus()", chart)
    for _ in range(12):
        driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    console, requested = drain(driver)
    assert driver.execute_script("return window.hacked") is None
    assert console == []
    assert {url for url in requested if not url.startswith(("data:", "chrome:"))} == {
        (reports["hostile"] / REPORT).as_uri()
    }
    text = driver.find_element(By.ID, "tokens").text
    for shown in (
        '<img src=x onerror="window.hacked=1">',
        "<b>bold</b>",
        "javascript:alert(1)",
        "{{data}}",
        "⟨U+202E⟩",
    ):
        assert shown in text
    labels = driver.execute_script(
        "return [...document.querySelectorAll('[data-figure=knockouts] .ytick text')].map((t) => t.textContent)"
    )
    assert any(label.removeprefix("◆ ").startswith("</script>") for label in labels)
    assert not driver.find_elements(By.CSS_SELECTOR, "main img, main b, main svg a")
    screenshot(driver, "report_hostile")


def test_printing_is_light_and_complete(page):
    prefer(page, "dark")
    settle(page, "dark", 1280)
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    settle(page, "light", 1280)
    widths = "return [...document.querySelectorAll('.chart svg.main-svg')].map((s) => s.getBoundingClientRect().width)"
    assert set(page.execute_script(widths)) == {680}
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    settle(page, "dark", 1280)
    pdf = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(pdf["data"]) > 50_000
    page.get("about:blank")
