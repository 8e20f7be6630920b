"""Streams and requests, without a transport and without torch: what is computed, answered, kept and refused."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.limits import Limits
from shared_hooks import errors
from shared_hooks.lifecycle import Event, Stage
from shared_hooks.sharing import Party
from tests.cloud_server.fakes import (
    CoreClient,
    FakeEngine,
    acknowledge,
    cancel,
    chunk,
    header,
    hello,
    make_crossing,
    upload,
)
from tests.waiting import PATIENCE

SMALL = Limits(
    max_request_bytes=100_000,
    max_pending_bytes=300_000,
    max_in_flight=4,
    max_clients=3,
    max_pending=6,
    chunk_bytes=1000,
    max_cuts=8,
    deadline_seconds=600,
    hello_seconds=600,
    idle_seconds=600,
)


class Gate:
    """Holds workers until it is opened, and counts those that came."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, payload: memoryview) -> None:
        self.entered.release()
        assert self.opened.wait(PATIENCE)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def core(engine: FakeEngine) -> Iterator[Core]:
    with Core([engine], SMALL) as core:
        yield core


def failure(client: CoreClient, id: int, number: int = 1) -> tuple[str, str]:
    failed = client.answer(id, number).failed
    assert failed is not None
    return failed.error, failed.message


class TestAnswers:
    @pytest.mark.parametrize("size", [0, 1, 2, 999, 1000, 1001, 12345])
    def test_comes_back_whole(self, core: Core, size: int) -> None:
        client, data = CoreClient(core), bytes(range(256)) * (size // 256 + 1)
        client.ask(7, data[:size])
        result = client.answer(7)
        assert result.reply is not None and result.reply.header == b"head" and result.reply.durations.compute_ns == 2
        assert bytes(result.data) == data[:size][::-1]

    @pytest.mark.parametrize(("takes", "inline"), [(0, False), (999, False), (1000, True), (1 << 31, True)])
    def test_a_small_one_comes_in_its_header_to_who_takes_it(self, core: Core, takes: int, inline: bool) -> None:
        client, data = CoreClient(core, greet=False), bytes(range(250)) * 4
        client.send(hello(inline_bytes=takes))
        client.ask(7, data)
        result = client.answer(7)
        assert result.reply is not None and result.reply.payload_bytes == 1000
        assert (result.reply.payload if inline else bytes(result.data)) == data[::-1]
        assert bool(result.reply.payload) is inline

    def test_a_large_one_never_does(self, core: Core) -> None:
        client, data = CoreClient(core, greet=False), bytes(100_000)
        client.send(hello(inline_bytes=1 << 31))
        client.ask(7, data)
        result = client.answer(7)
        assert result.reply is not None and not result.reply.payload and len(result.data) == len(data)

    def test_many_in_flight_interleaved(self, core: Core) -> None:
        client, crossing = CoreClient(core), make_crossing(4000)
        data = {id: bytes([id]) * 3999 + b"x" for id in range(1, 5)}
        client.send(upload(crossing), *(header(id, crossing) for id in data))
        for offset in range(0, 4000, 500):
            client.send(*(chunk(id, offset, data[id][offset : offset + 500]) for id in data))
        for id in data:
            assert bytes(client.answer(id).data) == data[id][::-1]

    def test_durations_are_nanoseconds_of_this_request(self) -> None:
        gate = Gate()
        with Core([FakeEngine(gate)], SMALL) as core:
            client = CoreClient(core)
            client.ask(1, b"a")
            gate.wait_entered()
            before = time.perf_counter_ns()
            client.ask(2, b"b")
            asked = time.perf_counter_ns()
            time.sleep(0.001)
            opened = time.perf_counter_ns()
            gate.opened.set()
            reply = client.answer(2).reply
            answered = time.perf_counter_ns()
            assert reply is not None and opened - asked <= reply.durations.queue_ns <= answered - before
            assert 0 <= reply.durations.receive_ns <= asked - before

    def test_two_workers_compute_at_a_time(self) -> None:
        gate = Gate()
        with Core([FakeEngine(gate)], SMALL, workers=2) as core:
            client = CoreClient(core)
            client.ask(1, b"a")
            client.ask(2, b"b")
            gate.wait_entered()
            gate.wait_entered()
            gate.opened.set()
            client.answer(1)
            client.answer(2)

    def test_half_closed_stream_is_answered_then_ends(self) -> None:
        gate = Gate()
        with Core([FakeEngine(gate)], SMALL) as core:
            client = CoreClient(core)
            client.ask(1, b"abc")
            client.session.finish()
            gate.opened.set()
            assert client.ended() is None
            assert bytes(client.answer(1).data) == b"cba"

    def test_a_model_that_raises_fails_its_request_only(self, core: Core, engine: FakeEngine) -> None:
        def stumble(payload: memoryview) -> None:
            if payload[0] == 0:
                raise ZeroDivisionError("the model divides")
            if payload[0] == 1:
                raise SystemExit("the model leaves")
            if payload[0] == 2:
                raise errors.PlanMismatch("the model turned left")

        engine.before = stumble
        client = CoreClient(core)
        for id in range(4):
            client.ask(id, bytes([id]))
        assert failure(client, 0) == ("ModelFailed", "ZeroDivisionError: the model divides")
        assert failure(client, 1) == ("ModelFailed", "SystemExit: the model leaves")
        assert failure(client, 2) == ("PlanMismatch", "the model turned left")
        assert bytes(client.answer(3).data) == b"\x03"


class TestHandshake:
    def refusal(self, core: Core, **changes: object) -> errors.IsthmusError:
        client = CoreClient(core, greet=False)
        assert not client.send(hello(**changes))
        error = client.ended()
        assert error is not None
        client.leave()
        return error

    def test_welcome_states_the_limits(self, core: Core) -> None:
        client = CoreClient(core)
        client.ask(1, b"x")
        client.answer(1)
        welcome = client.others[0].welcome
        assert (welcome.protocol_version, welcome.max_request_bytes) == (3, 100_000)
        assert (welcome.max_in_flight, welcome.chunk_bytes, dict(welcome.about)) == (4, 1000, {"torch": "2.99"})

    def test_everything_that_differs_is_named_with_both_values(self, core: Core) -> None:
        error = self.refusal(
            core,
            weights_hash="w2",
            structure_digest="s2",
            plan_digest="p2",
            environment={"mha_fastpath": "on", "new": "1"},
        )
        assert isinstance(error, errors.Disagreement) and error.status == "FAILED_PRECONDITION"
        for text in ('client "w2", server "w1"', '"s2"', '"p2"', 'mha_fastpath: client "on", server "off"'):
            assert text in str(error)
        for text in ('new: client "1", server has none', "default_dtype: client has none", "torch 2.98", "torch 2.99"):
            assert text in str(error)

    def test_plans_are_compared_only_if_both_sides_have_one(self, core: Core) -> None:
        client = CoreClient(core, greet=False)
        assert client.send(hello(plan_digest=""))

    def test_unknown_model(self, core: Core) -> None:
        error = self.refusal(core, model_id="os:system")
        assert isinstance(error, errors.UnknownModel) and error.status == "NOT_FOUND"
        assert "os:system" in str(error) and "fake" in str(error)

    def test_other_protocol_version(self, core: Core) -> None:
        assert "protocol version: client 9, server 3" in str(self.refusal(core, protocol_version=9))

    @pytest.mark.parametrize("client_id", ["", "x" * 257])
    def test_client_id_of_absurd_length(self, core: Core, client_id: str) -> None:
        assert isinstance(self.refusal(core, client_id=client_id), errors.BadFrame)

    def test_silence(self) -> None:
        with Core([FakeEngine()], dataclasses.replace(SMALL, hello_seconds=0.2)) as core:
            assert isinstance(CoreClient(core, greet=False).ended(), errors.DeadlineExceeded)

    @pytest.mark.parametrize("frame", [header(1, make_crossing(1)), chunk(1, 0, b"x"), cancel(1), acknowledge(1)])
    def test_anything_before_hello(self, core: Core, frame: object) -> None:
        client = CoreClient(core, greet=False)
        client.send(frame)  # type: ignore[arg-type]
        assert isinstance(client.ended(), errors.BadFrame)

    def test_second_hello(self, core: Core) -> None:
        client = CoreClient(core)
        client.send(hello())
        assert isinstance(client.ended(), errors.BadFrame)

    def test_too_many_clients(self, core: Core) -> None:
        clients = [CoreClient(core) for _ in range(3)]
        with pytest.raises(errors.ServerUnavailable, match="3 clients"):
            core.open(Caller("test"))
        clients[0].leave()
        CoreClient(core).leave()


class TestBadRequests:
    """Each fails by name, and a good request on the same stream is answered afterwards."""

    @pytest.fixture
    def client(self, core: Core) -> Iterator[CoreClient]:
        client = CoreClient(core)
        yield client
        client.ask(99, b"good")
        assert bytes(client.answer(99).data) == b"doog"

    def test_unknown_cut_may_be_uploaded_and_asked_for_again(self, client: CoreClient) -> None:
        crossing = make_crossing(3)
        client.send(header(1, crossing), chunk(1, 0, b"abc"))
        failed = client.answer(1).failed
        assert failed is not None and failed.error == "Disagreement" and failed.retry and failed.code == 9
        client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"abc"))
        assert bytes(client.answer(1, 2).data) == b"cba"

    def test_header_that_is_none(self, client: CoreClient) -> None:
        client.ask(1, b"abc", header=b"\x00garbage")
        assert failure(client, 1)[0] == "BadFrame"

    def test_payload_that_is_not_the_cuts(self, client: CoreClient) -> None:
        client.ask(1, b"abc", payload_bytes=2)
        assert failure(client, 1) == ("BadFrame", "2 bytes are announced, the cut has 3")

    def test_oversized_payload(self, client: CoreClient) -> None:
        client.ask(1, b"abc", payload_bytes=1 << 60)
        error, message = failure(client, 1)
        assert error == "TooLarge" and str(1 << 60) in message

    def test_reserved_fields(self, client: CoreClient) -> None:
        client.ask(1, b"abc", session_id=5)
        assert failure(client, 1)[0] == "BadFrame"

    @pytest.mark.parametrize(
        ("offset", "data", "says"),
        [(1, b"bc", "without gaps"), (0, b"abcd", "overruns"), (0, b"", "empty"), (1 << 63, b"a", "without gaps")],
    )
    def test_gap_overrun_and_empty_chunk(self, client: CoreClient, offset: int, data: bytes, says: str) -> None:
        crossing = make_crossing(3)
        client.send(upload(crossing), header(1, crossing), chunk(1, offset, data), chunk(1, 0, b"abc"))
        error, message = failure(client, 1)
        assert error == "BadFrame" and says in message

    def test_overlapping_chunks(self, client: CoreClient) -> None:
        crossing = make_crossing(3)
        client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"ab"), chunk(1, 1, b"bc"))
        assert failure(client, 1)[0] == "BadFrame"

    def test_announced_again_before_its_payload_is_complete(self, client: CoreClient) -> None:
        crossing = make_crossing(3)
        client.send(upload(crossing), header(1, crossing), chunk(1, 0, b"a"), header(1, crossing), chunk(1, 1, b"bc"))
        assert "announced again" in failure(client, 1)[1]

    def test_id_used_for_another_content(self, client: CoreClient) -> None:
        client.ask(1, b"abc")
        client.answer(1)
        client.ask(1, b"abc", header=b"fake, but other")
        assert "used before" in failure(client, 1, 2)[1]


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


