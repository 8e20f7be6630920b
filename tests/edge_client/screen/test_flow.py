"""Text in pieces: all of it arrives, words stay whole on a terminal, and nothing that it holds rules the screen."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.commands.speaking import Flow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """21 columns, of which the last stays free."""
    monkeypatch.setenv("COLUMNS", "21")
    return Terminal()


def seen(written: str) -> list[str]:
    """Lines as a terminal shows them, which knows "go n to the left" and "clear to the end of the line"."""
    lines = [""]
    for part in re.findall(r"\x1b\[\d+D\x1b\[K|.|\n", written):
        if part.startswith("\x1b"):
            lines[-1] = lines[-1][: -int(part[2:].partition("D")[0])]
        elif part == "\n":
            lines.append("")
        else:
            lines[-1] += part
    return lines


def test_words_stay_whole(narrow: Terminal) -> None:
    flow = Flow(narrow)
    for piece in ("the first la", "yers run he", "re and the oth", "ers there"):
        flow.write(piece)
    flow.end()
    assert seen(narrow.getvalue()) == ["the first layers run", "here and the others ", "there", ""]


def test_a_word_that_is_longer_than_a_line_is_broken(narrow: Terminal) -> None:
    Flow(narrow).write("x" * 45)
    assert seen(narrow.getvalue()) == ["x" * 20, "x" * 20, "x" * 5]


@given(st.lists(st.text(st.sampled_from("ab \n"), max_size=30)))
def test_pieces_do_not_matter(pieces: list[str]) -> None:
    whole, parts = Terminal(), Terminal()
    Flow(whole).write("".join(pieces))
    flow = Flow(parts)
    for piece in pieces:
        flow.write(piece)
    assert whole.getvalue() == parts.getvalue()


@given(st.text(st.sampled_from("abc \n")))
def test_a_file_gets_the_text_as_it_is(text: str) -> None:
    file = io.StringIO()
    flow = Flow(file)
    flow.write(text)
    flow.end()
    assert file.getvalue() == (text if text.endswith("\n") or not text else f"{text}\n")


def test_a_model_does_not_rule_the_terminal(narrow: Terminal) -> None:
    Flow(narrow).write("\x1b[2J\x07\r")
    assert narrow.getvalue() == "\\x1b[2J\\x07\\r"
