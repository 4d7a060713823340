"""The page in a real browser: it opens from disk, requests nothing else, and shows untrusted text as text."""

import time

import pytest
from chromium import Chromium
from runs import HOSTILE, make_run

from coalmine.report import write_report
from coalmine.report.sentences import GLOSSARY

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  for (const node of document.querySelectorAll("p, li, td, th, h1, h2, h3, b, a, code, dt, dd, figcaption, button, text")) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(node.tagName === "text" ? style.fill : style.color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.tagName + ": " + node.textContent.slice(0, 40)];
  }
  return worst;
})()
"""


def half(round_number, rng, dim):
    """Noise of half the claimed std."""
    return rng.normal(size=dim) / 2


@pytest.fixture(scope="module")
def browser():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run with a hostile config, and a page of four runs."""
    home = tmp_path_factory.mktemp("runs")
    twice = {"presentations": (1, 2), "canaries": 120}
    runs = [
        make_run(home / "noise 1", noise_multiplier=1.0, **twice),
        make_run(home / "noise 0.5", noise_multiplier=0.5, **twice),
        make_run(home / "<img src=x> \u202e$x^$ 🐤", noise_multiplier=4.0),
        make_run(home / "halved", noise=half, config={"task": HOSTILE}, more=HOSTILE),
    ]
    return {"one": write_report(runs[3:]), "several": write_report(runs, home / "several.html")}


@pytest.mark.parametrize("page", ["one", "several"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_opens_from_disk_without_other_requests(browser, pages, page, width, dark):
    browser.open(pages[page], width=width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [pages[page].absolute().as_uri()]
    assert browser.evaluate(OVERFLOW) <= 0
    ratio, where = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    body = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert body == ("rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("page", ["one", "several"])
def test_every_plot_has_a_text_description(browser, pages, page):
    browser.open(pages[page])
    words = browser.evaluate("[...document.querySelectorAll('svg, img')].map((one) => one.getAttribute('aria-label'))")
    assert len(words) == {"one": 10, "several": 4}[page]
    assert all(text and len(text) > 40 for text in words)
    roles = browser.evaluate("[...document.querySelectorAll('svg')].every((one) => one.getAttribute('role') === 'img')")
    assert roles
    twice = "(ids => ids.length - new Set(ids).size)([...document.querySelectorAll('[id]')].map((one) => one.id))"
    assert browser.evaluate(twice) == 0


def test_hostile_text_is_shown_as_text(browser, pages):
    browser.open(pages["one"])
    assert browser.evaluate("document.title") == "coalmine report: halved"
    text = browser.evaluate("document.body.textContent")
    for name, value in HOSTILE.items():
        assert name in text
        assert value.replace("\x00", "�").replace("\x1b", "�") in text
    assert browser.evaluate("document.querySelectorAll('main script, main img, main [onclick]').length") == 0
    browser.open(pages["several"])
    assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert "<img src=x>" in browser.evaluate("document.body.textContent")


def test_terms_are_explained_by_mouse_and_keyboard(browser, pages):
    browser.open(pages["one"], width=400)
    tip_text = "document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent"
    assert browser.evaluate(tip_text) is None
    browser.hover("a[data-term=word-measured-epsilon]")
    assert browser.evaluate(tip_text) == GLOSSARY["measured ε"]
    box = browser.evaluate("(({left, right}) => [left, right])(document.getElementById('tip').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= 400
    browser.press("Escape")
    assert browser.evaluate(tip_text) is None
    browser.evaluate("document.querySelector('a[data-term=word-valid-bound]').focus()")
    assert browser.evaluate(tip_text) == GLOSSARY["valid bound"]
    assert browser.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"


def test_every_term_is_in_the_glossary(browser, pages):
    for page in pages.values():
        browser.open(page)
        missing = (
            "[...document.querySelectorAll('[data-term]')].filter((one) => !document.getElementById(one.dataset.term))"
        )
        assert browser.evaluate(f"{missing}.map((one) => one.dataset.term)") == []


def test_tables_sort_by_their_headers(browser, pages):
    browser.open(pages["several"])
    column = "[...document.querySelector('table').tBodies[0].rows].map((row) => parseFloat(row.cells[2].dataset.value))"
    head = "document.querySelectorAll('table')[0].querySelectorAll('thead button')[2]"
    before = browser.evaluate(column)
    assert before != sorted(before)
    browser.evaluate(f"{head}.focus()")
    browser.press("Enter")
    assert browser.evaluate(column) == sorted(before)
    assert browser.evaluate(f"{head}.closest('th').getAttribute('aria-sort')") == "ascending"
    browser.press("Enter")
    assert browser.evaluate(column) == sorted(before, reverse=True)


def test_a_page_can_be_printed(browser, pages):
    browser.open(pages["several"], dark=True)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert 2 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type /Page/") <= 12


@pytest.mark.full
def test_a_page_is_small_and_written_quickly(tmp_path):
    """A reduced version of the full-scale test in test_scale.py (docs/how-to/report.md)."""
    runs = [make_run(tmp_path / f"run {z}", noise_multiplier=z, rounds=60, canaries=400, dim=5_000) for z in (1.0, 2.0)]
    start = time.process_time()
    pages = [write_report(runs[:1]), write_report(runs, tmp_path / "both.html")]
    assert time.process_time() - start < 20
    assert all(page.stat().st_size < 1_000_000 for page in pages)
