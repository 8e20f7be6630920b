"""The web page that runs a head: in a real browser, against the server that shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import edge_client
from edge_client import local_server
from tests.docs.pages import ROOT
from tests.edge_client.conftest import browser as browser
from tests.ports import free_port

PICTURES = sorted((ROOT / "shared_hooks/models/digits/images").glob("*.png"))
CUTS = ["stem.2", "stage2.0.conv2", "pool"]


def test_a_page_answers_all_pictures(tmp_path: Path, browser: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    shutil.copytree(
        ROOT / "examples" / "edge_in_browser",
        tmp_path,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("node_modules", "ort*", "heads"),
    )
    for words in (["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["npm", "run", "page"]):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"{' '.join(words[:2])}: {done.stderr.strip().splitlines()[-1][:200]}")
    page_folder = tmp_path / "page"
    assert edge_client.export("digits", split=CUTS, output=page_folder / "heads").ok
    port = free_port()
    arguments = ["--tails", ",".join(CUTS), "--rest-port", f"{port}", "--try", str(page_folder)]
    with local_server("digits", arguments=arguments):
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(f"{error}"))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{port}/try/")
        expect(page.locator("#state")).to_contain_text("3 cuts", timeout=120_000)
        for picture in PICTURES:
            page.set_input_files("#file", str(picture))
            label = picture.stem[-1]
            expect(page.locator("#answer")).to_have_text(re.compile(rf"^{label}\s"), timeout=60_000)
        page.locator("#cut").focus()
        for cut in CUTS[1:]:
            page.keyboard.press("ArrowRight")
            expect(page.locator("#state")).to_contain_text(f"cut after {cut}: answered", timeout=60_000)
            expect(page.locator("#answer")).to_have_text(re.compile(rf"^{label}\s"))
        assert not wrong
        page.close()
