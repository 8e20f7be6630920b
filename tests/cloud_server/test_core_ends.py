"""How streams and requests end: broken, out of bounds, cancelled, out of time, drained; a core without a transport."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.executor import Executor
from cloud_server.requests import RequestTable
from shared_hooks import errors
from shared_hooks.lifecycle import Event, Stage
from shared_hooks.sharing import Owner
from tests.cloud_server.fakes import (
    CoreClient,
    FakeEngine,
    cancel,
    chunk,
    header,
    hello,
    make_crossing,
    upload,
)
from tests.cloud_server.small import SMALL, Gate, failure
from tests.waiting import PATIENCE


class TestBrokenStreams:
    """What a working client cannot send ends its stream; other streams go on."""

    @pytest.fixture(autouse=True)
    def others_go_on(self, core: Core) -> Iterator[None]:
        other = CoreClient(core, client_id="bob")
        yield
        other.ask(1, b"good")
        assert bytes(other.answer(1).data) == b"doog"

    def test_chunk_of_an_unknown_request(self, core: Core) -> None:
        client = CoreClient(core)
        client.send(chunk(5, 0, b"abc"))
        assert isinstance(client.ended(), errors.BadFrame)

    def test_chunk_after_the_last(self, core: Core) -> None:
        client = CoreClient(core)
        client.ask(1, b"abc")
        client.send(chunk(1, 3, b"d"))
        assert isinstance(client.ended(), errors.BadFrame)

    def test_crossing_under_a_false_digest(self, core: Core) -> None:
        client = CoreClient(core)
        frame = upload(make_crossing(3))
        frame.cut.digest = make_crossing(4).digest
        client.send(frame)
        assert "digest" in str(client.ended())
        assert make_crossing(4).digest not in core.crossings

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000])
    def test_crossing_that_is_none(self, core: Core, data: bytes) -> None:
        from shared_hooks.crossing.description import digest_of

        client = CoreClient(core)
        frame = upload(make_crossing(3))
        frame.cut.digest, frame.cut.data = digest_of(data), data
        client.send(frame)
        assert isinstance(client.ended(), errors.BadFrame)

    def test_crossing_with_huge_storages(self, core: Core) -> None:
        client = CoreClient(core)
        client.send(upload(make_crossing(1 << 38)))
        assert isinstance(client.ended(), errors.TooLarge)

    def test_empty_frame(self, core: Core) -> None:
        from protos.isthmus.v1 import split_pb2

        client = CoreClient(core)
        client.send(split_pb2.ClientFrame())
        assert isinstance(client.ended(), errors.BadFrame)


class TestBounds:
    def test_in_flight_of_one_client(self) -> None:
        gate = Gate()
        with Core([FakeEngine(gate)], SMALL) as core:
            alice, bob = CoreClient(core), CoreClient(core, client_id="bob")
            for id in range(1, 6):
                alice.ask(id, b"abc")
            failed = alice.answer(5).failed
            assert failed is not None and failed.error == "ServerUnavailable" and failed.retry
            bob.ask(1, b"abc")
            bob.ask(2, b"abc")
            bob.ask(3, b"abc")  # alice has four of six, bob two: her last is evicted
            error, message = failure(alice, 4)
            assert error == "ServerUnavailable" and "gave way" in message and "max_pending is 6" in message
            bob.ask(4, b"abc")
            assert "no room: 6 requests are on their way" in failure(bob, 4)[1]
            gate.opened.set()
            for id in range(1, 4):
                assert alice.answer(id).reply and bob.answer(id).reply
            alice.ask(5, b"abc")
            assert alice.answer(5, 2).reply

    def test_repeated_refusals_are_charged(self) -> None:
        """A flood that nothing is done for costs others time none the less."""
        gate = Gate()
        with Core([FakeEngine(gate)], SMALL) as core:
            hostile, honest = CoreClient(core, identity="hostile"), CoreClient(core, identity="honest")
            honest.ask(1, b"abc")
            core.pace.spent(honest.session.caller.account, 1e-6)
            for id in range(1, 100):
                hostile.ask(id, b"abc")
            assert core.pace.wait(hostile.session.caller.account) > 0.5
            assert core.pace.wait(honest.session.caller.account) == 0
            gate.opened.set()
            assert honest.answer(1).reply

    def test_an_account_has_one_frame_taken_at_a_time_and_others_do_not_wait(self, core: Core) -> None:
        one, other = CoreClient(core, identity="one"), CoreClient(core, identity="other")
        taken = threading.Event()
        thread = threading.Thread(target=lambda: (one.ask(1, b"abc"), taken.set()))
        with core.pace.turn(one.session.caller.account):
            thread.start()
            other.ask(1, b"abc")
            assert other.answer(1).reply and not taken.is_set()
        thread.join()
        assert one.answer(1).reply

    def test_bytes_of_all_requests(self, core: Core) -> None:
        crossing, alice, bob = make_crossing(90_000), CoreClient(core), CoreClient(core, client_id="bob")
        alice.send(upload(crossing), *(header(id, crossing) for id in (1, 2, 3)))
        bob.ask(1, bytes(90_000), crossing)
        assert "max_pending_bytes is 300000" in failure(alice, 3)[1]
        assert bob.answer(1).reply
        bob.send(header(2, crossing))
        alice.send(header(4, crossing))  # she has two of three already
        assert "has no room" in failure(alice, 4)[1]
        alice.leave()
        bob.leave()
        assert core.requests.held_bytes == 0

    def test_crossings_are_forgotten_in_order_of_use(self, core: Core) -> None:
        client = CoreClient(core)
        crossings = [make_crossing(1, f"layer{number}") for number in range(10)]
        for crossing in crossings:
            client.send(upload(crossing))
            core.crossings.get(crossings[0].digest, Owner("address test", "alice"))
        assert len(core.crossings) == 8 and crossings[0].digest in core.crossings
        assert crossings[1].digest not in core.crossings

    def test_a_client_that_does_not_fetch_is_not_listened_to(self, core: Core) -> None:
        session = core.open(Caller("test"))
        session.receive(hello())
        crossing = make_crossing(0)
        session.receive(upload(crossing))

        def flood() -> None:
            for id in range(1000):
                session.receive(header(id, crossing))

        flooder = threading.Thread(target=flood)
        flooder.start()
        time.sleep(0.2)
        assert flooder.is_alive() and session.undelivered < 100
        session.disconnect()
        flooder.join(PATIENCE)
        assert not flooder.is_alive()


class TestCancelAndDeadline:
    def test_cancelled_while_arriving(self, core: Core, engine: FakeEngine) -> None:
        client, crossing = CoreClient(core), make_crossing(3)
        client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"a"), cancel(1), chunk(1, 1, b"bc"))
        assert failure(client, 1)[0] == "Cancelled" and engine.computed == 0
        assert core.requests.held_bytes == 0 and not core.requests._live

    def test_cancelled_while_waiting_and_while_running(self) -> None:
        gate = Gate()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            client = CoreClient(core)
            for id in (1, 2, 3):
                client.ask(id, b"abc")
            gate.wait_entered()
            client.send(cancel(1), cancel(2), cancel(77))
            assert failure(client, 1)[0] == failure(client, 2)[0] == "Cancelled"
            gate.opened.set()
            assert client.answer(3).reply
            assert engine.computed == 2 and list(core.requests._answers._kept) == [("address test", "alice", 3)]

    def test_cancelled_then_asked_for_again(self) -> None:
        gate = Gate()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            client = CoreClient(core)
            client.ask(1, b"abc")
            gate.wait_entered()
            client.send(cancel(1))
            client.ask(1, b"abc")
            gate.opened.set()
            assert client.answer(1, 2).reply and engine.computed == 1

    def test_too_old_at_the_head_of_the_queue(self) -> None:
        gate = Gate()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            client = CoreClient(core)
            client.ask(1, b"abc", deadline_ms=20_000)
            gate.wait_entered()
            client.ask(2, b"abc", deadline_ms=20_000)
            client.ask(3, b"abc")
            with core._changed:
                for request in core.requests._live.values():
                    if request.id != 3:
                        request.began_ns -= 30 * 10**9  # as if it had waited: no clock is raced
            gate.opened.set()
            assert client.answer(1).reply  # young enough when it began: it runs to its end
            error, message = failure(client, 2)
            assert error == "DeadlineExceeded" and "limit is 20 s" in message
            assert client.answer(3).reply and engine.computed == 2

    def test_payload_that_never_comes(self) -> None:
        with Core([FakeEngine()], dataclasses.replace(SMALL, deadline_seconds=0.05)) as core:
            client, crossing = CoreClient(core), make_crossing(3)
            client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"a"))
            error, message = failure(client, 1)
            assert error == "DeadlineExceeded" and "receiving" in message
            assert client.send(chunk(1, 1, b"b")) and core.requests.held_bytes == 0

    def test_a_sweep_that_fails_is_logged_and_the_next_ends_what_is_late(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        sweep, failed = RequestTable.sweep, threading.Event()

        def failing(self: RequestTable, draining: bool = False) -> None:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("a bug")
            sweep(self, draining)

        monkeypatch.setattr(RequestTable, "sweep", failing)
        with Core([FakeEngine()], dataclasses.replace(SMALL, deadline_seconds=0.05)) as core:
            assert failed.wait(PATIENCE)
            client, crossing = CoreClient(core), make_crossing(3)
            client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"a"))
            assert failure(client, 1)[0] == "DeadlineExceeded"
        assert "ending what is late failed" in caplog.text and "a bug" in caplog.text

    def test_an_error_of_the_server_itself_ends_the_request_and_not_the_worker(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def failing(*_: object) -> None:
            raise RuntimeError("a bug")

        with Core([FakeEngine()], SMALL) as core:
            client = CoreClient(core)
            with monkeypatch.context() as patch:
                patch.setattr(Executor, "_alone", failing)
                client.ask(1, b"abc")
                assert failure(client, 1) == ("ModelFailed", "RuntimeError: a bug")
            assert core.requests.held_bytes == 0 and core.wait_idle(PATIENCE)
            client.ask(2, b"abc")
            assert bytes(client.answer(2).data) == b"cba"
        assert "tasks of address test could not be computed" in caplog.text


class TestDrain:
    def test_running_requests_finish_and_new_ones_are_refused(self) -> None:
        gate = Gate()
        with Core([FakeEngine(gate)], SMALL) as core:
            client, crossing = CoreClient(core), make_crossing(3)
            client.ask(1, b"abc")
            client.send(header(2, crossing), chunk(2, 0, b"a"))
            gate.wait_entered()
            core.drain()
            assert not core.wait_idle(0.05)
            with pytest.raises(errors.ServerUnavailable, match="draining"):
                core.open(Caller("test"))
            client.ask(3, b"abc")
            failed = client.answer(3).failed
            assert failed is not None and failed.error == "ServerUnavailable" and failed.retry and failed.code == 14
            client.send(chunk(2, 1, b"bc"))  # admitted before: it may finish
            gate.opened.set()
            assert core.wait_idle(PATIENCE)
            core.dismiss()
            assert isinstance(client.ended(), errors.ServerUnavailable)
            assert client.answer(1).reply and client.answer(2).reply
            assert [frame.WhichOneof("frame") for frame in client.others] == ["welcome", "draining"]
            client.leave()
            assert core.wait_gone(PATIENCE)

    def test_hooks_hear_of_a_request_that_ends_for_one_that_is_refused(self, core: Core) -> None:
        heard: list[tuple[int, str]] = []

        @core.lifecycle.on(Stage.AFTER_REQUEST)
        def note(event: Event) -> None:
            heard.append((event.request.id, str(event.error)))  # type: ignore[union-attr]

        old, new, crossing = CoreClient(core), CoreClient(core), make_crossing(3)
        old.send(upload(crossing), header(1, crossing), chunk(1, 0, b"a"))
        core.drain()
        new.send(header(1, crossing))
        assert failure(new, 1)[0] == "ServerUnavailable"
        assert heard == [(1, "it was announced again on another stream")]

    def test_hello_while_draining(self, core: Core) -> None:
        client = CoreClient(core, greet=False)
        core.drain()
        client.send(hello())
        assert isinstance(client.ended(), errors.ServerUnavailable)
        assert client.others == []  # nothing comes before Welcome: the client would take it for another service

    def test_draining_begins_between_a_hello_and_its_welcome(
        self, core: Core, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = core.check_open

        def passes_then_drains() -> None:
            plain()
            core.drain()

        client = CoreClient(core, greet=False)
        monkeypatch.setattr(core, "check_open", passes_then_drains)
        client.send(hello())
        core.dismiss()
        assert isinstance(client.ended(), errors.ServerUnavailable)
        assert [frame.WhichOneof("frame") for frame in client.others] == ["welcome", "draining"]
