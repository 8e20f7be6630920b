"""The page of two sweeps, in a headless browser; and the command that writes it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from edge_client.__main__ import main
from edge_client.sweeping.compare import SUM, as_dict, compare, read, render
from tests.edge_client.sweeping.test_compare import sweep


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sweeps")
    a, b = (
        read(sweep(folder / name, **more)) for name, more in (("a", {"seed": 1}), ("b", {"seed": 3, "slower": 2.0}))
    )
    return as_dict(a, b, compare(a, b))


@pytest.mark.parametrize("dark", [False, True])
def test_page_is_readable_at_every_width(opened: Any, known: dict[str, Any], dark: bool) -> None:
    shown = opened(render(known), 1400, dark)
    sums = [one for one in known["compared"] if one["stage"] == SUM]
    networked = [one for one in sums if one["mode"] == "networked" or one["way"] == "edge-only"]
    assert shown.count("#ratios .row") == shown.count("#times .row") == len(networked) < len(sums)
    shown.fits_everywhere()


def test_page_shows_the_comparison(opened: Any, known: dict[str, Any]) -> None:
    shown = opened(render(known))
    label = shown.page.locator("#ratios .row").first.get_attribute("aria-label")
    assert label.startswith("edge-only. A: ") and "B is: slower" in label
    shown.page.locator("#ratios").get_by_role("button", name="and in one process").click()
    sums = [one for one in known["compared"] if one["stage"] == SUM]
    assert shown.count("#ratios .row") == len(sums)
    shown.page.locator("#ratios").get_by_role("button", name="network").click()
    with shown.page.expect_download() as download:
        shown.page.locator("#ratios [data-save=csv]").click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    wanted = [one for one in known["compared"] if one["stage"] == "network"]
    assert [(row["way"], float(row["ratio"])) for row in rows] == [(one["way"], one["ratio"]) for one in wanted]


def test_names_are_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x>"
    made: dict[str, Any] = {"a": hostile, "b": hostile, "compared": [], "differences": [hostile], "bytes": []}
    page = render({**made, "best": [None, None], "confidence": 0.95})
    assert page.count("<script") == 2 and "<img" not in page


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(sweep(tmp_path / "a", count=1))
    assert main(["compare", a, a, "--report", str(tmp_path / "page.html")]) == 0
    assert "Two sweeps side by side" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert main(["compare", a, a, "--report", str(tmp_path / "no" / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--report: " in error and "cannot be written" in error
