"""One field of a message, without reading the message: what somebody else is to read costs nothing here."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from protos.chunks import read_varint

_VARINT, _BITS_64, _LENGTH_DELIMITED, _BITS_32 = 0, 1, 2, 5
_SIZES: Final = {_BITS_64: 8, _BITS_32: 4}


def text(data: bytes, number: int, most: int) -> str:
    """The string field ``number`` of a message of at most ``most`` fields; empty where there is none.

    Raises DecodeError, also for groups, which no message of proto3 has.
    """
    found, at = b"", 0
    try:
        for _ in range(most + 1):
            if at == len(data):
                return found.decode()
            tag, at = read_varint(data, at)
            kind = tag & 7
            size = _SIZES.get(kind, 0)
            if kind in (_VARINT, _LENGTH_DELIMITED):
                value, at = read_varint(data, at)
                size = value if kind == _LENGTH_DELIMITED else 0
            elif not size:
                raise DecodeError(f"a field of kind {kind}")
            if at + size > len(data):
                raise DecodeError("it ends in the middle of a field")
            if tag == number << 3 | _LENGTH_DELIMITED:
                found = data[at : at + size]
            at += size
    except (IndexError, UnicodeDecodeError) as error:
        raise DecodeError(str(error)) from error
    raise DecodeError(f"more than {most} fields")
