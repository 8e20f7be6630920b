"""What a page asks, without a browser."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.waiting import PATIENCE


def asked(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers by lower-case name, body. Underscores in names are dashes."""
    with _connection(port) as connection:
        host = headers.pop("host", f"127.0.0.1:{port}")
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def reported(port: int) -> Iterator[tuple[str, Any]]:
    """(event, data) of the stream, as they come, until it ends."""
    with _connection(port) as connection:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        kind = ""
        for line in answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


class _connection:
    def __init__(self, port: int) -> None:
        self._made = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def __enter__(self) -> http.client.HTTPConnection:
        return self._made

    def __exit__(self, *_: object) -> None:
        self._made.close()
