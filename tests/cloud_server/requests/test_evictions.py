"""At a bound of the whole server: what is idle, and what belongs to who has most, is evicted, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from cloud_server.access import Caller, Policy
from cloud_server.core import Core
from cloud_server.limits import Limits
from protos.isthmus.v1 import split_pb2
from shared_hooks import errors
from tests.cloud_server.fakes import (
    Client,
    CoreClient,
    FakeEngine,
    acknowledge,
    chunk,
    header,
    hello,
    make_crossing,
    upload,
)
from tests.waiting import eventually

KIB = 1 << 10
LIMITS = Limits(
    max_request_bytes=256 * KIB,
    max_pending_bytes=2048 * KIB,
    max_pending=64,
    max_clients=8,
    max_answer_bytes=560 * KIB,
    chunk_bytes=16 * KIB,
    idle_seconds=600,
    deadline_seconds=60_000,
)
LARGE, SMALL = make_crossing(255 * KIB, "large"), make_crossing(8 * KIB, "small")


def later(core: Core) -> None:
    """As if so much time had passed that all that waits for its client is idle: no clock is raced."""
    with core.requests.changed:
        for request in core.requests._live.values():
            request.began_ns -= 700 * 10**9
            request._progress_ns -= 700 * 10**9
        for session in core._sessions:
            session._received_at -= 700
            session._moved -= 700


class Streams:
    """Streams of any account to one core."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def __call__(
        self, name: str, address: str = "test", policy: Policy | None = None, greet: bool = True
    ) -> CoreClient:
        caller = Caller(address) if policy is None else Caller(address, name, policy)
        client = CoreClient.__new__(CoreClient)
        client.session = self.core.open(caller)
        Client.__init__(client)
        if greet:
            client.send(hello(name), upload(LARGE), upload(SMALL))
        return client


@pytest.fixture
def core() -> Iterator[Core]:
    with Core([FakeEngine()], LIMITS) as core:
        yield core


@pytest.fixture
def stream(core: Core) -> Streams:
    return Streams(core)


def served(client: CoreClient, id: int = 1) -> bool:
    client.ask(id, bytes(SMALL.payload_bytes), SMALL)
    return client.answer(id).reply is not None


def reported(client: CoreClient, id: int) -> str:
    failed = client.answer(id).failed
    assert failed is not None and failed.error == "ServerUnavailable" and failed.retry
    return failed.message


def test_headers_that_announce_all_bytes_and_send_nothing(core: Core, stream: Streams) -> None:
    hostile, honest = stream("hostile"), stream("honest")
    hostile.send(*(header(id, LARGE) for id in range(8)))
    assert core.requests.held_bytes > 8 * 255 * KIB
    assert served(honest)  # at once: it has less
    assert "max_pending_bytes" in reported(hostile, 7)


def test_half_uploads_that_take_all_places(core: Core, stream: Streams) -> None:
    hostile = [stream(f"hostile {number}") for number in range(4)]
    for client in hostile:
        client.send(*(header(id, SMALL) for id in range(16)), *(chunk(id, 0, b"x") for id in range(16)))
    assert core.requests.kept() == (0, 0) and len(core.requests._live) == 64
    honest = stream("honest")
    assert all(served(honest, id) for id in range(20))
    assert len(core.requests._live) == 63


def test_equal_small_holders_are_evicted_when_idle(core: Core, stream: Streams) -> None:
    hostile = [stream(f"hostile {number}") for number in range(7)]
    for client in hostile:
        client.send(*(header(id, SMALL) for id in range(9)))
    honest = stream("honest")
    honest.send(header(0, SMALL))
    later(core)
    assert served(honest, 30) and "gave way" in reported(hostile[0], 0)  # it has waited the longest


def test_another_address_is_another_account(core: Core, stream: Streams) -> None:
    hostile = [stream(f"hostile {number}") for number in range(4)]
    for client in hostile:
        client.send(*(header(id, SMALL) for id in range(16)))
    for number in range(4):  # a lab's clients, each with as many as a hostile one, are let in before it is idle
        honest = stream(f"honest {number}", "lab")
        honest.send(*(header(id, SMALL) for id in range(4)))
        assert not honest.results
    room = core.requests._room.places
    assert room.account("address lab") == 16 and room.account("address test") == 48


def test_silent_streams_give_their_places(core: Core, stream: Streams) -> None:
    silent = [stream(f"silent {number}", greet=number % 2 == 0) for number in range(8)]
    with pytest.raises(errors.ServerUnavailable, match=r"8 clients, its limit \(max_clients\), and none is idle"):
        stream("early")
    later(core)
    honest = stream("honest")
    gone = [client for client in silent if client.session._error is not None]
    assert len(gone) == 1 and gone[0].session.client_id == ""  # those that never greeted come first
    error = gone[0].ended()
    assert isinstance(error, errors.ServerUnavailable) and "max_clients" in str(error)
    assert served(honest) and core.clients == 8


def test_a_stream_with_something_under_way_is_not_evicted_for_its_own_account(core: Core, stream: Streams) -> None:
    busy = [stream(f"busy {number}") for number in range(8)]
    for client in busy:
        client.send(header(1, SMALL))
    later(core)
    with pytest.raises(errors.ServerUnavailable, match="8 are of this account"):
        stream("another")
    assert served(stream("another", "elsewhere"))  # whose account has none


