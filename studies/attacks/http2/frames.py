"""Bytes of HTTP/2 frames (RFC 9113), and a connection that sends them without reading more than it must."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterable

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
CANCEL = struct.pack(">I", 8)
SERVICE = "/isthmus.v1.Split/"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame with its header of nine bytes."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(method: str = "ListModels", more: Iterable[tuple[str, str]] = ()) -> bytes:
    """A header block that touches no dynamic table, so that any stream may open with the same bytes."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method if method.startswith("/") else SERVICE + method),
        (":authority", "server"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more,
    ]
    return bytes(hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields]))


def message(body: bytes, compressed: bool = False) -> bytes:
    """One gRPC message with its prefix of five bytes."""
    return struct.pack(">BI", compressed, len(body)) + body


class Connection:
    """A connection that has said the preface and empty settings. Whatever sends raises OSError once it is closed.

    ``reads``: a thread reads and forgets what comes; else nothing is ever read.
    """

    def __init__(self, address: str, reads: bool = True, settings: bytes = b"", receive_bytes: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self.socket: socket.socket | ssl.SSLSocket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(10)
        self.socket.connect((host, int(port)))
        self.received = 0
        self.socket.sendall(PREFACE + frame(SETTINGS, payload=settings) + frame(SETTINGS, ACK))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.socket.recv(1 << 16):
                self.received += len(data)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def close(self) -> None:
        self.socket.close()
