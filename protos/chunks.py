"""Chunk frames without spare copies: cut from buffers, serialized, parsed.

Chunks carry nearly all bytes of the wire, and a protobuf ``bytes`` field takes no memoryview: through the generated
classes every chunk is copied into a ``bytes`` object, into the message and into its serialization, and twice more on
the other side. Here one join serializes it, and the parsed chunk is a view of the message it came in. The bytes are
those of the generated classes (the tests hold them together), so either end may use either. Measured on loopback, a
round trip of 3.2 MB in chunks of 1 MiB: 3.5 ms with the generated code, 2.3 ms with these functions.

Only this module, `protos.headed` and `protos.padding` know protobuf's encoding
(https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from google.protobuf.message import DecodeError

from protos.isthmus.v1 import split_pb2

_VARINT, _LENGTH_DELIMITED = 0, 2
_ID = split_pb2.Chunk.ID_FIELD_NUMBER << 3 | _VARINT
_OFFSET = split_pb2.Chunk.OFFSET_FIELD_NUMBER << 3 | _VARINT
_DATA = split_pb2.Chunk.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
CLIENT = split_pb2.ClientFrame.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
SERVER = split_pb2.ServerFrame.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
"""The tags of a chunk in a ClientFrame and in a ServerFrame."""
nbytes_of = attrgetter("nbytes")


@dataclass(frozen=True)
class ChunkFrame:
    """One chunk of payload ``id``: the bytes of ``pieces`` one after the other, starting at ``offset``."""

    id: int
    offset: int
    pieces: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.pieces))


def cut(id: int, buffers: Iterable[memoryview], chunk_bytes: int) -> Iterator[ChunkFrame]:
    """The concatenation of ``buffers`` in chunks of ``chunk_bytes`` (the last may be smaller); nothing is copied."""
    offset, filled = 0, 0
    pieces: list[memoryview] = []
    for buffer in buffers:
        rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        while rest.nbytes:
            piece = rest[: chunk_bytes - filled]
            rest = rest[piece.nbytes :]
            pieces.append(piece)
            filled += piece.nbytes
            if filled == chunk_bytes:
                yield ChunkFrame(id, offset, tuple(pieces))
                offset, filled, pieces = offset + filled, 0, []
    if filled:
        yield ChunkFrame(id, offset, tuple(pieces))


def view(chunk: split_pb2.Chunk) -> ChunkFrame:
    """A chunk as the generated code has it."""
    return ChunkFrame(chunk.id, chunk.offset, (memoryview(chunk.data),))


def serialize(frame: ChunkFrame, tag: int) -> bytes:
    """The bytes of a frame that is this chunk. ``tag``: `CLIENT` or `SERVER`."""
    nbytes = frame.nbytes
    prefix = b""  # proto3: a field that is zero or empty is left out
    if frame.id:
        prefix += bytes((_ID,)) + varint(frame.id)
    if frame.offset:
        prefix += bytes((_OFFSET,)) + varint(frame.offset)
    if nbytes:
        prefix += bytes((_DATA,)) + varint(nbytes)
    return b"".join((bytes((tag,)), varint(len(prefix) + nbytes), prefix, *frame.pieces))


def parse(data: bytes, tag: int) -> ChunkFrame | None:
    """The chunk in ``data``; None unless it is written as `serialize` does, which leaves it to the generated code."""
    if len(data) < 2 or data[0] != tag:
        return None
    try:
        size, at = read_varint(data, 1)
        if at + size != len(data):
            return None
        id = offset = 0
        if data[at] == _ID:
            id, at = read_varint(data, at + 1)
        if data[at] == _OFFSET:
            offset, at = read_varint(data, at + 1)
        if data[at] != _DATA:
            return None
        size, at = read_varint(data, at + 1)
    except (IndexError, DecodeError):
        return None
    return ChunkFrame(id, offset, (memoryview(data)[at:],)) if at + size == len(data) else None


def varint(value: int) -> bytes:
    """Base 128, the lowest groups first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position after it); IndexError where the data end, DecodeError for more than 64 bits."""
    value = shift = 0
    while shift < 63:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("varint")
