"""docs/options.md is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from studies.options import page


def test_the_page_is_written_from_the_declarations() -> None:
    written = Path("docs/options.md").read_text(encoding="utf-8")
    assert written == page(), "python -m studies.options > docs/options.md"
