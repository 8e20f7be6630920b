"""Streams and requests, without a transport and without torch: what is computed, answered, kept and refused."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from shared_hooks import errors
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
from tests.cloud_server.small import SMALL, Gate, failure
from tests.waiting import PATIENCE


class TestAnswers:
    @pytest.mark.parametrize("size", [0, 1, 2, 999, 1000, 1001, 12345])
    def test_comes_back_whole(self, core: Core, size: int) -> None:
        client, data = CoreClient(core), bytes(range(256)) * (size // 256 + 1)
        client.ask(7, data[:size])
        result = client.answer(7)
        assert result.reply is not None and result.reply.header == b"head" and result.reply.durations.compute_ns == 2
        assert bytes(result.data) == data[:size][::-1]

    @pytest.mark.parametrize(("takes", "inline"), [(0, False), (999, False), (1000, True), (1 << 31, True)])
    def test_small_payload_arrives_in_its_header(self, core: Core, takes: int, inline: bool) -> None:
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

    def test_a_machine_that_has_just_started(self, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
        """The clock of a machine is near 0, which as a time of sending means that the client does not know it."""
        monkeypatch.setattr("cloud_server.requests.request.time", SimpleNamespace(perf_counter_ns=lambda: 10**9))
        client = CoreClient(core)
        client.ask(1, b"a")
        reply = client.answer(1).reply
        assert reply is not None and reply.durations.receive_ns == 0

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

    def test_stored_answers_are_private(self, core: Core, engine: FakeEngine) -> None:
        alice, bob = CoreClient(core), CoreClient(core, client_id="bob")
        alice.ask(1, b"abc")
        alice.answer(1)
        bob.ask(1, b"abd")
        assert bytes(bob.answer(1).data) == b"dba" and engine.computed == 2


def test_two_models_of_one_name() -> None:
    with pytest.raises(errors.SpecError, match="fake"):
        Core([FakeEngine(), FakeEngine()], SMALL)


def test_transient_failure_is_computed_again_on_resend() -> None:
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
