"""A headless browser for the tests of pages.

It is ended after each file: while it is there, its thread has a running event loop, in which neither a second browser
nor `asyncio.run` may start.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        one = started.chromium.launch(executable_path=BROWSER, args=SWITCHES, timeout=120_000)
        yield one
        one.close()
