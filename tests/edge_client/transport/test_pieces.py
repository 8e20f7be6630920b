"""Pieces grow on quick links, shrink on slow ones, and never outgrow what the server takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_client.transport.pieces import LARGEST, ROOM, Pieces

MIB = 1 << 20


def test_quick_pieces_grow_and_slow_ones_shrink() -> None:
    pieces = Pieces(MIB)
    pieces.up_to(4 * MIB)
    for _ in range(4):
        pieces.gone(pieces.nbytes, 0.001)
    assert pieces.nbytes == 4 * MIB - ROOM
    pieces.gone(100, 0.001)  # tells nothing
    assert pieces.nbytes == 4 * MIB - ROOM
    for _ in range(4):
        pieces.gone(pieces.nbytes, 1.0)
    assert pieces.nbytes == MIB


@given(
    least=st.integers(1, MIB),
    message_bytes=st.integers(ROOM + 1, 64 * MIB),
    went=st.lists(st.tuples(st.booleans(), st.floats(0, 10))),
)
def test_no_piece_is_larger_than_a_message(least: int, message_bytes: int, went: list[tuple[bool, float]]) -> None:
    pieces = Pieces(least)
    pieces.up_to(message_bytes)
    for full, seconds in went:
        pieces.gone(pieces.nbytes if full else 1, seconds)
        assert 0 < pieces.nbytes <= min(message_bytes, LARGEST) - ROOM
