"""A request's body as it arrives: counted before it is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloud_server.inference.held import Hold
from shared_hooks.errors import BadFrame, Cancelled, TooLarge

Receive = Callable[[], Awaitable[Any]]

STEP = 1 << 20
"""Bytes by which a body of unknown length is counted in advance."""


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, hold: Hold, most: int, heard: Callable[[], object]
) -> memoryview:
    """All of it, at most ``most`` bytes; ``heard`` is called for each piece.

    Raises TooLarge, and ServerUnavailable when there is no room for it.
    """
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding != b"identity":
        raise BadFrame(f"a body in {encoding[:40]!r}: bodies are taken as they are")
    announced = _number(headers, b"content-length")
    _check(announced or 0, most)
    counted = announced or 0
    hold.more(counted)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the caller left")
        heard()
        body += message.get("body", b"")
        _check(len(body), most)
        if len(body) > counted:
            hold.more(STEP)
            counted += STEP
        if not message.get("more_body", False):
            return memoryview(body).toreadonly()


def json_bytes(headers: Mapping[bytes, bytes]) -> int | None:
    """How much of the body is JSON; None = all."""
    return _number(headers, b"inference-header-content-length")


def _check(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise TooLarge(f"a body of {nbytes} bytes; at most {most} are taken (max_request_bytes)")


def _number(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isdigit() and len(text) < 20):
        raise BadFrame(f"the header {name.decode()} is no number")
    return int(text)
