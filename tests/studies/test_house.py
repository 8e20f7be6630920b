"""What was cut down stays down: words of a dialect, import contracts, the glossary."""

from __future__ import annotations

import pytest

from studies.house import WORDS, code_lines, measures


@pytest.mark.parametrize("word", WORDS)
def test_the_field_has_another_word(word: str) -> None:
    assert measures()["in code and docs"][word] == 0


def test_bounds() -> None:
    found = measures()
    assert found["modules"] <= 350
    assert found["import contracts"] <= 12
    assert found["words in the glossary"] <= 40
    assert found["docstrings that begin with Of"] == 0
    assert found["class names of several classes"] == ["EdgeClient"], "its asynchronous form has the same name"


def test_lines_of_code() -> None:
    text = '"""A module."""\n\nimport os\n\n# a comment\nx = (\n    1,\n)\n'
    text += '\n\ndef f() -> int:\n    """Text."""\n    return x\n'
    assert code_lines(text) == 5
