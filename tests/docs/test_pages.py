"""Each page does what it says: somebody who follows it from top to bottom gets what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, pages
from tests.docs.reader import Reader, difference
from tests.docs.serving import a_server

RUNNING = [page for page in pages() if any(block.not_run is None for block in blocks(page))]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The ports of one server for all pages that start none."""
    with a_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, ports: dict[str, str], tmp_path: Path) -> None:
    with Reader(tmp_path, ports) as reader:
        for block in blocks(page):
            output = reader.follow(block)
            wrong = None if output is None else difference(output)
            assert wrong is None, wrong
