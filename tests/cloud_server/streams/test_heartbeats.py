"""A server that was asked for it says that it lives, while it has requests of that stream, and at no other time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from cloud_server.core import Core
from cloud_server.limits import Limits
from tests.cloud_server.fakes import CoreClient, FakeEngine, header, hello, make_crossing, upload
from tests.waiting import PATIENCE, eventually

BEAT = 0.05


class Held:
    """Holds the worker until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, payload: memoryview) -> None:
        assert self.opened.wait(PATIENCE)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def core(held: Held) -> Iterator[Core]:
    with Core([FakeEngine(held)], Limits(heartbeat_seconds=BEAT)) as core:
        yield core
        held.opened.set()


def greeted(core: Core, **changes: object) -> CoreClient:
    client = CoreClient(core, greet=False)
    client.send(hello(**changes))
    client.other("welcome")
    return client


def beats(client: CoreClient) -> int:
    return sum(frame.WhichOneof("frame") == "heartbeat" for frame in client.others)


def test_beats_while_a_request_runs_and_stops_with_its_answer(core: Core, held: Held) -> None:
    client = greeted(core, heartbeat_ms=50)
    assert client.other("welcome").welcome.heartbeat_ms == 50
    time.sleep(3 * BEAT)
    assert beats(client) == 0  # nothing is under way
    client.ask(1, b"abc")
    eventually(lambda: beats(client) >= 3)
    held.opened.set()
    client.answer(1)
    after = beats(client)
    time.sleep(4 * BEAT)
    assert beats(client) <= after + 1  # one may have been on its way


def test_beats_while_a_payload_arrives(core: Core) -> None:
    client, crossing = greeted(core, heartbeat_ms=50), make_crossing(1000)
    client.send(upload(crossing), header(1, crossing))
    eventually(lambda: beats(client) >= 2)


def test_an_older_client_hears_nothing_new(core: Core, held: Held) -> None:
    client = greeted(core)
    assert client.other("welcome").welcome.heartbeat_ms == 0
    client.ask(1, b"abc")
    time.sleep(4 * BEAT)
    assert beats(client) == 0
    held.opened.set()
    assert client.answer(1).data == b"cba"


def test_heartbeat_interval_has_a_minimum(core: Core) -> None:
    assert greeted(core, heartbeat_ms=1).other("welcome").welcome.heartbeat_ms == 50


def test_beats_for_a_client_that_sends_no_more_and_waits(core: Core, held: Held) -> None:
    client = greeted(core, heartbeat_ms=50)
    client.ask(1, b"abc")
    client.session.finish()
    eventually(lambda: beats(client) >= 2)
    held.opened.set()
    assert client.answer(1).data == b"cba"
    assert client.ended() is None
