"""README's first minute: no more than six lines from a model of one's own to its first split answer."""

from __future__ import annotations

from itertools import takewhile

from tests.docs.commands import commands
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "README.md"
INSTALLING = 1
"""The line that installs it, which comes before."""


def test_six_lines_to_a_first_answer() -> None:
    """Spec file and server included. That they do what they say, test_pages.py shows: it follows just these lines."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index("## The first minute") + 1
    end = first + len(list(takewhile(lambda line: not line.startswith("## "), lines[first:])))
    section = [block for block in blocks(PAGE) if first < block.line < end]
    spec = [line for block in section if block.language == "toml" for line in block.text.splitlines() if line[0] != "#"]
    typed = [command.text for block in section if block.language == "console" for command in commands(block)]
    assert [text.split()[0] for text in typed] == ["cloud-server", "edge-client"]
    assert INSTALLING + len(spec) + len(typed) <= 6, [*spec, *typed]
