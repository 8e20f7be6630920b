"""The page in a headless browser: a real client with a real controller moves the cut, because the link changes."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client import EdgeClient
from edge_client.adaptive import AutoOptions
from edge_client.live import Dashboard
from edge_client.live.board import event
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import ModelFailed
from shared_hooks.observers.thumbnails import encoded
from tests.edge_client import small_models
from tests.edge_client.live import lag
from tests.edge_client.test_client import built, image
from tests.waiting import PATIENCE, eventually

pytest.importorskip("starlette")

SLOW_SECONDS = 0.4
"""One way: twice that is more than the whole model takes on the edge."""
SPLIT = "() => !['-', 'edge-only'].includes(document.querySelector('#now-cut').innerText)"
HOSTILE = "<img src=x onerror=window.hacked=1></script><script>window.hacked=1</script>"


@contextlib.contextmanager
def opened(browser: Any, url: str, width: int = 1400, scheme: str = "light") -> Iterator[Any]:
    """A page that complains of nothing, and asks nobody else."""
    complaints: list[str] = []
    asked: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(1000 * PATIENCE)
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_selector("html[data-drawn=yes]", state="attached")
    yield page
    assert complaints == [] and all(one.startswith((url, "data:")) for one in asked), (complaints, asked)
    page.close()


def has(page: Any, selector: str, text: str) -> None:
    claim = "([one, text]) => document.querySelector(one).innerText.includes(text)"
    page.wait_for_function(claim, arg=[selector, text])


@contextlib.contextmanager
def asking(client: EdgeClient, value: Any) -> Iterator[None]:
    """Requests one after the other, in a thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            client.infer(value)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_page_shows_a_cut_that_moves_with_the_link(browser: Any, tmp_path: Path) -> None:
    options = AutoOptions(profile_seconds=0.3)
    with (
        lag.served(tmp_path) as served,
        served.client("auto", auto=options, observers=["activation"]) as client,
        Dashboard(client) as dashboard,
        asking(client, lag.torch.zeros(1, 8)),
        opened(browser, dashboard.url) as page,
    ):
        page.wait_for_function(SPLIT)
        page.focus("#stages")

        served.relay.delay = SLOW_SECONDS
        has(page, "#events", "→ edge-only: edge-only is")
        moves = page.locator("#events li[data-kind=moved]").filter(has_text="→ edge-only: edge-only is")
        reason = moves.first.inner_text()  # on a busy machine others follow
        assert "better than" in reason and "predicted" in reason
        has(page, "#now-cut", "edge-only")
        assert "edge-only" in page.inner_text("#news")  # what a screen reader hears
        assert page.locator("#stages .mark").count() >= 1 and page.locator("#chart-rtt .mark").count() >= 1

        served.relay.delay = 0.0
        has(page, "#events", "edge-only → ")  # on a busy machine it may move back
        for selector, text in (
            ("#machine-edge", "processors"),
            ("#machine-cloud", "waiting or running"),
            ("#machine-cloud", "energy, newest request"),
            ("#seen", "activation"),
            ("#choice", "predicted at"),
            ("#now-rtt", "round trip"),
        ):
            has(page, selector, text)
        page.keyboard.press("ArrowLeft")
        has(page, "#chosen", "request")
        assert page.locator("#stages .picked").count() == 1
        page.keyboard.press("Escape")
        page.click("#pause")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        eventually(lambda: dashboard.board.counts["answered"] > 5)
        dashboard.close()
        has(page, "#state", "ended")


@pytest.fixture(scope="module")
def filled() -> Iterator[Dashboard]:
    """A page of a client that has answered, failed, and met hostile names."""
    choice = ModelChoice(built(small_models.Residual), model_id="m")
    with (
        EdgeClient(None, choice, "edge-only", observers=["activation"]) as client,
        Dashboard(client, title=HOSTILE) as dashboard,
    ):
        for _ in range(4):
            client.infer(image())
        with pytest.raises(ModelFailed):
            client.infer(lag.torch.zeros(1, 2, 3))
        eventually(lambda: dashboard.board.counts["answered"] == 4 and "observed" in dashboard.board.whole()[1])
        board = dashboard.board
        for text in (HOSTILE, "\u202ebackwards", "a" * 3000):
            board.add("events", event("gone", text, new=f"cut {text}"))
        board.set("server", {HOSTILE: HOSTILE})
        request = board.whole()[1]["requests"][0]
        for number in range(6):
            board.add("requests", {**request, "number": 10 + number, "cut": (HOSTILE, "a.long.name" * 20)[number % 2]})
        yield dashboard


def test_page_fits_and_escapes_reports(browser: Any, filled: Dashboard) -> None:
    with opened(browser, filled.url) as page:
        has(page, "#events", "<img src=x")
        has(page, "#events", "ModelFailed")
        assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
        assert page.inner_text("h1") == HOSTILE
        assert page.locator("#stages svg path[data-group=edge]").get_attribute("d").count("M") >= 4
        papers = []
        for width, scheme in ((360, "light"), (768, "dark"), (1400, "light")):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            drawn = "(width) => document.querySelector('#stages svg').viewBox.baseVal.width < width"
            page.wait_for_function(drawn, arg=width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            papers.append(page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor"))
        assert papers == ["rgb(255, 255, 255)", "rgb(26, 31, 39)", "rgb(255, 255, 255)"]


def test_page_is_accessible_by_keyboard(browser: Any, filled: Dashboard) -> None:
    with opened(browser, filled.url) as page:
        has(page, "#seen", "stem")
        reached: list[str] = []
        for _ in range(30):
            page.keyboard.press("Tab")
            name = page.evaluate("((one) => one.id || one.className || one.tagName)(document.activeElement)")
            if name in reached or name == "BODY":
                break
            reached.append(name)
        assert reached[:4] == ["skip", "pause", "stages", "SUMMARY"] and "events" in reached and "wide" in reached
        unnamed = page.evaluate(
            """[...document.querySelectorAll('[role=img], [role=region], [role=group], [role=list], button')]
            .filter((one) => !["aria-label", "aria-labelledby"].some((name) => one.getAttribute(name)))
            .filter((one) => !one.innerText).map((one) => one.outerHTML)"""
        )
        assert unnamed == []
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
        assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
        found = filled.board.whole()[1]["observed"]
        picture = {"side": "cloud", "name": HOSTILE, "png": encoded(lag.torch.eye(8).numpy())}
        filled.board.set("observed", {**found, "pictures": [picture]})
        page.wait_for_function("() => (document.querySelector('.maps img') || {}).naturalWidth === 8")
        assert HOSTILE in page.get_attribute(".maps img", "alt") and page.evaluate("window.hacked") is None
        filled.board.set("observed", found)
        page.focus("summary")
        page.keyboard.press("Enter")
        assert page.locator("#rows tr").count() == 20 and page.locator("#rows tr").last.is_visible()
        assert page.locator("#rows th[scope=row]").last.inner_text() == "sum"
