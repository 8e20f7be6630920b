"""The page of a pruning, in a headless browser."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from edge_client.pruning.page import render
from tests.shared_hooks.selection.test_report import report


@pytest.mark.parametrize("dark", [False, True])
def test_page_is_readable_at_every_width(opened: Any, dark: bool) -> None:
    shown = opened(render(report()), 1400, dark)
    assert shown.count("svg") == 3 and shown.count("#accuracy .point") == 3 * 3
    shown.fits_everywhere()


def test_saved_data_matches_the_result(opened: Any) -> None:
    shown = opened(render(report()))
    with shown.page.expect_download() as download:
        shown.page.locator("#accuracy [data-save=csv]").click()
    assert download.value.suggested_filename == "tiny-channels-accuracy.csv"
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    variance = {int(row["channels kept"]): float(row["accuracy (%)"]) for row in rows if row["series"] == "variance"}
    assert variance == {1: 50.0, 2: 75.0, 4: 87.5}
    assert sum(row["series"] == "random, each" for row in rows) == 3
    shown.page.locator("#accuracy .point").first.focus()
    shown.page.keyboard.press("ArrowRight")
    tip = shown.page.locator("#tip")
    tip.wait_for(state="visible")
    assert "channels kept" in tip.inner_text()
