"""Connections of HTTP whose client does nothing, too little, or too much: on a real server, none stays for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cloud_server.limits import Limits
from cloud_server.transport import CloudServer
from cloud_server.transport.active_calls import WaitingCalls
from cloud_server.transport.rest import connections
from tests.cloud_server.inference.rest import GOOD, INFER, ONES, ask, port_of, same
from tests.cloud_server.inference.served import engine, serving
from tests.waiting import PATIENCE, eventually

HEAD = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[CloudServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "SWEEP_SECONDS", 0.02)
        with serving(engine(), limits=Limits(max_clients=4, deadline_seconds=30), rest="127.0.0.1:0") as server:
            yield server


@pytest.fixture
def waiting(server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> WaitingCalls:
    """In which nobody is late."""
    assert server.rest is not None
    eventually(lambda: not standing(server))
    monkeypatch.setattr(server.rest._waiting, "_seconds", 1e9)
    return server.rest._waiting


def standing(server: CloudServer) -> list[Any]:
    assert server.rest is not None
    return list(server.rest._server.server_state.connections)


def connected(server: CloudServer, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE, (address, 0))


def test_unfetched_refusals(server: CloudServer, waiting: WaitingCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.rest is not None
    server.rest._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what it accepts inherits that
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", port_of(server)))
        eventually(lambda: standing(server))
        (connection,) = standing(server)
        lazy.sendall(f"{HEAD}Content-Length: 1\r\n\r\n{{".encode() * 600)
        eventually(lambda: connection.flow.write_paused)
        monkeypatch.setattr(waiting, "_seconds", 0.0)
        eventually(lambda: not standing(server))
    assert len(waiting) == 0


def test_timeout_restarts_with_each_piece(server: CloudServer, waiting: WaitingCalls) -> None:
    def since() -> float:
        (place,) = waiting._places
        return place.since or 0.0

    def forget() -> None:
        (place,) = waiting._places
        place.since = 0.0

    with connected(server) as slow:
        eventually(lambda: len(waiting) == 1)
        for piece in (f"{HEAD}Content-Length: 90\r\n\r\n", "{", " "):
            forget()
            slow.sendall(piece.encode())
            eventually(lambda: since() > 0)


def test_body_has_a_total_timeout() -> None:
    with serving(engine(), limits=Limits(deadline_seconds=0.3), rest="127.0.0.1:0") as server:
        reported = threading.Event()
        with connected(server) as steady:
            steady.sendall(f"{HEAD}Content-Length: 900000\r\n\r\n".encode())

            def pieces() -> None:
                with contextlib.suppress(OSError):
                    while not reported.wait(0.02):
                        steady.sendall(b" ")

            sender = threading.Thread(target=pieces)
            sender.start()
            answer = steady.recv(1000)
            reported.set()
            sender.join()
        assert answer.startswith(b"HTTP/1.1 504") and b"connection: close" in answer


def test_body_of_a_refused_request_is_not_read(
    server: CloudServer, waiting: WaitingCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)
    for path in ("/v2/models/none/infer", "/nowhere", "/v2/health/live"):
        with connected(server) as endless:
            eventually(lambda: standing(server))
            (connection,) = standing(server)
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            endless.sendall(head.encode())
            reported = b""
            while not reported.endswith(b"}"):
                reported += endless.recv(1000)
            assert b"connection: close" in reported
            parsed: list[bytes] = []
            monkeypatch.setattr(connection.conn, "receive_data", parsed.append)
            with contextlib.suppress(ConnectionError):
                endless.sendall(b"1\r\na\r\n" * 100)
                while endless.recv(1000):
                    pass
            assert not parsed
        eventually(lambda: not standing(server))
    same(ask(server, INFER, GOOD), ONES)


def test_expensive_caller_is_read_later(
    server: CloudServer, waiting: WaitingCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was shown last on the connection, at first its address: before anything of it is parsed."""
    paid, pays, pace = [], threading.Event(), server.core.pace
    dear = "address ipv4:127.0.0.3"
    monkeypatch.setattr(pace, "wait", lambda account: 0.01 if account == dear and not pays.is_set() else 0.0)
    monkeypatch.setattr(pace, "spent", lambda account, seconds: paid.append(account))
    with connected(server, "127.0.0.3") as slow:
        slow.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(5):
            assert ask(server, "/v2/health/live")[0] == 200
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        assert dear not in paid and set(paid) == {"address ipv4:127.0.0.1"}
        pays.set()
        slow.setblocking(True)
        reported = b""
        while not reported.endswith(b"}"):
            reported += slow.recv(1000)
        assert reported.startswith(b"HTTP/1.1 200")
        paid.clear()
        chunks = b"1\r\n \r\n" * (4 * connections.MOST_BYTES // 6)
        slow.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n")
        assert slow.recv(1000).startswith(b"HTTP/1.1 400")
        assert paid.count(dear) >= 4 and set(paid) == {dear}


def test_slow_parsing_does_not_block_others(
    server: CloudServer, waiting: WaitingCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    turns: list[list[int]] = []
    data_received, read = connections.H11Protocol.data_received, connections.RestConnection._read

    def parsing(self: Any, data: bytes) -> None:
        parsed.append(len(data))
        data_received(self, data)

    def turn(self: Any) -> None:
        parsed.clear()
        read(self)
        turns.append(parsed.copy())

    monkeypatch.setattr(connections, "TURN_SECONDS", 0.0)  # everything takes long
    monkeypatch.setattr(connections.H11Protocol, "data_received", parsing)
    monkeypatch.setattr(connections.RestConnection, "_read", turn)
    body = GOOD + b" " * 100_000
    assert ask(server, INFER, body)[0] == 200
    assert max(map(len, turns)) == 1 and max(map(sum, turns)) == connections.LEAST_BYTES
    assert sum(map(sum, turns)) > len(body)
