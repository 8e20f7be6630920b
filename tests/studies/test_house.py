"""What was cut down stays down: words of a dialect, import contracts, the glossary."""

from __future__ import annotations

from typing import Any

import pytest

from studies.house import code_lines, measures

FOUND: Any = measures()


@pytest.mark.parametrize("word", FOUND["in code and docs"])
def test_the_field_has_another_word(word: str) -> None:
    assert FOUND["in code and docs"][word] == 0


def test_bounds() -> None:
    assert FOUND["modules"] <= 392
    assert FOUND["import contracts"] <= 12
    assert FOUND["words in the glossary"] <= 40
    assert FOUND["docstrings that begin with Of"] == 0


def test_what_counts_as_code() -> None:
    text = '"""A module."""\n\nimport os\n\n# a comment\nx = (\n    1,\n)\n'
    text += '\n\ndef f() -> int:\n    """Text."""\n    return x\n'
    assert code_lines(text) == 5
