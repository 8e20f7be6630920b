"""Links lead somewhere: to a file of the repository, a heading that is there. Those outside are listed, not fetched."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.commands import PROMPT
from tests.docs.pages import LANGUAGES, ROOT, anchors, blocks, links, pages, slug


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = [link.where for link in links(page) if not _leads(page, link.target)]
    assert not wrong, "\n".join(wrong)


def _leads(page: Path, target: str) -> bool:
    parts = urlsplit(target)
    if parts.scheme:
        return parts.scheme == "https" and bool(parts.netloc)
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not file.is_relative_to(ROOT) or not file.is_file():  # a folder is no page of the site
        return False
    return not parts.fragment or (file.suffix == ".md" and parts.fragment in anchors(file))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    wrong = [block.where for block in blocks(page) if block.language not in LANGUAGES]
    wrong += [block.where for block in blocks(page) if block.language == "text" and PROMPT.match(block.text)]
    assert not wrong, f"a fence with one of {', '.join(sorted(LANGUAGES))} is expected: {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [("The server's file", "the-servers-file"), ("`run` and *auto*", "run-and-auto"), ("A [link](x.md)", "a-link")],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor
