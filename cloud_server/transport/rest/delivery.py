"""Answers on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from cloud_server.transport.rest.connections import Peer
from shared_hooks.errors import Cancelled

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PIECE_BYTES = 256 << 10


async def send_whole(send: Send, peer: Peer, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """An answer of some JSON. If the request's body is not complete, the rest is not read, and the connection ends.

    Who does not fetch it waits (`connections`), so it may take any time.
    """
    known = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    is_last = peer.is_sending
    if is_last:
        known.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": known})
    await send({"type": "http.response.body", "body": body, "more_body": is_last})
    if is_last:
        await peer.ignored()
        await send({"type": "http.response.body", "body": b""})


class Delivery:
    """Of one answer, from another thread. ``fetched`` is called, in the loop, when all but its end has gone."""

    def __init__(self, send: Send, peer: Peer, fetched: Callable[[], object], seconds: float) -> None:
        """``seconds``: for all of it."""
        self._send = send
        self._peer = peer
        self._fetched = fetched
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()

    def __call__(self, head: list[bytes], behind: list[memoryview]) -> None:
        """Returns when the client has fetched it. Raises Cancelled when it has not."""
        asyncio.run_coroutine_threadsafe(self._within(head, behind), self._loop).result()

    async def _within(self, head: list[bytes], behind: list[memoryview]) -> None:
        try:
            await asyncio.wait_for(self._deliver(head, behind), self._seconds)
        except asyncio.TimeoutError:
            raise Cancelled(f"the answer was not fetched within {self._seconds:g} s") from None

    async def _deliver(self, head: list[bytes], behind: list[memoryview]) -> None:
        json_bytes = sum(map(len, head))
        nbytes = json_bytes + sum(one.nbytes for one in behind)
        kind = b"application/octet-stream" if behind else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(nbytes).encode())]
        if behind:
            headers.append((b"inference-header-content-length", str(json_bytes).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in _pieces([*head, *behind]):
            await self._put(piece, more=True)
        await self._put(b"", more=True)  # waits until the last one has gone
        if self._peer.is_closed:
            raise Cancelled("the caller left")
        self._fetched()
        await self._put(b"", more=False)

    async def _put(self, piece: bytes | bytearray, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})


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
