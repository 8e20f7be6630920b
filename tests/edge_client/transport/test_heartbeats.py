"""A server that says nothing while it should is left; one that says that it lives is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from edge_client.transport.connection import BEATS, LONGEST_SECONDS, Backoff, Connection, Pulse
from edge_client.transport.exchange import Waiting
from edge_client.transport.options import ConnectionOptions, State
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import ServerUnavailable
from tests.edge_client import fake_server as fake
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.transport.connections import connected, exchange, hello, send
from tests.waiting import eventually

BEAT = 0.05
WELCOME = {"heartbeat_ms": 50}


def beating(seconds: float) -> fake.Script:
    """Answers each request after ``seconds``, and says meanwhile that it lives."""

    def script(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                yield split_pb2.ServerFrame(heartbeat=split_pb2.Heartbeat())
                time.sleep(BEAT / 5)
            yield from fake.reply(header.id, payload)

    return script


def test_a_server_that_falls_silent_is_left_and_the_request_goes_again() -> None:
    with FakeServer(fake.deaf, fake.echo, welcome=WELCOME) as server, connected(server.address) as connection:
        one = exchange(1, b"x")
        assert send(connection, one) == b"x"
        assert (one.sends, one.interruptions, one.breaks) == (2, 1, 0)  # and it is not suspected of anything
        assert "nothing was heard" in connection.last_reason
        assert server.seen.hellos[0].heartbeat_ms == 1000


def test_a_request_is_not_given_up_for_silence() -> None:
    scripts = *[fake.deaf] * 6, fake.echo
    with FakeServer(*scripts, welcome={"heartbeat_ms": 1}) as server, connected(server.address) as connection:
        one = exchange(1, b"x")
        assert send(connection, one) == b"x"
        assert one.interruptions == 6 and one.breaks == 0


def test_a_server_that_says_that_it_lives_is_waited_for() -> None:
    seconds = 4 * BEATS * BEAT
    with FakeServer(beating(seconds), welcome=WELCOME) as server, connected(server.address) as connection:
        assert send(connection, exchange(1, b"x")) == b"x"
        assert connection.counters.streams >= 1


def test_an_older_server_owes_nothing() -> None:
    answer = threading.Event()

    def late(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            answer.wait(30)
            yield from fake.reply(header.id, payload)

    with FakeServer(late) as server, connected(server.address, heartbeat=0.01) as connection:
        one = exchange(1, b"x")
        connection.submit(one)
        eventually(lambda: server.seen.requests == [1])
        time.sleep(0.2)
        assert connection.state is State.READY
        answer.set()
        assert one.wait() and one.sends == 1


def test_an_idle_stream_may_be_silent() -> None:
    with FakeServer(welcome=WELCOME) as server, connected(server.address) as connection:
        assert send(connection, exchange(1, b"x")) == b"x"
        time.sleep(2 * BEATS * BEAT)
        assert connection.state is State.READY
        assert send(connection, exchange(2, b"y")) == b"y"
        assert connection.counters.streams == 1


def test_the_bound_follows_what_a_slow_link_makes_of_the_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("edge_client.transport.connection.time.monotonic", lambda: now)
    pulse = Pulse(1.0)
    assert pulse.bound == BEATS
    now = 3.5
    pulse.record_frame()
    assert pulse.bound == 7.0
    for _ in range(10):
        pulse.record_frame()
    assert pulse.bound == BEATS
    now += 1000.0
    pulse.record_frame()
    assert pulse.bound == LONGEST_SECONDS


class TestPatience:
    def test_each_waits_for_as_long_as_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who comes while others have waited for long is not given up with them."""
        now = 0.0
        monkeypatch.setattr("edge_client.transport.exchange.time.monotonic", lambda: now)
        waiting, early, late = Waiting("server", 4), exchange(1, b""), exchange(2, b"")
        waiting.add(early)
        now = 14.0
        waiting.add(late)
        assert waiting.left(lost=5.0, patience=15.0) == 6.0
        assert waiting.take_late(lost=5.0, patience=15.0) == []
        now = 20.0
        assert waiting.take_late(lost=5.0, patience=15.0) == [early]
        assert waiting.left(lost=5.0, patience=15.0) == 9.0

    def test_a_silent_server_is_named_in_the_middle_of_an_attempt(self) -> None:
        with (
            FakeServer(fake.silent) as server,
            connected(server.address, patience=0.3) as connection,
            pytest.raises(ServerUnavailable, match=r"last: no answer to the greeting within"),
        ):
            connection.open(60)


def test_a_draining_server_costs_no_back_off() -> None:
    def drain(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        header, payload = next(fake.requests(server, frames))
        yield split_pb2.ServerFrame(draining=split_pb2.Draining())
        yield from fake.reply(header.id, payload)

    with FakeServer(drain, fake.echo) as server:
        never = Backoff(first=1000.0, ceiling=1000.0)
        connection = Connection(server.address, hello(), ConnectionOptions(patience=60), never)
        try:
            assert send(connection, exchange(1, b"one")) == b"one"
            assert send(connection, exchange(2, b"two")) == b"two"
        finally:
            connection.close()
