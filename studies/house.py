"""``python -m studies.house``: how long the product is, and in whose words: modules, lines of code, contracts, words,
class names with several meanings.

Lines of code are those that are left without docstrings, comments, blank lines and imports.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("shared_hooks", "edge_client", "cloud_server")
WORDS = ("told", "who asks", "gives way", "goes on", "anew")


def code_lines(text: str) -> int:
    """Return the number of lines of code in a module."""
    besides: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            besides.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in besides and bool(line.strip()) and line.strip()[0] != "#" for number, line in lines)


def pattern_of(word: str) -> str:
    """Return a pattern that finds the word also within a name."""
    return rf"(?<![a-z]){word.replace(' ', '[ _]')}(?![a-z])"


def class_names(text: str) -> list[str]:
    """Return the public classes of a module."""
    found = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]


@cache
def measures() -> dict[str, Any]:
    """Return all measures by name."""
    texts = [file.read_text(encoding="utf-8") for top in TOPS for file in (ROOT / top).rglob("*.py")]
    others = [file for top in ("tests", "studies") for file in (ROOT / top).rglob("*.py") if "house" not in file.name]
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *others]
    read = [file.read_text(encoding="utf-8") for file in pages]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    names = Counter(name for text in texts for name in class_names(text))
    return {
        "modules": len(texts),
        "of at most 60 lines": sum(len(text.splitlines()) <= 60 for text in texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "lines of code": sum(map(code_lines, texts)),
        "import contracts": len(contracts),
        "words in the glossary": sum(line[:2] == "| " and not line.startswith("| word") for line in glossary),
        "class names of several classes": sorted(name for name, count in names.items() if count > 1),
        "docstrings that begin with Of": sum(
            len(re.findall(r'^\s*"""Of ', text, re.MULTILINE)) for text in (*texts, *read)
        ),
        "in code and docs": {
            word: sum(len(re.findall(pattern_of(word), text)) for text in (*texts, *read)) for word in WORDS
        },
    }


if __name__ == "__main__":
    print(json.dumps(measures(), indent=1))
