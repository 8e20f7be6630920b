"""What the glossary has in code font is in the code, or on a command line."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
QUOTED = sorted({word for row in ROWS for quoted in re.findall(r"`([^`]+)`", row) for word in quoted.split()})


@cache
def source() -> str:
    """All of the product's code, and the commands' names."""
    files = [file for top in ("shared_hooks", "edge_client", "cloud_server") for file in (ROOT / top).rglob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in (*files, ROOT / "pyproject.toml"))


@pytest.mark.parametrize("word", QUOTED)
def test_the_code_has_the_word(word: str) -> None:
    name = word.rpartition(".")[2]  # of `WrappedModel.head` the method
    if word.startswith("--"):
        field = re.escape(word[2:].replace("-", "_"))  # of which the option is made
        pattern = rf'"{re.escape(word)}"|(?m:^    {field}: .*= option\()'
    elif name[:1].isupper():
        pattern = rf"(?m)^class {re.escape(name)}\b"
    elif word.startswith("#"):
        pattern = r'"#"|#\{'
    else:
        pattern = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
    assert re.search(pattern, source()), f"`{word}` is in docs/glossary.md and nowhere else"
