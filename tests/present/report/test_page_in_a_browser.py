"""The report in a real browser, the system's Chromium: what people do with it, on screens, in the dark and on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.judge.decisions.decide import Decision, Outcome
from harness.present.report import write_report
from harness.present.report.view import Results
from harness.runner import run_experiment
from tests.support.bare_reports import with_figures
from tests.support.browser import chromium, expect, violations
from tests.support.experiments import small_experiment
from tests.support.report_runs import seal_demo

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

LOOKS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1400, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}},
    "dark phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}


@dataclass
class Opened:
    """A page, and what the browser said and asked for while it was open."""

    page: Page
    said: list[str] = field(default_factory=list[str])
    asked: list[str] = field(default_factory=list[str])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with with_figures():
        return write_report(seal_demo(folder, num_replicates=2), folder / "report.html")


@pytest.fixture
def opened(browser: Browser, report: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The report in the look that a test is parametrised with, or on a desktop; it complained of nothing."""
    context = browser.new_context(**LOOKS[getattr(request, "param", "desktop")])
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.said.append(message.text))
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.on("request", lambda asked: found.asked.append(asked.url))
    found.page.goto(report.as_uri())
    yield found
    assert found.said == []
    assert {url.partition("#")[0] for url in found.asked} == {report.as_uri()}, "the network was asked for something"
    context.close()


def drag(page: Page, over: Locator, start: float, end: float) -> None:
    """Press at one share of an element's width and let go at another."""
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    for at, act in ((start, page.mouse.down), (end, page.mouse.up)):
        page.mouse.move(box["x"] + at * box["width"], box["y"] + box["height"] / 3, steps=4)
        act()


def tick_labels(timeline: Locator) -> list[float]:
    return [float(text) for text in timeline.locator(".t-ticks text").all_text_contents()]


@pytest.mark.parametrize("opened", LOOKS, indirect=True)
def test_axe_finds_nothing_and_no_screen_is_wider_than_itself(opened: Opened) -> None:
    page = opened.page
    for hidden in page.locator("details").all():
        hidden.evaluate("box => { box.open = true; }")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    hidden = "all => all.filter(one => one.scrollWidth > one.clientWidth + 4).length"
    assert page.eval_on_selector_all(".scroll:not(.more)", hidden) == 0, "what runs on beyond its edge must say so"


