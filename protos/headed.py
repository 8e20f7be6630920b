"""Headers with the first bytes of their payload behind them in one message, without spare copies.

A message costs several hand-overs between threads on either side, whatever its size, so a payload begins in its
header's message. Through the generated classes these bytes would be copied four times (`protos.chunks`); here one join
serializes them, and what is parsed is a view of the message. They are written before the other fields, which protobuf
allows, so a reader need not look at those to find them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from protos.chunks import nbytes_of, read_varint, varint
from protos.isthmus.v1 import split_pb2

_LENGTH_DELIMITED: Final = 2
_REQUEST: Final = split_pb2.ClientFrame.REQUEST_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_REQUEST_PAYLOAD: Final = split_pb2.RequestHeader.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_REPLY: Final = split_pb2.ServerFrame.REPLY_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_REPLY_PAYLOAD: Final = split_pb2.ReplyHeader.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


@dataclass(frozen=True)
class HeadedRequest:
    """A request's header and the first bytes of its payload: those of ``pieces``, one after the other.

    ``header.payload`` itself is empty.
    """

    header: split_pb2.RequestHeader
    pieces: tuple[memoryview, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, in this message."""
        return sum(map(nbytes_of, self.pieces))


@dataclass(frozen=True)
class HeadedReply:
    """The same of an answer."""

    header: split_pb2.ReplyHeader
    pieces: tuple[memoryview, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, in this message."""
        return sum(map(nbytes_of, self.pieces))


def serialize_request(frame: HeadedRequest) -> bytes:
    """The bytes of a ClientFrame."""
    return _serialize(frame.header.SerializeToString(), frame.pieces, _REQUEST, _REQUEST_PAYLOAD)


def serialize_reply(frame: HeadedReply) -> bytes:
    """The bytes of a ServerFrame."""
    return _serialize(frame.header.SerializeToString(), frame.pieces, _REPLY, _REPLY_PAYLOAD)


def parse_request(data: bytes) -> HeadedRequest | None:
    """The header in the bytes of a ClientFrame; None unless they are written as `serialize_request` does with pieces,
    which leaves them to the generated code. Raises DecodeError.
    """
    if (found := _parse(data, _REQUEST, _REQUEST_PAYLOAD)) is None:
        return None
    header = split_pb2.RequestHeader.FromString(found[1])
    return None if header.payload else HeadedRequest(header, (found[0],))


def parse_reply(data: bytes) -> HeadedReply | None:
    """The same for a ServerFrame."""
    if (found := _parse(data, _REPLY, _REPLY_PAYLOAD)) is None:
        return None
    header = split_pb2.ReplyHeader.FromString(found[1])
    return None if header.payload else HeadedReply(header, (found[0],))


def request_of(header: split_pb2.RequestHeader) -> HeadedRequest:
    """A header as the generated code has it, with all that it holds of the payload; that is taken out of it."""
    pieces = (memoryview(header.payload),) if header.payload else ()
    header.ClearField("payload")
    return HeadedRequest(header, pieces)


def reply_of(header: split_pb2.ReplyHeader) -> HeadedReply:
    """The same of an answer."""
    pieces = (memoryview(header.payload),) if header.payload else ()
    header.ClearField("payload")
    return HeadedReply(header, pieces)


def _serialize(header: bytes, pieces: tuple[memoryview, ...], tag: int, payload_tag: int) -> bytes:
    nbytes = sum(map(nbytes_of, pieces))
    front = bytes((payload_tag,)) + varint(nbytes) if nbytes else b""
    size = len(front) + nbytes + len(header)
    return b"".join((bytes((tag,)), varint(size), front, *pieces, header))


def _parse(data: bytes, tag: int, payload_tag: int) -> tuple[memoryview, bytes] | None:
    """(payload, the other fields) of the header in ``data``, if its payload comes first."""
    if len(data) < 2 or data[0] != tag:
        return None
    try:
        size, at = read_varint(data, 1)
        if at + size != len(data) or data[at] != payload_tag:
            return None
        size, at = read_varint(data, at + 1)
    except (IndexError, DecodeError):
        return None
    if size == 0 or at + size > len(data):
        return None
    return memoryview(data)[at : at + size], data[at + size :]
