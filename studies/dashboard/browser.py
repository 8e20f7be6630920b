"""``python -m studies.dashboard.browser URL FOLDER``: obeys lines on standard input, answers each with a line of JSON.

``shot NAME WIDTH light|dark`` writes FOLDER/NAME.png, the whole page; ``look`` tells what the page says now.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Error, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
TRIES = 60
LOOK = """() => ({
  cut: document.querySelector('#now-cut').innerText, latency: document.querySelector('#now-ms').innerText,
  up: document.querySelector('#now-up').innerText, state: document.querySelector('#state').innerText,
  events: [...document.querySelectorAll('#events li')].map((one) => one.innerText.replaceAll('\\n', ' ')),
})"""


def main(url: str, folder: str) -> None:
    """See the module."""
    path = next(found for name in BROWSERS if (found := shutil.which(name)))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=SWITCHES, timeout=120_000)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        _open(page, url)
        page.wait_for_selector("html[data-drawn=yes]", state="attached")
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(_obey(page, line.split(), Path(folder))), flush=True)
        browser.close()


def _open(page: Any, url: str) -> None:
    """As soon as it is there: its server loads torch and a model first."""
    for left in reversed(range(TRIES)):
        try:
            page.goto(url)
            return
        except Error:
            if not left:
                raise
            time.sleep(1)


def _obey(page: Any, order: list[str], folder: Path) -> Any:
    match order:
        case ["shot", name, width, scheme]:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": int(width), "height": 900})
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"{name}.png", full_page=True)
            return page.evaluate("document.documentElement.scrollWidth") <= int(width)
        case ["look"]:
            return page.evaluate(LOOK)
    raise SystemExit(f"browser: what is {' '.join(order)!r}?")


if __name__ == "__main__":
    main(*sys.argv[1:])