@pytest.fixture(scope="module")
def of_replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two policies of routing."""
    folder = tmp_path_factory.mktemp("replicas")
    conditions = [
        {"name": policy, "server": {"replicas": 2, "router": {"policy": policy}}}
        for policy in ("round-robin", "session-affinity")
    ]
    table = {"backend": "sim", "time_scale": 1.0, "workload": {"num_sessions": 6}, "condition": conditions}
    return write_report(run_experiment(small_experiment(**table), runs_root=folder).runs, folder / "report.html")


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_in_the_report_of_replicas_and_its_bars_fit(
    browser: Browser, of_replicas: Path, look: str
) -> None:
    context = browser.new_context(**LOOKS[look])
    page = context.new_page()
    page.goto(of_replicas.as_uri())
    for hidden in page.locator("details").all():
        hidden.evaluate("box => { box.open = true; }")
    bars = page.locator("#replicas ~ .bars .bar")
    expect(bars).to_have_count(4)
    for bar in bars.all():
        expect(bar).to_be_visible()
        box = bar.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= LOOKS[look]["viewport"]["width"]
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()


@pytest.mark.parametrize("opened", LOOKS, indirect=True)
def test_a_symbol_shows_its_meaning_to_the_keyboard_and_is_never_cut_off(opened: Opened) -> None:
    symbol = opened.page.locator("#conditions ~ .scroll a.sym").first
    shown = "one => getComputedStyle(one, '::after').content"
    assert symbol.evaluate(shown) == "none"
    opened.page.keyboard.press("Tab")
    symbol.focus()
    assert "Modelled device time" in symbol.evaluate(shown)
    assert violations(opened.page) == []
    symbol.press("Enter")
    expect(opened.page.locator("#g-a")).to_be_visible()


def test_hovering_a_timeline_reads_it(opened: Opened) -> None:
    timeline = opened.page.locator("svg.timeline").first
    timeline.scroll_into_view_if_needed()
    timeline.hover()
    readout = opened.page.locator(".readout").first
    expect(readout).to_have_text(re.compile(r"[\d.]+ model s: .*; in flight: (sessions [\d, ]+|none)"))
    opened.page.locator("h1").hover()
    expect(readout).not_to_have_text(re.compile("in flight"))


def test_dragging_zooms_and_a_double_click_zooms_out(opened: Opened) -> None:
    timeline = opened.page.locator("svg.timeline").first
    before = tick_labels(timeline)
    drag(opened.page, timeline, 0.4, 0.6)
    near = tick_labels(timeline)
    assert before[0] < near[0]
    assert near[-1] < before[-1]
    timeline.dblclick()
    assert tick_labels(timeline) == before


def test_another_replicate_is_chosen_and_can_be_read(opened: Opened) -> None:
    page = opened.page
    page.locator(".choose select").first.select_option(index=1)
    figure = page.locator("figure.lanes").first
    expect(figure.locator(".timeline-title")).to_contain_text("replicate 1")
    figure.locator("svg.timeline").hover()
    expect(figure.locator(".readout")).to_contain_text("in flight")


def test_a_link_of_a_run_leads_to_its_timeline(opened: Opened) -> None:
    opened.page.locator("#what > summary").click()
    opened.page.get_by_role("link", name="bucket6-waits 1").last.click()
    expect(opened.page.locator("figure.lanes").nth(1).locator(".timeline-title")).to_contain_text("replicate 1")


def test_a_link_to_a_folded_section_unfolds_it(opened: Opened) -> None:
    expect(opened.page.locator("#glossary dl")).not_to_be_visible()
    opened.page.get_by_role("link", name="Glossary").click()
    expect(opened.page.locator("#glossary dl")).to_be_visible()


def test_sentences_in_a_table_have_room_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    reason = "shown to be cheaper: cost ratio 0.9542, 6 blocks, modelled device time (A), one-sided p = 0.011 against 1"
    decision = Decision("superiority", "bucket6-waits vs base-waits", Outcome.PASS, reason, num_blocks=3)
    results = Results(None, (decision,))
    page_file = write_report(seal_demo(tmp_path, num_replicates=1), tmp_path / "report.html", results=results)
    context = browser.new_context(**LOOKS["phone"])
    page = context.new_page()
    page.goto(page_file.as_uri())
    for hidden in page.locator("details").all():
        hidden.evaluate("box => { box.open = true; }")
    narrow = (
        "all => all.filter(one => one.innerText.split(/\\s+/).length > 8 && one.clientWidth < 150)"
        ".map(one => one.innerText)"
    )
    assert page.eval_on_selector_all("td", narrow) == []
    assert reason in page.eval_on_selector_all("td", "all => all.map(one => one.innerText)")
    assert violations(page) == []
    context.close()


@pytest.mark.parametrize("opened", ["phone"], indirect=True)
def test_the_plots_of_the_answer_and_of_reuse_by_wait_are_whole_on_a_phone(opened: Opened) -> None:
    plots = opened.page.locator(".narrow-only svg.plot")
    expect(plots).to_have_count(2)
    for plot in plots.all():
        expect(plot).to_be_visible()
        box = plot.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390


def test_a_table_is_copied_as_text_with_tabs(opened: Opened) -> None:
    page = opened.page
    page.locator("button.copy").first.click()
    expect(page.locator("button.copy").first).to_have_text("copied")
    rows = [line.split("\t") for line in page.evaluate("navigator.clipboard.readText()").split("\n")]
    assert len({len(row) for row in rows}) == 1
    assert "bucket6-waits" in [row[0] for row in rows]


def test_on_paper_nothing_is_cut_off(opened: Opened) -> None:
    page = opened.page
    page.emulate_media(media="print")
    # A4 less its margins, in CSS pixels.
    page.set_viewport_size({"width": 696, "height": 1000})
    assert not page.locator("button.copy").first.is_visible()
    edges = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
    assert page.eval_on_selector_all("table, svg.plot, svg.timeline, pre", edges) <= 696
