"""Clients that leave at a bad moment: nothing of them stays in the books, and a drain waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.requests import Request
from shared_hooks.lifecycle import Event, Stage
from tests.cloud_server.fakes import CoreClient, FakeEngine, chunk, header, make_crossing, upload
from tests.waiting import PATIENCE


@pytest.fixture
def core() -> Iterator[Core]:
    with Core([FakeEngine()], Limits()) as core:
        yield core


def test_stream_ends_before_admission(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    client, crossing = CoreClient(core), make_crossing(3)
    client.send(upload(crossing))
    admit = core.requests.admit

    def leaves_then_admits(request: object) -> object:
        client.leave()
        return admit(request)  # type: ignore[arg-type]

    monkeypatch.setattr(core.requests, "admit", leaves_then_admits)
    client.send(header(1, crossing))
    assert not core.requests._live
    core.drain()
    assert core.wait_idle(0) and core.wait_gone(0)


def test_stream_ends_during_hooks(core: Core) -> None:
    client, crossing = CoreClient(core), make_crossing(3)
    ends: list[Event] = []
    core.lifecycle.on(Stage.BEFORE_REQUEST)(lambda _: client.leave())
    core.lifecycle.on(Stage.AFTER_REQUEST)(ends.append)
    client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"abc"))
    assert not core.requests._live and len(ends) == 1
    core.drain()
    assert core.wait_idle(0) and core.wait_gone(0)


def test_request_cancelled_right_after_admission(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    client, crossing = CoreClient(core), make_crossing(3)
    client.send(upload(crossing))
    admit, ends = core.requests.admit, list[Event]()
    core.lifecycle.on(Stage.AFTER_REQUEST)(ends.append)

    def admits_then_cancels(request: Request) -> bool:
        is_new = admit(request)
        core.requests.cancel(request.key)  # from another stream of the same client; or it had to give way
        return is_new

    monkeypatch.setattr(core.requests, "admit", admits_then_cancels)
    client.send(header(1, crossing), chunk(1, 0, b"abc"))
    assert not core.requests._live and len(ends) == 1
    core.drain()
    assert core.wait_idle(0)


def test_a_drain_does_not_wait_for_a_request_that_nobody_can_fetch() -> None:
    entered, opened = threading.Event(), threading.Event()

    def hold(_: memoryview) -> None:
        entered.set()
        assert opened.wait(PATIENCE)

    with Core([FakeEngine(hold)], Limits()) as core:
        client = CoreClient(core)
        client.ask(1, b"abc")
        assert entered.wait(PATIENCE)
        core.drain()
        assert not core.wait_idle(0)
        client.leave()
        assert core.wait_idle(0) and core.requests.running
        opened.set()
