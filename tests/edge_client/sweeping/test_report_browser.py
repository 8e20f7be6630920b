"""The page in a headless browser: opened from a file, with the network shut."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.sweeping.report import render
from shared_hooks.metrics.reading import Reading
from tests.edge_client.sweeping import synthetic

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
LONG = "backbone.encoder.a_rather_long_name_for_a_block.layers.{}.attention.output.projection#12"
HOSTILE = "<img src=x onerror=window.hacked=1>.{}</script><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        one = started.chromium.launch(executable_path=BROWSER, args=SWITCHES, timeout=120_000)
        yield one
        one.close()


class Opened:
    """A page that is open, and what it complained about or asked for."""

    def __init__(self, browser: Any, file: Path, width: int, dark: bool) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        scheme = "dark" if dark else "light"
        self.page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.route(
            "**/*", lambda route: route.continue_() if route.request.url == file.as_uri() else route.abort()
        )
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn=yes]", state="attached")

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def show(width: int = 1280, dark: bool = False, **known: Any) -> Opened:
        file = tmp_path / f"report-{len(pages)}.html"
        file.write_text(render(synthetic.known(**known)), encoding="utf-8")
        pages.append(Opened(browser, file, width, dark))
        return pages[-1]

    yield show
    for one in pages:
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in one.requests if url.startswith("file:")]) == 1
        one.page.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_is_drawn(opened: Any, width: int, dark: bool) -> None:
    shown = opened(width, dark, count=7, energy=Reading.estimated(0.002, "a share"))
    ways = 7 + 3
    assert shown.count("#stages .bar") == ways
    assert shown.count("#stages .bar .piece") > 3 * ways
    assert shown.count("#stages .bar .mark") == ways
    assert shown.count("#agreement svg .point") == ways
    assert shown.count("#bytes svg .column") == ways
    assert shown.count("#energy svg .column") == ways
    assert shown.count("#pareto svg") == 2 and shown.count("#pareto .bytes .point") == ways
    assert shown.count("#layers .bar") == 7 + 1  # and outside layers
    assert shown.count("#local svg .column") == 7 and shown.count("#local .reference") == 1
    boxes = [one.bounding_box() for one in shown.page.locator("#bytes svg .column .piece").all()]
    assert all(box["width"] > 0 and box["height"] > 0 for box in boxes)


def test_hovering_shows_the_numbers(opened: Any) -> None:
    shown = opened(count=5)
    tip = shown.page.locator("#tip")
    assert not tip.is_visible()
    shown.page.locator("#stages .bar").nth(3).hover()
    assert tip.is_visible() and "after layer 0: features.0.conv" in tip.inner_text()
    for word in ("latency", "predicted", "tail on the cloud", "up, down", "exact"):
        assert word in tip.inner_text()
    shown.page.keyboard.press("Escape")
    assert not tip.is_visible()
    charts = ("#agreement .hit", "#bytes .hit", "#pareto .bytes .hit", "#layers .bar", "#local .hit")
    for chart in charts:
        one = shown.page.locator(chart).nth(1)
        one.scroll_into_view_if_needed()
        shown.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        one.hover(force=True)  # a neighbour's dot may lie on it: then that one tells
        tip.wait_for(state="visible")
        assert len(tip.inner_text()) > 20, chart
        box = tip.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280


def test_the_order_can_be_changed(opened: Any) -> None:
    shown = opened(count=5)

    def values() -> list[str]:
        return [str(text) for text in shown.page.locator("#stages .bar .label").all_inner_texts()]

    before = values()
    shown.page.get_by_role("button", name="fastest first").click()
    assert sorted(values()) == sorted(before) and values() != before
    assert "best" in shown.page.locator("#stages .bar").first.get_attribute("class")
    shown.page.get_by_role("button", name="in order of layers").click()
    assert values() == before


@pytest.mark.parametrize("count", [1, 60, 200])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(opened: Any, count: int, width: int) -> None:
    shown = opened(width, count=count, name=LONG, inputs=["a_very_long_file_name_" * 8 + ".png"], repetitions=2)
    wide, screen = shown.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= screen == width


def test_it_is_drawn_anew_for_another_width(opened: Any) -> None:
    shown = opened(count=5)
    shown.page.set_viewport_size({"width": 390, "height": 844})
    playwright.expect(shown.page.locator("#bytes svg")).to_have_attribute(
        "width", re.compile(r"^3\d\d$"), timeout=60_000
    )
    assert shown.count("#bytes svg") == 1


def test_hostile_names_run_nothing(opened: Any) -> None:
    shown = opened(
        count=3,
        name=HOSTILE,
        model=HOSTILE,
        inputs=[HOSTILE],
        energy=Reading.estimated(1.0, HOSTILE),
        failing="cloud-only",
        error=HOSTILE,
    )
    shown.page.locator("#stages .bar").nth(2).hover()
    assert "<img src=x" in shown.page.locator("#tip").inner_text()
    assert shown.page.evaluate("window.hacked") is None and shown.count("img") == 0 and shown.count("script") == 2


@pytest.mark.parametrize("width", [390, 1280])
def test_what_observers_saw_is_shown(opened: Any, width: int) -> None:
    shown = opened(width, count=3, observers=LONG, inputs=["a.png", "b" * 200 + ".png"])
    assert shown.count("#observed details") == 2 and shown.count("#observed details[open]") == 1
    shown.page.locator("#observed summary").nth(1).click()
    images = shown.page.locator("#observed img")
    assert images.count() == 8
    assert shown.page.evaluate("[...document.images].every((one) => one.complete && one.naturalWidth > 0)")
    boxes = [one.bounding_box() for one in images.all()]
    assert all(100 < box["width"] <= 320 and abs(box["width"] - box["height"]) < 1 for box in boxes)
    wide, screen = shown.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= screen == width
    assert "2 pictures were left out" in shown.page.locator("#observed").inner_text()


def test_what_there_is_not_is_said(opened: Any) -> None:
    shown = opened(count=2, predicted=False)
    assert "no prediction" in shown.page.locator("#agreement .chart").inner_text()
    assert "no energy was measured" in shown.page.locator("#energy .chart").inner_text()
    assert shown.count("#pareto svg") == 1 and shown.count("#stages .mark") == 0
