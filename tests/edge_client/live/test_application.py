"""Who may ask the page for what, and what a reader costs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from edge_client.live.board import Board
from edge_client.live.server import MOST_READERS, PageServer, address_of
from shared_hooks.config import is_own
from shared_hooks.errors import SpecError
from tests.edge_client.live.pages import asked, reported
from tests.waiting import eventually

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    board = Board({"title": "<script>"})
    one = PageServer(board, "0")
    yield one
    one.close()


def test_the_page_comes_with_all_it_needs_and_may_load_nothing_else(server: PageServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/"
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/charts.js", "text/javascript")):
        status, headers, body = asked(server.port, path)
        assert status == 200 and headers["content-type"].startswith(kind) and body
        assert "script-src 'self'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
        assert b"https://" not in body and b"innerHTML" not in body
    assert asked(server.port, "/", "HEAD")[0] == 200


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1", "[::1]:{port}", "LOCALHOST", "127.1.2.3:80"])
def test_this_machine_may_ask_by_any_name_of_its_own(server: PageServer, host: str) -> None:
    assert asked(server.port, host=host.format(port=server.port))[0] == 200


@pytest.mark.parametrize("path", ["/", "/events", "/page.js", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:{port}"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "192.168.1.7:{port}"},
        {"host": "[2001:db8::1]"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:{port}"},
        {"origin": "http://localhost:{port}"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_strangers_are_refused(server: PageServer, path: str, headers: dict[str, str]) -> None:
    status, _, body = asked(server.port, path, **{key: one.format(port=server.port) for key, one in headers.items()})
    assert status == 403 and b"title" not in body


def test_a_link_to_the_page_may_be_followed(server: PageServer) -> None:
    followed = {"sec_fetch_site": "cross-site", "sec_fetch_dest": "document"}
    assert asked(server.port, "/", **followed)[0] == 200
    assert asked(server.port, "/events", **followed)[0] == 403


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/", "POST", 405), ("/events/", "GET", 404), ("/../server.py", "GET", 404), ("/page.js%00", "GET", 404)],
)
def test_there_is_nothing_else(server: PageServer, path: str, method: str, status: int) -> None:
    assert asked(server.port, path, method)[0] in (status, 307)


def test_addresses_beyond_loopback_only_where_that_is_listened_on() -> None:
    assert is_own("192.168.1.7:8050", "0.0.0.0") and is_own("edge-1:8050", "edge-1") and is_own("[fe80::1]", "::")
    assert not is_own("evil.example", "0.0.0.0") and not is_own("", "0.0.0.0") and not is_own("[", "0.0.0.0")


@pytest.mark.parametrize("words", ["", "x", "-1", "65536", "8050:", "::1:8050", "1.5", "٣", "host:"])
def test_invalid_port_is_reported(words: str) -> None:
    with pytest.raises(SpecError, match=r"dashboard: expected \[HOST:\]PORT"):
        address_of(words, "dashboard")


def test_addresses_that_are_taken_or_not_ours_are_reported(server: PageServer) -> None:
    assert address_of("[::1]:80", "dashboard") == ("::1", 80) and address_of(":80", "dashboard") == ("127.0.0.1", 80)
    for listen in (str(server.port), "192.0.2.1:80"):
        with pytest.raises(SpecError, match="cannot be listened on"):
            PageServer(Board({}), listen)


def test_readers_are_counted_bounded_and_hear_of_the_end() -> None:
    board = Board({})
    server = PageServer(board, "0")
    streams = [reported(server.port) for _ in range(MOST_READERS)]
    assert [next(stream)[0] for stream in streams] == ["whole"] * MOST_READERS
    assert server.readers == MOST_READERS
    status, _, body = asked(server.port, "/events")
    assert status == 503 and b"open already" in body
    for stream in streams[2:]:
        stream.close()  # type: ignore[attr-defined]
    eventually(lambda: server.readers == 2)
    board.add("events", {"kind": "moved", "text": "new\nline </script>"})
    assert next(streams[0]) == (
        "more",
        {"events": [{"kind": "moved", "text": "new\nline </script>"}], "counts": board.counts},
    )
    server.close()
    assert [kind for kind, _ in streams[0]] == ["ended"]
    assert [kind for kind, _ in streams[1]] == ["more", "ended"]
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", server.port)):
        pass


def test_a_reader_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.live.server.STALLED_SECONDS", 0.3)
    monkeypatch.setattr("edge_client.live.server.EVERY_SECONDS", 0.01)
    board = Board({"title": "x" * (8 << 20)})
    server = PageServer(board, "0")
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port))) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        eventually(lambda: server.readers == 1)

        def left() -> bool:
            board.add("events", {})
            return server.readers == 0

        eventually(left)
        assert asked(server.port)[0] == 200
    server.close()
