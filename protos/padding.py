"""A probe's frames without spare copies, as `protos.frames` has those of a session: so that their cost is alike.

A round goes up as `ProbeFrame`s, the last of which says so; its answer comes down as `ProbeReply`s. Padding is a view
of one block of zeros, joined once into the message; the bytes are those of the generated classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.frames import read_varint, varint
from protos.isthmus.v1 import split_pb2

_PADDING = 1 << 3 | 2  # field 1, length-delimited, in both messages
_LAST = b"\x10\x01"  # field 2, true, in both messages
_ANSWER_BYTES = split_pb2.ProbeFrame.ANSWER_BYTES_FIELD_NUMBER << 3
_ZEROS = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True)
class Padding:
    """A frame of nothing but padding; of a `ProbeFrame` also ``last`` and ``answer_bytes``."""

    data: memoryview
    last: bool = False
    answer_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pieces(nbytes: int, chunk_bytes: int) -> Iterator[memoryview]:
    """Zeros in chunks (of 1 MiB at most), the last of which may be smaller."""
    chunk_bytes = min(chunk_bytes, _ZEROS.nbytes)
    for offset in range(0, nbytes, chunk_bytes):
        yield _ZEROS[: min(chunk_bytes, nbytes - offset)]


def serialize_frame(frame: Padding) -> bytes:
    """A ProbeFrame's bytes."""
    tail = (_LAST if frame.last else b"") + (
        bytes((_ANSWER_BYTES,)) + varint(frame.answer_bytes) if frame.answer_bytes else b""
    )
    return b"".join((*_padding(frame.data), tail))


def serialize_reply(reply: split_pb2.ProbeReply | Padding) -> bytes:
    """A ProbeReply's bytes."""
    return b"".join(_padding(reply.data)) if isinstance(reply, Padding) else reply.SerializeToString()


def parse_frame(data: bytes) -> Padding:
    """A ProbeFrame from its bytes, its padding as a view. Raises DecodeError for bytes that are none."""
    padding, rest = _split(data)
    frame = split_pb2.ProbeFrame.FromString(rest)
    return Padding(memoryview(frame.padding) if frame.padding else padding, frame.last, frame.answer_bytes)


def parse_reply(data: bytes) -> split_pb2.ProbeReply | Padding:
    """A ProbeReply from its bytes; one of nothing but padding as a view. Raises DecodeError for bytes that are none."""
    padding, rest = _split(data)
    return Padding(padding) if padding.nbytes and not rest else split_pb2.ProbeReply.FromString(data)


def _padding(data: memoryview) -> tuple[bytes | memoryview, ...]:
    return (bytes((_PADDING,)), varint(data.nbytes), data) if data.nbytes else ()


def _split(data: bytes) -> tuple[memoryview, bytes]:
    """The padding that the message begins with, as a view, and the bytes after it."""
    if data[:1] != bytes((_PADDING,)):
        return memoryview(b""), data
    try:
        size, at = read_varint(data, 1)
    except IndexError:
        raise DecodeError("truncated") from None
    if at + size > len(data):
        raise DecodeError("truncated")
    return memoryview(data)[at : at + size], data[at + size :]
