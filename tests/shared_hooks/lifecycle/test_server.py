"""The server's requests and streams; the engine computes nothing: hooks hear of each request once, in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.transport.authentication import AuthInterceptor
from cloud_server.transport.servicer import SplitServicer
from shared_hooks.errors import BadFrame, Cancelled, ServerUnavailable
from shared_hooks.lifecycle import Event, Stage
from shared_hooks.lifecycle.log import Log
from tests.cloud_server.fakes import CoreClient, FakeEngine, chunk, header, make_crossing, upload
from tests.shared_hooks.lifecycle.service import Spy
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def spy() -> Spy:
    return Spy("cloud")


@pytest.fixture
def core(spy: Spy) -> Iterator[Core]:
    with Core([FakeEngine()], Limits(max_in_flight=4, max_pending=4), lifecycle=spy) as core:
        yield core


def ends(spy: Spy) -> list[tuple[int, str]]:
    return [(one.request.id, type(one.facts["error"]).__name__) for one in spy.of(Stage.AFTER_REQUEST) if one.request]


def errors(spy: Spy) -> list[tuple[int, int, str]]:
    return [
        (one.request.id, one.request.index, type(one.facts["error"]).__name__)
        for one in spy.of(Stage.ON_ERROR)
        if one.request
    ]


def test_request_that_ends_while_another_fails_is_reported(core: Core, spy: Spy) -> None:
    """A client comes back with its upload, and finds no room: the old one has ended all the same."""
    crossing = make_crossing(100)
    first = CoreClient(core)
    first.send(upload(crossing), *(header(id, crossing) for id in (1, 2, 3)))
    core.requests._room._limits = Limits(max_in_flight=2)
    again = CoreClient(core)
    again.send(upload(crossing), header(1, crossing))
    failed = again.answer(1).failed
    assert failed is not None and failed.error == "ServerUnavailable"
    assert ends(spy) == [(1, "Cancelled")]
    assert errors(spy) == [(1, -1, "ServerUnavailable")]


def test_a_second_announcement_is_one_error(core: Core, spy: Spy) -> None:
    crossing = make_crossing(100)
    client = CoreClient(core)
    client.send(upload(crossing), header(1, crossing), header(1, crossing))
    assert client.answer(1).failed is not None
    assert errors(spy) == [(1, 0, "BadFrame")] and ends(spy) == [(1, "BadFrame")]


def test_a_request_that_was_not_taken_in_has_no_place(core: Core, spy: Spy) -> None:
    client = CoreClient(core)
    client.ask(7, b"abc", header=b"something else")
    assert client.answer(7).failed is not None
    client.ask(8, b"abc")
    client.answer(8)
    eventually(lambda: ends(spy) == [(8, "NoneType")])
    assert errors(spy) == [(7, -1, "BadFrame")]
    assert [one.request.index for one in spy.of(Stage.BEFORE_REQUEST) if one.request] == [0]


def test_an_end_is_not_reported_before_its_beginning(core: Core, spy: Spy) -> None:
    """The stream is lost while a hook still hears of the beginning."""
    entered, go = threading.Event(), threading.Event()

    @spy.on("before_request")
    def slow(event: Event) -> None:
        entered.set()
        assert go.wait(PATIENCE)
        spy.emit(Stage.ON_RESULT, event.request)  # a mark in the sequence

    client, crossing = CoreClient(core), make_crossing(100)
    client.send(upload(crossing))
    thread = threading.Thread(target=client.send, args=(header(1, crossing),))
    thread.start()
    assert entered.wait(PATIENCE)
    client.leave()
    with core.requests.changed:
        assert not core.requests._live and not core.requests.empty
    go.set()
    thread.join(PATIENCE)
    assert [name for name in spy.stages(1) if name != "before_receive"] == [
        *("before_request", "on_result", "after_request")
    ]
    assert ends(spy) == [(1, "Cancelled")] and core.wait_idle(PATIENCE)


def test_an_upload_that_goes_wrong(core: Core, spy: Spy) -> None:
    client, crossing = CoreClient(core), make_crossing(100)
    client.send(upload(crossing), header(1, crossing), chunk(1, 50, b"x"))
    assert client.answer(1).failed is not None
    assert errors(spy) == [(1, 0, "BadFrame")] and ends(spy) == [(1, "BadFrame")]
    assert "after_receive" not in spy.stages(1)


def test_a_request_that_is_sent_again_is_reported_once(core: Core, spy: Spy) -> None:
    client = CoreClient(core)
    client.ask(1, b"abc")
    client.answer(1)
    client.ask(1, b"abc")
    client.answer(1, 2)
    eventually(lambda: spy.stages(1).count("after_send") == 2)
    own = spy.stages(1)
    assert own.count("before_request") == own.count("after_request") == own.count("on_result") == 1


def test_a_cancelled_request_is_no_error(core: Core, spy: Spy) -> None:
    client, crossing = CoreClient(core), make_crossing(100)
    client.send(upload(crossing), header(1, crossing))
    core.requests.cancel(("address test", "alice", 1))
    assert ends(spy) == [(1, "Cancelled")] and errors(spy) == []


def test_a_request_that_waited_too_long(core: Core, spy: Spy) -> None:
    client, crossing = CoreClient(core), make_crossing(100)
    client.send(upload(crossing), header(1, crossing, deadline_ms=1))
    eventually(lambda: ends(spy) == [(1, "DeadlineExceeded")])
    assert errors(spy) == [(1, 0, "DeadlineExceeded")]


def test_a_worker_outlives_its_hooks(spy: Spy) -> None:
    spy.on("on_result", "after_request", "before_decode", name="bad")(lambda event: exit())
    with Core([FakeEngine()], lifecycle=spy) as core:
        client = CoreClient(core)
        for id in range(1, 4):
            client.ask(id, b"abc")
            assert bytes(client.answer(id).data) == b"cba"


def test_grpcs_own_thread_calls_no_hook(core: Core, spy: Spy) -> None:
    """It tells of lost streams in the one thread that serves every stream: a slow hook would hold up all of them."""

    class Context:
        def __init__(self) -> None:
            self.callbacks: list[Callable[[], None]] = []

        def peer(self) -> str:
            return "test"

        def cancel(self) -> None:
            raise AssertionError("nobody drops this stream")

        def add_callback(self, callback: Callable[[], None]) -> bool:
            self.callbacks.append(callback)
            return True

    silent = threading.Event()
    incoming = iter(lambda: silent.wait(PATIENCE) and None, None)  # says nothing until the test is over
    context, ended = Context(), threading.Event()
    stream: Any = SplitServicer(core, AuthInterceptor(core)).session(incoming, context)  # type: ignore[arg-type]

    def serve() -> None:
        for _ in stream:
            pass
        ended.set()

    thread = threading.Thread(target=serve)
    thread.start()
    eventually(lambda: len(context.callbacks) == 1)
    mine = threading.current_thread().name
    context.callbacks[0]()
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)
    silent.set()
    (reported,) = spy.of(Stage.ON_DISCONNECT)
    assert reported.thread != mine and core.wait_gone(PATIENCE)


def test_streams_are_reported(core: Core, spy: Spy) -> None:
    polite, rude = CoreClient(core), CoreClient(core, greet=False)
    rude.send(chunk(1, 0, b"x"))
    assert isinstance(rude.ended(), BadFrame)
    rude.leave()
    polite.leave()
    polite.leave()
    assert [one.facts["reason"][:9] for one in spy.of(Stage.ON_DISCONNECT)] == ["BadFrame:", ""]
    assert [one.facts["client"] for one in spy.of(Stage.ON_DISCONNECT)] == ["", "alice"]
    (error,) = spy.of(Stage.ON_ERROR)
    assert error.request is None and error.facts["where"] == "stream of test"
    assert spy.count(Stage.AFTER_CONNECT) == 2 and spy.count(Stage.AFTER_HANDSHAKE) == 1


def test_client_that_connects_during_a_drain(core: Core, spy: Spy) -> None:
    core.drain()
    with pytest.raises(ServerUnavailable):
        core.open(Caller("late"))
    core.drained(True)
    core.drained(False)
    assert [one.facts for one in spy.of(Stage.AFTER_DRAIN)] == [{"answered": True}]
    assert spy.count(Stage.BEFORE_DRAIN) == 1 and spy.count(Stage.AFTER_CONNECT) == 0


class TestTheLog:
    """What an operator reads; clients' failures are among it."""

    @pytest.fixture(autouse=True)
    def log(self, spy: Spy, caplog: pytest.LogCaptureFixture) -> None:
        spy.register(Log("cloud_server"))
        caplog.set_level(logging.INFO, "cloud_server")

    def lines(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    def test_a_client_comes_asks_and_goes(self, core: Core, caplog: pytest.LogCaptureFixture) -> None:
        client = CoreClient(core)
        client.ask(1, b"abc")
        client.answer(1)
        client.leave()
        assert self.lines(caplog) == [
            "INFO client alice at test uses model fake",
            "INFO stream of client alice at test ended: the other side left",
        ]

    def test_a_request_that_is_wrong(self, core: Core, caplog: pytest.LogCaptureFixture) -> None:
        client = CoreClient(core)
        client.ask(7, b"abc", header=b"something else")
        client.answer(7)
        assert "INFO request 7 alice: BadFrame: the header is not one of a fake frontier" in self.lines(caplog)

    def test_a_stream_that_is_wrong(self, core: Core, caplog: pytest.LogCaptureFixture) -> None:
        client = CoreClient(core)
        client.send(chunk(9, 0, b"x"))
        client.ended()
        client.leave()
        said = "BadFrame: a chunk of payload 9, which was not announced or is complete"
        assert self.lines(caplog)[1:] == [
            f"INFO stream of alice: {said}",
            f"INFO stream of client alice at test ended: {said}",
        ]

    def test_a_model_that_raises(self, spy: Spy, caplog: pytest.LogCaptureFixture) -> None:
        def bad(_: memoryview) -> None:
            raise ZeroDivisionError("by zero")

        with Core([FakeEngine(bad)], lifecycle=spy) as core:
            client = CoreClient(core)
            client.ask(1, b"abc")
            client.answer(1)
            eventually(lambda: ends(spy) == [(1, "ModelFailed")])
        assert "WARNING request 1 alice: ModelFailed: ZeroDivisionError: by zero" in self.lines(caplog)
        assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)

    def test_a_bug_of_ours(self, core: Core, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        """Read at any level that shows errors, with where it was."""
        monkeypatch.setattr(core.crossings, "add", lambda *given: [][1])
        client = CoreClient(core)
        client.send(upload(make_crossing(3)))
        client.ended()
        (record,) = [one for one in caplog.records if one.exc_info]
        assert record.levelname == "ERROR" and record.exc_info is not None and record.exc_info[0] is IndexError
        assert any("ERROR stream of alice: IsthmusError" in line for line in self.lines(caplog))

    def test_a_cancelled_request_is_not_worth_a_line(self, core: Core, caplog: pytest.LogCaptureFixture) -> None:
        client, crossing = CoreClient(core), make_crossing(100)
        client.send(upload(crossing), header(1, crossing))
        core.requests.cancel(("address test", "alice", 1))
        assert len(self.lines(caplog)) == 1 and Cancelled.__name__ not in caplog.text

    def test_draining(self, core: Core, caplog: pytest.LogCaptureFixture) -> None:
        core.drain()
        core.drained(False)
        assert self.lines(caplog) == ["INFO draining", "WARNING ended before every request was answered"]
