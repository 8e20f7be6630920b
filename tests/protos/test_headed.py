"""Headers with payload behind them, by hand and by the generated code: each side reads what the other writes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos import frames
from protos.isthmus.v1 import split_pb2

ids = st.integers(0, 2**64 - 1)
pieces = st.lists(st.binary(max_size=300), max_size=3)
KINDS = [
    ("request", split_pb2.ClientFrame, split_pb2.RequestHeader, frames.HeadedRequest),
    ("reply", split_pb2.ServerFrame, split_pb2.ReplyHeader, frames.HeadedReply),
]


def serialize(frame: frames.HeadedRequest | frames.HeadedReply) -> bytes:
    if isinstance(frame, frames.HeadedRequest):
        return frames.serialize_client_frame(frame)
    return frames.serialize_server_frame(frame)


@pytest.mark.parametrize(("name", "stock", "header", "made"), KINDS)
@given(id=ids, reported=st.binary(max_size=200), parts=pieces)
def test_both_ways(name, stock, header, made, id, reported, parts) -> None:  # type: ignore[no-untyped-def]
    payload = b"".join(parts)
    whole = stock(**{name: header(id=id, header=reported, payload_bytes=len(payload), payload=payload)})
    bare = header(id=id, header=reported, payload_bytes=len(payload))
    data = serialize(made(bare, tuple(memoryview(part) for part in parts)))
    assert stock.FromString(data) == whole
    parse = frames.parse_client_frame if name == "request" else frames.parse_server_frame
    for message in (data, whole.SerializeToString()):
        found = parse(message)
        if not isinstance(found, made):
            of = frames.request_of if name == "request" else frames.reply_of
            found = of(getattr(found, name))
        assert found.header == bare
        assert b"".join(found.pieces) == payload


@pytest.mark.parametrize(("name", "stock", "header", "made"), KINDS)
@given(data=st.binary(max_size=40), front=st.binary(max_size=6))
def test_any_bytes_are_read_as_the_generated_code_reads_them(name, stock, header, made, data, front) -> None:  # type: ignore[no-untyped-def]
    payload_tag = header.DESCRIPTOR.fields_by_name["payload"].number << 3 | 2
    inner = bytes((payload_tag, len(front))) + front + data
    message = bytes((stock.DESCRIPTOR.fields_by_name[name].number << 3 | 2, len(inner))) + inner
    parse = frames.parse_client_frame if name == "request" else frames.parse_server_frame
    try:
        expected = stock.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse(message)
        return
    found = parse(message)
    if not isinstance(found, made):
        assert found == expected
        return
    assert b"".join(found.pieces) == getattr(expected, name).payload
    getattr(expected, name).ClearField("payload")
    assert found.header == getattr(expected, name)
