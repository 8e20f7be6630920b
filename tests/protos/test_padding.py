"""The hand-written probe frames against the generated code: each side must read what the other writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protos import padding
from protos.isthmus.v1 import split_pb2

numbers = st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([0, 1, 127, 128]))


@given(data=st.binary(max_size=300), last=st.booleans(), answer_bytes=numbers)
def test_a_frame_is_what_the_generated_code_makes(data: bytes, last: bool, answer_bytes: int) -> None:
    stock = split_pb2.ProbeFrame(padding=data, last=last, answer_bytes=answer_bytes).SerializeToString()
    made = padding.Padding(memoryview(data), last, answer_bytes)
    assert padding.serialize_frame(made) == stock
    found = padding.parse_frame(stock)
    assert (bytes(found.data), found.last, found.answer_bytes) == (data, last, answer_bytes)


@given(data=st.binary(max_size=300))
def test_an_answers_padding_is_what_the_generated_code_makes(data: bytes) -> None:
    stock = split_pb2.ProbeReply(padding=data).SerializeToString()
    assert padding.serialize_reply(padding.Padding(memoryview(data))) == stock
    found = padding.parse_reply(stock)
    assert bytes(found.data if isinstance(found, padding.Padding) else found.padding) == data


def test_the_end_of_an_answer_goes_through_the_generated_code() -> None:
    reply = split_pb2.ProbeReply(last=True, received_bytes=7, server_ns=1, load=split_pb2.Load(pending=2))
    assert padding.parse_reply(padding.serialize_reply(reply)) == reply


@given(data=st.binary(max_size=40))
def test_no_bytes_do_harm(data: bytes) -> None:
    for parse in (padding.parse_frame, padding.parse_reply):
        try:
            parse(data)
        except padding.DecodeError:
            pass


@given(nbytes=st.integers(0, 5 << 20), chunk_bytes=st.integers(1 << 16, 4 << 20))
def test_pieces_add_up(nbytes: int, chunk_bytes: int) -> None:
    sizes = [piece.nbytes for piece in padding.pieces(nbytes, chunk_bytes)]
    assert sum(sizes) == nbytes
    assert all(size == min(chunk_bytes, 1 << 20) for size in sizes[:-1])
