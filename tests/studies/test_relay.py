"""The relay of the experiments: bytes arrive whole and late, and a broken server looks broken."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from studies.experiments.relay import Relay

PATIENCE = 30.0


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """The address of a server that sends everything back."""

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in (acceptor, *threads):
        thread.join(PATIENCE)


def ask(connection: socket.socket, data: bytes) -> bytes:
    """Sends ``data``, and receives as much."""
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    back = b""
    while len(back) < len(data):
        piece = connection.recv(1 << 16)
        assert piece, "the connection ended"
        back += piece
    sender.join(PATIENCE)
    return back


def test_relay_delays_by_its_latency(echo: tuple[str, int]) -> None:
    with Relay(echo, delay=0.05) as relay, socket.create_connection(relay.address, PATIENCE) as connection:
        began = time.monotonic()
        assert ask(connection, b"x") == b"x"
        assert time.monotonic() - began >= 0.1
        data = bytes(range(256)) * (1 << 14)
        assert ask(connection, data) == data


def test_the_end_of_one_direction_is_passed_on(echo: tuple[str, int]) -> None:
    with Relay(echo) as relay, socket.create_connection(relay.address, PATIENCE) as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        while piece := connection.recv(1 << 16):
            heard += piece
        assert heard == b"last words"


def test_reset_ends_connections_and_welcomes_new_ones(echo: tuple[str, int]) -> None:
    with Relay(echo) as relay:
        with socket.create_connection(relay.address, PATIENCE) as connection:
            assert ask(connection, b"before") == b"before"
            relay.reset()
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with socket.create_connection(relay.address, PATIENCE) as connection:
            assert ask(connection, b"after") == b"after"


def test_a_refusing_relay_comes_back_at_its_address(echo: tuple[str, int]) -> None:
    with Relay(echo) as relay:
        address = relay.address
        relay.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, PATIENCE)
        relay.accept()
        assert relay.address == address
        with socket.create_connection(address, PATIENCE) as connection:
            assert ask(connection, b"back") == b"back"


def test_a_stalled_relay_holds_everything_and_loses_nothing(echo: tuple[str, int]) -> None:
    with Relay(echo) as relay, socket.create_connection(relay.address, PATIENCE) as connection:
        relay.moving.clear()
        connection.sendall(b"held")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(PATIENCE)
        relay.moving.set()
        assert connection.recv(16) == b"held"


def test_relay_without_a_target_resets(echo: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    with (
        Relay(address) as relay,
        pytest.raises(ConnectionResetError),
        socket.create_connection(relay.address, PATIENCE) as connection,
    ):
        connection.recv(1)
