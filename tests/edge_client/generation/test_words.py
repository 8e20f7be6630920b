"""Text as it comes is the text that there is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_client.generation import TextStream, Words
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import load_spec


class Bytes:
    """A token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


@given(st.text())
def test_pieces_are_the_whole(text: str) -> None:
    pieces: list[str] = []
    words = Words(Bytes())
    stream = TextStream(words, pieces.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for one in words.encode(text):
        stream.put(torch.tensor([one]))
    stream.end()
    assert "".join(pieces) == text
    assert stream.ids == words.encode(text)


def test_half_a_character_waits_for_its_other_half() -> None:
    pieces: list[str] = []
    stream = TextStream(Words(Bytes()), pieces.append)
    first, second = "é".encode()
    stream.add([first])
    assert pieces == []
    stream.add([second])
    assert pieces == ["é"]


def test_incomplete_character_is_written_at_the_end() -> None:
    pieces: list[str] = []
    stream = TextStream(Words(Bytes()), pieces.append)
    stream.add([0xE2])
    stream.end()
    assert pieces == ["\ufffd"]


def test_several_sequences_are_not_written_as_they_come() -> None:
    stream = TextStream(Words(Bytes()), print)
    stream.put(torch.tensor([[1], [2]]))
    with pytest.raises(SpecError, match="one sequence"):
        stream.put(torch.tensor([[1], [2]]))


def test_a_tokenizer_that_cannot_read() -> None:
    class OneWay:
        def decode(self, ids: Sequence[int]) -> str:
            return ""

    with pytest.raises(SpecError, match=r"OneWay has no encode\(\)"):
        Words(OneWay())


def test_a_tokenizer_that_gives_no_numbers() -> None:
    class Letters(Bytes):
        def encode(self, text: str) -> list[int]:
            return list(text)  # type: ignore[arg-type]

    with pytest.raises(InputMismatch, match="str"):
        Words(Letters()).encode("a")


def test_a_spec_without_a_tokenizer() -> None:
    with pytest.raises(SpecError, match="names no tokenizer"):
        Words.of(load_spec("digits"))
    with pytest.raises(SpecError, match="no spec"):
        Words.of(None)
