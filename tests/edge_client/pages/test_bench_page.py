"""The page of a bench, in a headless browser."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from edge_client.tasks.bench import Benched
from tests.edge_client.benching.test_figures import answered, made


def page() -> str:
    steps = [made(answered(400, ms, int(rate)), rate) for rate, ms in ((10.0, 20), (20.0, 25), (40.0, 200))]
    lost = answered(400, 1500)
    for one in lost[:40]:
        one.error = "DeadlineExceeded"
    steps.append(made(lost, 80.0, machine=0.99))
    settings = {"server": "own", "split": "a=0.5,b=0.5", "codec": "raw", "clients": 4, "recorded": True}
    how = {**settings, "deadline": 1.0, "arrivals": "poisson", "give_up": 10.0}
    return Benched("<b>digits</b>", how, tuple(steps), "interrupted at 80 a second").page()


@pytest.mark.parametrize("dark", [False, True])
def test_page_is_readable_at_every_width(opened: Any, dark: bool) -> None:
    shown = opened(page(), 1400, dark)
    assert shown.count("svg") == 3
    assert shown.count("#figure-latency .point") == 3 * 4 - 1, "the last p99 lies among requests without an answer"
    assert shown.page.locator(".note.warn").first.inner_text().startswith("It is not complete: interrupted")
    shown.fits_everywhere()


def test_saved_data_matches_and_the_keyboard_reaches_it(opened: Any) -> None:
    shown = opened(page())
    with shown.page.expect_download() as download:
        shown.page.locator("#goodput [data-save=csv]").click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert [row["rate"] for row in rows] == ["10", "20", "40", "80"]
    assert float(rows[0]["goodput"]) == pytest.approx(10)
    shown.page.locator("#latency .point").first.focus()
    shown.page.keyboard.press("ArrowRight")
    tip = shown.page.locator("#tip")
    tip.wait_for(state="visible")
    assert "requests beyond" in tip.inner_text()
