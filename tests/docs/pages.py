"""The Markdown that we publish, cut into what can be checked: fenced blocks, each with its note, and links.

A *note* is an HTML comment right before a block. It says to the reader of the file, and to these tests, why a block
is not as the others:

    <!-- not run: needs a camera -->      parsed only; the reason is counted (test_reasons.py)
    <!-- before: CODE -->                 Python that runs first and is not shown
    <!-- varies: times -->                of an output: what it says of times and ports differs from run to run
    <!-- printed -->                      what the Python before it printed
    <!-- file: examples/camera.py -->     this file, whole
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
NOTE = re.compile(r"<!--\s*(not run|before|varies|file|printed)(?::\s*(.*?))?\s*-->\s*\Z", re.DOTALL)
LANGUAGES = {"python", "sh", "console", "toml", "text", "json", "yaml", "ini", "html"}
"""What a block may be. ``text`` is what nobody reads but people: a drawing, a table of figures."""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: of its opening fence, from 1; ``notes``: what the comments before it say."""

    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """Why this block does not run; None where it does."""
        return self.notes.get("not run")


@dataclass(frozen=True)
class Link:
    page: Path
    line: int
    target: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.target}"


@cache
def pages() -> tuple[Path, ...]:
    """README, SECURITY, CHANGELOG, docs/, deploy/ and examples/; not what others wrote, nor what tests read."""
    found = [
        ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md", "examples/README.md")
    ]
    return (*found, *sorted((ROOT / "docs").rglob("*.md")))


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    found = []
    notes: dict[str, str] = {}
    for token in _tokens(page):
        if token.type == "html_block":
            if note := NOTE.match(token.content):
                notes[note[1]] = note[2] or ""
            continue
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, notes))
        notes = {}
    return tuple(found)


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page) if not languages or block.language in languages]


def links(page: Path) -> Iterator[Link]:
    """Links and images of a page, as they are written."""
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if target:
                assert token.map is not None
                yield Link(page, token.map[0] + 1, str(target))


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link to this page may end in: its headings, as GitHub and the site both write them."""
    names: list[str] = []
    previous: Token | None = None
    for token in _tokens(page):
        if previous is not None and previous.type == "heading_open":
            name = slug(token.content)
            names.append(name if name not in names else f"{name}-{names.count(name)}")
        previous = token
    return frozenset(names)


def slug(heading: str) -> str:
    """The anchor of a heading. mkdocs.yml makes the same one that GitHub does."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@cache
def _tokens(page: Path) -> tuple[Token, ...]:
    text = page.read_text(encoding="utf-8")
    return tuple(MarkdownIt("commonmark").enable("table").parse(text))


@cache
def tracked() -> frozenset[str]:
    """The files of the repository, where this is one; else those that lie there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return frozenset(listed.stdout.splitlines())
    return frozenset(str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts)


def inline(page: Path) -> Iterator[str]:
    """What sentences and tables have in code font."""
    for token in _tokens(page):
        yield from (child.content for child in token.children or () if child.type == "code_inline")
