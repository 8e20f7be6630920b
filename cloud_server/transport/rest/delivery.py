"""Answers on their way: in pieces, each within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from shared_hooks.errors import Cancelled

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FETCH_SECONDS = 60.0
"""For a client to fetch a piece."""
PIECE_BYTES = 256 << 10


async def send_whole(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """An answer of some JSON."""
    known = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*known, *headers]})
    await send({"type": "http.response.body", "body": body})


def deliver(send: Send, loop: asyncio.AbstractEventLoop, head: list[bytes], behind: list[memoryview]) -> None:
    """From another thread; returns when all is fetched. Raises Cancelled when it is not."""
    asyncio.run_coroutine_threadsafe(_deliver(send, head, behind), loop).result()


async def _deliver(send: Send, head: list[bytes], behind: list[memoryview]) -> None:
    json_bytes = sum(map(len, head))
    nbytes = json_bytes + sum(one.nbytes for one in behind)
    kind = b"application/octet-stream" if behind else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(nbytes).encode())]
    if behind:
        headers.append((b"inference-header-content-length", str(json_bytes).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        for piece in _pieces([*head, *behind]):
            await asyncio.wait_for(_put(send, piece, more=True), FETCH_SECONDS)
        await asyncio.wait_for(_put(send, b"", more=False), FETCH_SECONDS)  # waits until the last one has gone
    except asyncio.TimeoutError:
        raise Cancelled(f"nothing of the answer was fetched for {FETCH_SECONDS:g} s") from None


async def _put(send: Send, piece: bytes | bytearray, more: bool) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})


def _pieces(buffers: list[bytes | memoryview]) -> Iterator[bytearray]:
    """All of them, small ones together."""
    piece = bytearray()
    for buffer in buffers:
        for at in range(0, len(buffer), PIECE_BYTES):
            piece += buffer[at : at + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield piece
                piece = bytearray()
    yield piece