class TestRepeatedIds:
    def test_answered_from_the_store(self, core: Core, engine: FakeEngine) -> None:
        first = CoreClient(core)
        first.ask(1, b"abc")
        first.answer(1)
        first.leave()
        second = CoreClient(core)
        second.ask(1, b"abc")
        assert bytes(second.answer(1).data) == b"cba" and engine.computed == 1

    def test_failures_are_answers_too(self, core: Core, engine: FakeEngine) -> None:
        calls = []

        def fail(payload: memoryview) -> None:
            calls.append(1)
            raise ValueError("no")

        engine.before = fail
        client = CoreClient(core)
        client.ask(1, b"abc")
        assert failure(client, 1)[0] == "ModelFailed"
        client.ask(1, b"abc")
        assert failure(client, 1, 2)[0] == "ModelFailed" and len(calls) == 1

    def test_attaches_to_the_running_request(self) -> None:
        gate = Gate()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            first = CoreClient(core)
            first.ask(1, b"abc")
            gate.wait_entered()
            first.leave()
            second = CoreClient(core)
            second.ask(1, b"abc")
            gate.opened.set()
            assert bytes(second.answer(1).data) == b"cba" and engine.computed == 1

    def test_client_comes_back_before_the_old_stream_is_seen_dead(self, core: Core, engine: FakeEngine) -> None:
        crossing = make_crossing(3)
        old = CoreClient(core)
        old.send(upload(crossing), header(1, crossing), chunk(1, 0, b"a"))
        new = CoreClient(core)
        new.ask(1, b"abc")
        assert bytes(new.answer(1).data) == b"cba" and engine.computed == 1
        assert old.send(chunk(1, 1, b"b"))  # of the old upload: skipped, no mistake

    def test_client_gone_for_a_while(self) -> None:
        gate = Gate()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            first = CoreClient(core)
            first.ask(1, b"abc")
            first.ask(2, b"never computed")
            gate.wait_entered()
            first.leave()
            gate.opened.set()
            assert core.wait_idle(PATIENCE)
            second = CoreClient(core)
            second.ask(1, b"abc")
            assert bytes(second.answer(1).data) == b"cba" and engine.computed == 1

    def test_acknowledged_answers_are_forgotten(self, core: Core, engine: FakeEngine) -> None:
        client = CoreClient(core)
        client.ask(1, b"abc")
        client.answer(1)
        assert len(core.requests._answers) == 1
        client.send(acknowledge(1, 2, 3))
        assert len(core.requests._answers) == 0 and core.requests._answers.nbytes == 0

    def test_answers_grow_old(self) -> None:
        with Core([FakeEngine()], dataclasses.replace(SMALL, answer_seconds=0.01)) as core:
            client = CoreClient(core)
            client.ask(1, b"abc")
            client.answer(1)
            time.sleep(0.02)
            with core.requests.changed:
                core.requests._answers.sweep()
            assert len(core.requests._answers) == 0

    @pytest.mark.parametrize("limits", [{"max_answers": 2}, {"max_answer_bytes": 2500}])
    def test_the_oldest_answers_make_room(self, limits: dict[str, int]) -> None:
        with Core([FakeEngine()], dataclasses.replace(SMALL, **limits)) as core:
            client = CoreClient(core)
            for id in range(4):
                client.ask(id, b"abc")
                client.answer(id)
            assert list(core.requests._answers._kept) == [("address test", "alice", 2), ("address test", "alice", 3)]

    def test_other_clients_do_not_get_them(self, core: Core, engine: FakeEngine) -> None:
        alice, bob = CoreClient(core), CoreClient(core, client_id="bob")
        alice.ask(1, b"abc")
        alice.answer(1)
        bob.ask(1, b"abd")
        assert bytes(bob.answer(1).data) == b"dba" and engine.computed == 2


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
            bob.ask(3, b"abc")  # alice has four of six, bob two: her last gives way
            error, message = failure(alice, 4)
            assert error == "ServerUnavailable" and "gave way" in message and "max_pending is 6" in message
            bob.ask(4, b"abc")
            assert "no room: 6 requests are on their way" in failure(bob, 4)[1]
            gate.opened.set()
            for id in range(1, 4):
                assert alice.answer(id).reply and bob.answer(id).reply
            alice.ask(5, b"abc")
            assert alice.answer(5, 2).reply

    def test_who_is_refused_again_and_again_waits(self) -> None:
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
            core.crossings.get(crossings[0].digest, Party("address test", "alice"))
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


def test_two_models_of_one_name() -> None:
    with pytest.raises(errors.SpecError, match="fake"):
        Core([FakeEngine(), FakeEngine()], SMALL)


def test_what_may_succeed_later_is_computed_again_when_it_is_asked_again() -> None:
    moods: list[Exception] = [errors.ServerUnavailable("not now")]

    def before(_: memoryview) -> None:
        if moods:
            raise moods.pop()

    with Core([FakeEngine(before)]) as core:
        client = CoreClient(core)
        client.ask(1, b"abc")
        failed = client.answer(1).failed
        assert failed is not None and failed.retry
        client.ask(1, b"abc")
        assert client.answer(1, number=2).data == b"cba"
