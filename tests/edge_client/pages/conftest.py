"""A page opened in the headless browser from a file, with the network shut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually


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
        self.page.add_init_script(AT_LOAD)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn=yes]", state="attached")

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def until(self, expression: str) -> None:
        """Wait for it; the page's policy lets nobody poll inside it."""
        eventually(lambda: bool(self.page.evaluate(expression)), expression)

    def fits_everywhere(self) -> None:
        """A wide window, a tablet, a telephone and A4; nothing cut off, nothing too pale to read."""
        for width in (1400, 768, 360):
            self.page.set_viewport_size({"width": width, "height": 844})
            self.until(f"[...document.querySelectorAll('svg')].every((one) => one.clientWidth < {width})")
            assert self.overflowing() == [] == self.low_contrast()
        self.page.set_viewport_size({"width": 703, "height": 1032})
        self.page.emulate_media(media="print")
        self.until("document.querySelector('svg').clientWidth === 700")
        assert self.overflowing() == []

    def overflowing(self) -> list[str]:
        """What reaches beyond the page's right edge, text in charts included."""
        return list(self.page.evaluate(OVERFLOWING))

    def low_contrast(self) -> list[str]:
        """Texts whose contrast with what lies behind them is below 4.5 to 1 (WCAG 2.2, 1.4.3)."""
        return list(self.page.evaluate(LOW_CONTRAST))


AT_LOAD = "addEventListener('load', () => { window.atLoad = document.documentElement.dataset.drawn; })"
OVERFLOWING = """() => {
  const edge = document.documentElement.clientWidth + 0.6, found = [];
  if (document.documentElement.scrollWidth > edge) found.push(`the page: ${document.documentElement.scrollWidth}`);
  for (const one of document.querySelectorAll("body *")) {
    if (one.closest("#tip, .skip, noscript, script, thead")) continue;
    const box = one.getBoundingClientRect();
    const beyond = box.width && (box.right > edge || box.left < -0.6);
    if (beyond) found.push(`${one.tagName} ${one.textContent} ${box.right}`);
    const style = getComputedStyle(one);
    if (style.overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1) found.push(`clipped: ${one.tagName}`);
  }
  return found;
}"""
LOW_CONTRAST = """() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const found = new Set();
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || one.closest("script, style, noscript")) continue;
    const drawn = one instanceof SVGElement;
    if (drawn && one.tagName !== "text") continue;
    const style = getComputedStyle(one);
    const [front, ground] = [numbers(drawn ? style.fill : style.color), behind(drawn ? one.closest("div") : one)];
    const reached = ratio(front, ground);
    if (reached < 4.5) found.add(`${one.tagName}.${one.getAttribute("class")} ${reached.toFixed(2)}`);
  }
  for (const one of document.querySelectorAll(".chart .piece, .chart .dot:not(.faint), .legend i")) {
    const style = getComputedStyle(one), drawn = one instanceof SVGElement;
    const colours = [numbers(drawn ? style.fill : style.backgroundColor), behind(one.closest("div"))];
    if (ratio(...colours) < 3) found.add(`${one.getAttribute("class")} ${ratio(...colours).toFixed(2)}, of 3`);
  }
  return [...found];
}"""


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """`opened(html, width, dark)`; at the end none has complained or asked for anything but itself."""
    pages: list[Opened] = []

    def show(html: str, width: int = 1280, dark: bool = False) -> Opened:
        file = tmp_path / f"report-{len(pages)}.html"
        file.write_text(html, encoding="utf-8")
        pages.append(Opened(browser, file, width, dark))
        return pages[-1]

    yield show
    for one in pages:
        assert one.complaints == []
        assert one.page.evaluate("window.atLoad") == "yes", "who prints waits for the load, and no longer"
        assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert len([url for url in one.requests if url.startswith("file:")]) == 1
        one.page.close()