def test_an_identitys_own_bounds(core: Core, stream: Streams) -> None:
    policy = Policy(max_in_flight=2, max_bytes=20 * KIB)
    ann, again = stream("ann", policy=policy), stream("ann", "elsewhere", policy=policy)
    welcome = ann.other("welcome").welcome
    assert (welcome.max_in_flight, welcome.max_request_bytes) == (2, 20 * KIB)
    ann.send(header(1, LARGE))
    failed = ann.answer(1).failed
    assert failed is not None and failed.error == "TooLarge"
    ann.send(header(2, SMALL))
    again.send(header(3, SMALL), header(4, SMALL))
    assert "max_in_flight of this identity is 2" in reported(again, 4)
    later(core)
    again.send(header(5, SMALL))  # its own that waits for it is evicted
    assert "gave way" in reported(ann, 2)


def test_an_upload_that_stands_still_does_not_hold_up_a_drain(core: Core, stream: Streams) -> None:
    client = stream("hostile")
    client.send(header(1, SMALL), chunk(1, 0, b"x"))
    core.drain()
    assert not core.wait_idle(0)
    later(core)
    assert core.wait_idle(10) and "is draining, and the rest of request 1" in reported(client, 1)


class Unread:
    """A stream whose client asks and reads nothing."""

    def __init__(self, core: Core, name: str, address: str = "test") -> None:
        self.session = core.open(Caller(address))
        for frame in (hello(name), upload(LARGE), upload(SMALL)):
            self.session.receive(frame)
        self.dropped = False
        self.session.on_drop = self.drop

    def drop(self) -> None:
        self.dropped = True
        self.session.disconnect()

    def ask(self, id: int) -> None:
        self.session.receive(header(id, LARGE))
        self.session.receive(chunk(id, 0, bytes(LARGE.payload_bytes)))


def test_answers_that_nobody_reads_are_bounded(core: Core, stream: Streams) -> None:
    hostile, honest = Unread(core, "hostile"), stream("honest")
    for id in range(6):
        hostile.ask(id)
        assert core.wait_idle(10)
    number, nbytes = core.requests.kept()
    assert nbytes <= LIMITS.max_answer_bytes and number == 2
    assert served(honest)
    frames = [one for one in hostile.session._outbox if isinstance(one, split_pb2.ServerFrame)]
    lost = [frame.failed for frame in frames if frame.WhichOneof("frame") == "failed"]
    assert len(lost) == 4 and all("max_answer_bytes" in failed.message and failed.retry for failed in lost)


def test_a_stream_that_stops_in_the_middle_of_an_answer_is_dropped(core: Core, stream: Streams) -> None:
    hostile, honest = [Unread(core, f"hostile {number}") for number in range(3)], stream("honest")
    for number, client in enumerate(hostile):
        client.ask(number)
        frames = client.session.frames()
        while getattr(next(frames), "nbytes", 0) == 0:  # welcome, the reply, a chunk
            pass
        client.frames = frames  # type: ignore[attr-defined]  # it stops here
    assert served(honest)
    eventually(lambda: sum(client.dropped for client in hostile) == 1)
    gone = next(client for client in hostile if client.dropped)
    assert "does not fetch" in str(gone.session._error) and "max_answer_bytes" in str(gone.session._error)
    for client in hostile:
        client.session.disconnect()
    assert core.requests._answers._bytes.total == sum(kept.size for kept in core.requests._answers._kept.values())


def test_a_stream_that_gave_its_place_and_stops_reading_lets_go_of_its_thread(
    core: Core, stream: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not fetch is no answer: it never counted as stuck, and its call was held for good."""
    monkeypatch.setattr("cloud_server.core.LEAVE_SECONDS", 0.1)
    cut = []
    for number in range(8):
        session = core.open(Caller("hostile:1"))
        session.on_drop = lambda number=number: cut.append(number)  # type: ignore[misc]
        session.receive(hello(f"hostile{number}"))
        next(session.frames())  # and never comes back
    assert served(stream("honest", address="honest"))
    eventually(lambda: len(cut) == 1)


def test_acknowledging_what_was_not_fetched_frees_nothing(core: Core) -> None:
    hostile = Unread(core, "hostile")
    hostile.ask(1)
    assert core.wait_idle(10)
    hostile.session.receive(acknowledge(1))
    assert core.requests.kept()[0] == 1
    hostile.session.disconnect()
    assert core.requests.kept() == (0, 0)


def test_an_answer_larger_than_all_may_be_is_refused() -> None:
    with Core([FakeEngine()], dataclasses.replace(LIMITS, max_answer_bytes=100 * KIB)) as core:
        client = CoreClient(core)
        client.ask(1, bytes(LARGE.payload_bytes), LARGE)
        failed = client.answer(1).failed
        assert failed is not None and failed.error == "TooLarge" and "max_answer_bytes" in failed.message


def test_counters_return_to_zero(core: Core, stream: Streams) -> None:
    clients = [stream(f"client {number}", f"address{number % 2}") for number in range(6)]
    for client in clients:
        client.send(header(1, LARGE), header(2, SMALL))
        client.ask(3, bytes(SMALL.payload_bytes), SMALL)
        client.send(acknowledge(3))
    for client in clients:
        client.leave()
    assert core.wait_idle(10) and core.wait_gone(10)
    for client in clients:
        core.requests.forget([(client.session.caller.account, client.session.client_id, 3)])
    books = (core.requests._room.places, core.requests._room.memory, core._places, core.requests._answers._bytes)
    assert all(book.total == 0 and not list(book.parties()) for book in books)
