"""The documentation stays short: words of the pages, without decisions, results, the tables that are
written from declarations, and hidden comments."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, pages

MOST = 38_283
"""Raised with a capability that needs a page, by no more than that page: the last was a section of `chains.md`."""


def words(text: str) -> int:
    """Without what is hidden, and marks alone (a table's bars)."""
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split())


def test_the_documentation_has_no_more_words_than_can_be_read() -> None:
    folder = ROOT / "docs"
    shown = [page for page in pages() if page.is_relative_to(folder)]
    counts = {
        page.relative_to(folder): words(page.read_text(encoding="utf-8"))
        for page in shown
        if page.relative_to(folder).parts[0] not in ("decisions", "results", "options.md")
    }
    assert len(counts) > 30 and sum(counts.values()) <= MOST, sorted(counts.items(), key=lambda one: -one[1])[:10]
