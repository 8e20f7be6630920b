"""The site builds without a warning, has every page and public name, and asks nobody else for anything."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import edge_client
import shared_hooks
from tests.docs.pages import ROOT, pages

LOADED = re.compile(r"<(script|img|iframe|source)\b[^>]*\bsrc=[\"']?(https?:)?//|<link\b[^>]*\bhref=[\"']?(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it; a warning ends it there, and here."""
    folder = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the builder's own code
        config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in pages():
        place = page.relative_to(ROOT).as_posix().removeprefix("docs/").replace("README.md", "index.md")
        assert (site / place).with_suffix(".html").is_file(), place


@pytest.mark.parametrize("package", [edge_client, shared_hooks], ids=lambda package: str(package.__name__))
def test_every_public_name_is_in_the_reference(site: Path, package: object) -> None:
    name = package.__name__  # type: ignore[attr-defined]
    text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
    elsewhere = {file.stem.rpartition(".")[2] for file in (site / "reference").glob("*.html")} | {"__version__"}
    missing = [one for one in package.__all__ if one not in elsewhere and f'id="{name}.{one}"' not in text]  # type: ignore[attr-defined]
    assert not missing


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    found = {page.name: LOADED.findall(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert len(found) > 50 and not any(found.values())
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert styles and not any(re.search(r"url\([\"']?(https?:)?//|@import", style) for style in styles)
