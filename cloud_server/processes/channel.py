"""Messages between the server and one worker: a Unix socket, JSON and raw bytes, never objects.

A message is the sizes of its parts (one u32 for each, and before them their number), then the parts: the first is JSON,
the others are bytes as they are. Payloads do not come this way; they lie in `memory`.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

MAX_PARTS = 8
MAX_BYTES = 256 << 20
"""Largest message: a peer that has gone astray must not make this side allocate anything."""
READ_BYTES = 64 << 10

Message = tuple[dict[str, Any], list[bytes]]


class Lost(Exception):
    """The other side is gone, or says what no message is."""


class Channel:
    """One end. One thread at a time sends and receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, head: dict[str, Any], *parts: bytes, seconds: float | None = None) -> None:
        """Raises Lost, and TimeoutError if the other side does not take it within ``seconds``."""
        text = json.dumps(head, separators=(",", ":")).encode()
        sizes = struct.pack(f"<{len(parts) + 2}I", len(parts) + 1, len(text), *map(len, parts))
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(b"".join((sizes, text, *parts)))
        except TimeoutError:
            raise
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self, seconds: float | None = None) -> Message:
        """The next message. Raises Lost, and TimeoutError if it is not there within ``seconds``."""
        until = None if seconds is None else time.monotonic() + seconds
        try:
            (count,) = struct.unpack("<I", self._exactly(4, until))
            if not 1 <= count <= MAX_PARTS:
                raise Lost(f"a message of {count} parts")
            sizes = struct.unpack(f"<{count}I", self._exactly(4 * count, until))
            if sum(sizes) > MAX_BYTES:
                raise Lost(f"a message of {sum(sizes)} bytes")
            text, *parts = [self._exactly(size, until) for size in sizes]
            head = json.loads(text)
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise Lost(str(error)) from error
        if not isinstance(head, dict):
            raise Lost("a message without a head")
        return head, parts

    def _exactly(self, size: int, until: float | None) -> bytes:
        while len(self._read) < size:
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            more = self._socket.recv(max(size - len(self._read), READ_BYTES))
            if not more:
                raise Lost("the other side is gone")
            self._read += more
        found = bytes(memoryview(self._read)[:size])
        del self._read[:size]
        return found

    def hang_up(self) -> None:
        """Wakes who receives, on either side."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first

    def close(self) -> None:
        """Nobody may be receiving any more."""
        self.hang_up()
        self._socket.close()
