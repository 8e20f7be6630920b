"""The hand-written chunk frames against the generated code: each side must read what the other writes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos import frames
from protos.isthmus.v1 import split_pb2

ids = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 127, 128, 2**63, 2**64 - 1]))
pieces = st.lists(st.binary(max_size=300), max_size=4)

FRAMES = [
    (split_pb2.ClientFrame, frames.serialize_client_frame, frames.parse_client_frame),
    (split_pb2.ServerFrame, frames.serialize_server_frame, frames.parse_server_frame),
]


@pytest.mark.parametrize(("kind", "serialize", "parse"), FRAMES)
@given(id=ids, offset=ids, parts=pieces)
def test_bytes_are_those_of_the_generated_code(kind, serialize, parse, id, offset, parts) -> None:  # type: ignore[no-untyped-def]
    frame = frames.ChunkFrame(id, offset, tuple(memoryview(part) for part in parts))
    stock = kind(chunk=split_pb2.Chunk(id=id, offset=offset, data=b"".join(parts)))
    assert serialize(frame) == stock.SerializeToString()
    parsed = parse(stock.SerializeToString())
    assert (parsed.id, parsed.offset, b"".join(parsed.pieces)) == (id, offset, b"".join(parts))


@pytest.mark.parametrize(("kind", "serialize", "parse"), FRAMES)
@given(data=st.binary(max_size=60), tagged=st.booleans())
def test_any_bytes_are_read_as_the_generated_code_reads_them(kind, serialize, parse, data, tagged) -> None:  # type: ignore[no-untyped-def]
    if tagged and data:
        data = bytes((0x22 if kind is split_pb2.ClientFrame else 0x1A, len(data))) + data
    try:
        expected = kind.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse(data)
        return
    found = parse(data)
    if isinstance(found, frames.ChunkFrame):
        assert expected.WhichOneof("frame") == "chunk"
        assert (found.id, found.offset, bytes(found.pieces[0])) == (
            expected.chunk.id,
            expected.chunk.offset,
            expected.chunk.data,
        )
    else:
        assert found == expected


def test_other_frames_go_through_the_generated_code() -> None:
    frame = split_pb2.ServerFrame(draining=split_pb2.Draining())
    assert frames.parse_server_frame(frames.serialize_server_frame(frame)) == frame


@given(sizes=st.lists(st.integers(0, 50), max_size=8), chunk_bytes=st.integers(1, 40))
def test_cut_covers_the_payload_without_copies(sizes: list[int], chunk_bytes: int) -> None:
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    made = list(frames.cut(9, [memoryview(buffer) for buffer in buffers], chunk_bytes))
    whole = b"".join(buffers)
    assert b"".join(piece for frame in made for piece in frame.pieces) == whole
    assert [frame.offset for frame in made] == list(range(0, len(whole), chunk_bytes))
    assert all(frame.nbytes == chunk_bytes for frame in made[:-1])
    assert all(piece.obj in buffers for frame in made for piece in frame.pieces)
