"""The standing connection: what breaks is mended, what cannot be mended has a name, and nothing waits for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from edge_client.transport import wire
from edge_client.transport.connection import Backoff, Connection
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.options import ConnectionOptions, KeepAlive, State
from edge_client.transport.times import Stamps
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    BadFrame,
    Cancelled,
    DeadlineExceeded,
    InputMismatch,
    RemoteError,
    ServerUnavailable,
    SpecError,
    TooLarge,
)
from tests.edge_client import fake_server as fake
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.transport.connections import Relay, connected, exchange, hello, keepers, send
from tests.ports import free_port
from tests.waiting import PATIENCE, eventually

MIB = 1 << 20


def test_payloads_come_back_whole_in_bounded_chunks_with_one_upload_of_the_cut() -> None:
    payload = bytes(range(256)) * 4096 * 3 + b"tail"
    with FakeServer() as server, connected(server.address) as connection:
        assert connection.state is State.UNOPENED
        assert send(connection, exchange(1, payload)) == payload
        assert send(connection, exchange(2, b"small")) == b"small"
        assert send(connection, exchange(3, b"")) == b""
        assert connection.state is State.READY
        assert server.seen.cuts == ["r"]
        assert max(server.seen.chunk_sizes) == MIB and sum(server.seen.chunk_sizes) == len(payload) + 5
        eventually(lambda: server.seen.acknowledged == [1, 2, 3])
        assert len(server.seen.hellos) == 1
    assert connection.state is State.CLOSED


def test_many_threads_share_one_stream() -> None:
    results: dict[int, bytes] = {}
    with FakeServer() as server, connected(server.address, max_in_flight=8) as connection:

        def work(first: int) -> None:
            for number in range(first, first + 20):
                results[number] = send(connection, exchange(number, b"%d " % number * (number % 7) * 1000))

        threads = [threading.Thread(target=work, args=(start,)) for start in range(100, 900, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert connection.counters.streams == 1
    assert len(results) == 160
    assert all(payload == b"%d " % number * (number % 7) * 1000 for number, payload in results.items())


@pytest.mark.parametrize("frames", [0, 1, 2, 3])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_a_stream_that_breaks_in_mid_request_is_mended(frames: int, code: grpc.StatusCode) -> None:
    payload = b"x" * (2 * MIB + 1)
    with FakeServer(fake.break_after(frames, code), fake.echo) as server, connected(server.address) as connection:
        one = exchange(7, payload)
        assert send(connection, one) == payload
        # gRPC drops a Welcome that has not been read when the error after it arrives
        assert connection.counters.streams == 2 or frames == 0
        assert server.seen.requests[-1] == 7 and set(server.seen.requests) == {7}
        assert server.seen.cuts == ["r"]  # again on the new stream; the broken one did not count it
        assert one.sends == 1 + (frames > 0) or frames == 0


def test_a_half_received_answer_is_asked_for_again() -> None:
    with FakeServer(fake.break_in_answer, fake.echo) as server, connected(server.address) as connection:
        one = exchange(1, b"abcdef" * 1000)
        assert send(connection, one) == b"abcdef" * 1000
        assert one.sends == 2 and connection.counters.resent == 1


def test_a_killed_server_that_comes_back_on_its_port_answers() -> None:
    first = FakeServer(fake.deaf, port=free_port())
    with connected(first.address) as connection:
        waiting = [exchange(number, b"payload %d" % number) for number in range(1, 4)]
        for one in waiting:
            connection.submit(one)
        eventually(lambda: len(first.seen.requests) == 3)
        first.stop(0)
        eventually(lambda: connection.state is State.BACKOFF)
        with FakeServer(port=first.port):
            for number, one in enumerate(waiting, 1):
                assert one.wait() and one.error is None
                assert bytes(one.payload) == b"payload %d" % number


def test_a_server_that_goes_away_politely_finishes_what_it_has() -> None:
    stopping = threading.Event()

    def slow(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        header, payload = next(fake.requests(server, frames))
        assert stopping.wait(PATIENCE)
        yield from fake.reply(header.id, payload)

    first = FakeServer(slow, port=free_port())
    with connected(first.address) as connection:
        one = exchange(1, b"one")
        connection.submit(one)
        eventually(lambda: first.seen.requests == [1])
        stopped = first._server.stop(PATIENCE)
        stopping.set()
        assert one.wait() and one.error is None and one.sends == 1
        assert stopped.wait(PATIENCE)
        with FakeServer(port=first.port):
            assert send(connection, exchange(2, b"two")) == b"two"


def test_draining_sends_the_next_request_on_a_new_stream() -> None:
    asked = threading.Event()

    def drain(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        incoming = fake.requests(server, frames)
        header, payload = next(incoming)
        yield split_pb2.ServerFrame(draining=split_pb2.Draining())
        assert asked.wait(PATIENCE)
        yield from fake.reply(header.id, payload)
        assert next(incoming, None) is None

    with FakeServer(drain, fake.echo) as server, connected(server.address) as connection:
        one, two = exchange(1, b"one"), exchange(2, b"two")
        connection.submit(one)
        eventually(lambda: connection._outbox is not None and connection._outbox._draining)
        connection.submit(two)
        asked.set()
        assert one.wait() and bytes(one.payload) == b"one" and one.sends == 1
        assert two.wait() and bytes(two.payload) == b"two" and two.sends == 1


def test_no_server_is_named_after_the_patience() -> None:
    address = f"127.0.0.1:{free_port()}"
    with connected(address, patience=0.6) as connection:
        one, reported = exchange(1, b"x"), []
        one._on_settled = lambda: reported.append(connection.state)
        with pytest.raises(ServerUnavailable, match=rf"no server at {address} .* attempt"):  # and no DeadlineExceeded
            send(connection, one)
        assert connection.counters.attempts >= 1
        # who hears of it finds a connection that starts over; on a busy machine it is in the middle of an attempt
        assert reported in ([State.UNOPENED], [State.CONNECTING])


def test_a_server_that_starts_late_is_waited_for() -> None:
    port = free_port()
    with connected(f"127.0.0.1:{port}") as connection:
        one = exchange(1, b"late")
        connection.submit(one)
        eventually(lambda: connection.counters.attempts > 1)
        with FakeServer(port=port):
            assert one.wait() and bytes(one.payload) == b"late"


def test_a_silent_server_costs_the_patience_and_no_more() -> None:
    with (
        FakeServer(fake.silent) as server,
        connected(server.address, patience=0.5) as connection,
        pytest.raises(ServerUnavailable, match="no answer to the greeting"),  # and no DeadlineExceeded
    ):
        send(connection, exchange(1, b"x"))


def test_a_deadline_ends_the_wait_and_tells_the_server() -> None:
    with FakeServer(fake.deaf) as server, connected(server.address) as connection:
        one = exchange(5, b"x")
        connection.submit(one)
        eventually(lambda: server.seen.requests == [5])
        one.until = time.monotonic()  # over now, when the server has it
        assert not one.wait()
        connection.cancel(one, DeadlineExceeded("too late"))
        assert isinstance(one.error, DeadlineExceeded)
        eventually(lambda: server.seen.cancelled == [5])
        assert connection.state is State.READY


def test_the_request_says_what_is_left_of_its_deadline() -> None:
    left: list[int] = []

    def note(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            left.append(header.deadline_ms)
            yield from fake.reply(header.id, payload)

    with FakeServer(note) as server, connected(server.address) as connection:
        send(connection, exchange(1, b"x", seconds=1000.0))
    assert 1_000_000 - 1000 * PATIENCE < left[0] <= 1_000_000


def test_repeated_answers_are_counted_and_dropped() -> None:
    def twice(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            yield from fake.reply(header.id, payload)
            yield from fake.reply(header.id, payload)
            yield from fake.reply(header.id + 1000, b"nobody asked")

    with FakeServer(twice) as server, connected(server.address) as connection:
        for number in range(1, 5):
            assert send(connection, exchange(number, b"%d" % number)) == b"%d" % number
        eventually(lambda: connection.counters.stray == 8)
        assert connection.counters.streams == 1


def test_answers_may_come_interleaved_and_out_of_order() -> None:
    def shuffle(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        incoming = fake.requests(server, frames)
        (first, one), (second, two) = next(incoming), next(incoming)
        answers = [list(fake.reply(first.id, one)), list(fake.reply(second.id, two))]
        yield from (frame for pair in zip(answers[1], answers[0], strict=True) for frame in pair)
        for _ in incoming:
            pass

    with FakeServer(shuffle) as server, connected(server.address) as connection:
        one, two = exchange(1, b"one" * 100), exchange(2, b"two" * 100)
        connection.submit(one)
        connection.submit(two)
        assert one.wait() and two.wait()
        assert bytes(one.payload) == b"one" * 100 and bytes(two.payload) == b"two" * 100


def test_chunks_that_do_not_fit_are_an_error_of_that_request_only() -> None:
    def overrun(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            bad = [*fake.reply(header.id, payload, pieces=1)]
            if header.id == 1:
                bad[-1].chunk.data += b"more"
            if header.id == 2:
                bad[-1].chunk.offset = 1
            yield from bad

    with FakeServer(overrun) as server, connected(server.address) as connection:
        for number in (1, 2):
            with pytest.raises(BadFrame, match=f"answer {number}"):
                send(connection, exchange(number, b"abc"))
        assert send(connection, exchange(3, b"abc")) == b"abc"


def test_payloads_begin_in_headers_where_the_server_says_so() -> None:
    sizes, message_bytes = [0, 5, 3 * MIB, 9 * MIB], 2 * MIB
    with FakeServer(fake.echo, welcome={"message_bytes": message_bytes}) as server:
        with connected(server.address, chunk_bytes=MIB) as connection:
            for number, size in enumerate(sizes, start=1):
                payload = bytes([number]) * size
                assert send(connection, exchange(number, payload)) == payload
        assert server.seen.headed[:2] == [0, 5]
        assert min(server.seen.headed[2:]) >= MIB
        assert max(server.seen.headed + server.seen.chunk_sizes) < message_bytes
        assert server.seen.acknowledged[:3] == [1, 2, 3]  # with the requests that follow them
        assert sum(server.seen.headed) + sum(server.seen.chunk_sizes) == sum(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_payloads_lie_in_an_area_where_the_server_reads_it() -> None:
    large = b"x" * (3 * MIB)
    with FakeServer(fake.echo, welcome={"message_bytes": 4 * MIB, "area": True}) as server:
        with connected(server.address, area_bytes=4 * MIB) as connection:
            assert send(connection, exchange(1, large)) == large
            assert send(connection, exchange(2, large[:-1])) == large[:-1]  # the first one's place is free again
            assert send(connection, exchange(3, b"small")) == b"small"
            assert send(connection, exchange(4, large + large)) == large + large  # too large for it
        assert server.seen.in_area == [server.seen.in_area[0]] * 2
        assert server.seen.headed[2:] != [0, 0]
        with connected(server.address, area_bytes=0) as connection:
            assert send(connection, exchange(5, large)) == large
        assert not server.seen.hellos[-1].HasField("area")


def test_an_answer_may_begin_in_its_header() -> None:
    def inline(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            said = len(payload) - (header.id == 2)
            first, rest = (payload[:2], payload[2:]) if header.id == 3 else (payload, b"")
            yield split_pb2.ServerFrame(
                reply=split_pb2.ReplyHeader(id=header.id, header=b"H", payload_bytes=said, payload=first)
            )
            if rest:
                yield split_pb2.ServerFrame(chunk=split_pb2.Chunk(id=header.id, offset=len(first), data=rest))

    with FakeServer(inline) as server, connected(server.address) as connection:
        assert send(connection, exchange(1, b"abc")) == b"abc"
        assert server.seen.hellos[0].inline_bytes > 0
        assert server.seen.hellos[0].message_bytes > 0
        with pytest.raises(BadFrame, match="answer 2: a chunk of 3 bytes at 0"):
            send(connection, exchange(2, b"abc"))
        assert send(connection, exchange(3, b"abcde")) == b"abcde"
        assert send(connection, exchange(4, b"")) == b""


def test_an_answer_that_is_not_believed_is_never_allocated() -> None:
    def huge(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, _ in fake.requests(server, frames):
            yield split_pb2.ServerFrame(reply=split_pb2.ReplyHeader(id=header.id, header=b"H", payload_bytes=1 << 60))

    def check(header: bytes, size: int) -> None:
        if size > 100:
            raise TooLarge(f"{size} bytes")

    with FakeServer(huge) as server, connected(server.address) as connection:
        one = Exchange(
            1, Outgoing("r", b"", b"h", (), 0), until=time.monotonic() + PATIENCE, stamps=Stamps(), check_header=check
        )
        with pytest.raises(TooLarge):
            send(connection, one)


def test_failures_come_back_by_name() -> None:
    with FakeServer(fake.fail("InputMismatch", "expected float32")) as server, connected(server.address) as connection:
        with pytest.raises(InputMismatch, match=f"expected float32 .reported by {server.address}"):
            send(connection, exchange(1, b"x"))
        eventually(lambda: server.seen.acknowledged == [1])
    with (
        FakeServer(fake.fail("KeyError", "what?")) as server,
        connected(server.address) as connection,
        pytest.raises(RemoteError, match="what"),
    ):
        send(connection, exchange(1, b"x"))


def test_a_request_that_was_put_off_goes_again_with_its_cut() -> None:
    script = fake.fail("ServerUnavailable", "busy", retry=True, times=2)
    with FakeServer(script) as server, connected(server.address) as connection:
        one = exchange(9, b"x")
        assert send(connection, one) == b"x"
        assert server.seen.requests == [9, 9, 9] and server.seen.cuts == ["r", "r", "r"]
        assert one.put_offs == 2 and one.breaks == 0


def test_a_request_that_breaks_every_stream_is_given_up() -> None:
    with FakeServer(fake.break_after(2)) as server, connected(server.address, patience=30.0) as connection:
        with pytest.raises(RemoteError, match="broke 5 times .*broken on purpose"):
            send(connection, exchange(1, b"poison", seconds=30))
        assert server.seen.requests == [1] * 5


def test_the_innocent_are_not_given_up_with_the_culprit() -> None:
    def crash_on_two(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for header, payload in fake.requests(server, frames):
            time.sleep(0.02)  # time for the others to be on the stream, too
            if header.id == 2:
                context.abort(grpc.StatusCode.INTERNAL, "crashed")
            yield from fake.reply(header.id, payload)

    with FakeServer(crash_on_two) as server, connected(server.address, max_in_flight=8) as connection:
        waiting = {number: exchange(number, b"%d" % number) for number in range(1, 7)}
        for one in waiting.values():
            connection.submit(one)
        assert all(one.wait() for one in waiting.values())
        assert isinstance(waiting.pop(2).error, RemoteError)
        assert all(one.error is None and bytes(one.payload) == b"%d" % number for number, one in waiting.items())
        assert connection.state is State.READY


def test_no_more_requests_are_in_flight_than_the_server_allows() -> None:
    def hold(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for number, (header, payload) in enumerate(fake.requests(server, frames)):
            time.sleep(0.05)
            outstanding = len(server.seen.requests) - number
            server.seen.most_in_flight = max(server.seen.most_in_flight, outstanding)
            yield from fake.reply(header.id, payload)

    with FakeServer(hold, welcome={"max_in_flight": 2}) as server, connected(server.address) as connection:
        waiting = [exchange(number, b"x") for number in range(1, 9)]
        for one in waiting:
            connection.submit(one)
        assert all(one.wait() and one.error is None for one in waiting)
        assert server.seen.most_in_flight <= 2


def test_a_request_beyond_the_servers_limit_is_refused_here() -> None:
    with FakeServer(welcome={"max_request_bytes": 10}) as server, connected(server.address) as connection:
        for _ in range(2):  # before and after the Welcome
            with pytest.raises(TooLarge, match=r"11 bytes; .* takes 10"):
                send(connection, exchange(1, b"01234567890"))
        assert send(connection, exchange(2, b"0123456789")) == b"0123456789"


def test_a_slow_reader_is_not_fed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between frontier and wire is bounded by flow control, not by the size of the frontier."""
    handed_out = 0

    def counting(frame: wire.ClientFrame) -> bytes:
        nonlocal handed_out
        data = serialize(frame)
        handed_out += len(data)
        return data

    from edge_client.transport import connection as module

    serialize = module.serialize_client_frame
    monkeypatch.setattr(module, "serialize_client_frame", counting)
    payload = bytes(64 * MIB)
    with FakeServer(fake.unread) as server, connected(server.address) as connection:
        one = exchange(1, payload)
        connection.submit(one)
        eventually(lambda: handed_out >= MIB)
        time.sleep(0.5)  # time to be wrong in
        assert handed_out <= 8 * MIB
        connection.cancel(one, Cancelled("enough"))


def test_a_peer_that_stops_is_noticed_by_keep_alive() -> None:
    with FakeServer(fake.echo) as server, Relay(server.port) as relay:
        keep_alive = KeepAlive(every=0.5, timeout=0.5)
        with connected(f"127.0.0.1:{relay.port}", keep_alive=keep_alive) as connection:
            assert send(connection, exchange(1, b"before")) == b"before"
            relay.freeze()
            one = exchange(2, b"after")
            connection.submit(one)
            # without the options of `KeepAlive` it takes a minute
            eventually(lambda: connection.state is not State.READY, "nothing was noticed", PATIENCE / 2)
            relay.thaw()
            assert one.wait() and bytes(one.payload) == b"after"


def test_an_idle_connection_that_breaks_is_opened_again_for_the_next_request() -> None:
    first = FakeServer(port=free_port())
    with connected(first.address) as connection:
        assert send(connection, exchange(1, b"one")) == b"one"
        first.stop(0)
        eventually(lambda: connection.state is State.UNOPENED)
        attempts = connection.counters.attempts
        time.sleep(0.3)
        assert connection.counters.attempts == attempts
        with FakeServer(port=first.port):
            assert send(connection, exchange(2, b"two")) == b"two"


def test_closing_ends_every_wait_before_its_time() -> None:
    with FakeServer(fake.deaf) as server, connected(server.address) as connection:
        one = exchange(1, b"x", seconds=100 * PATIENCE)
        connection.submit(one)
        eventually(lambda: server.seen.requests == [1])
        connection.close()
        assert isinstance(one.error, Cancelled)
        with pytest.raises(Cancelled):
            send(connection, exchange(2, b"x"))
        with pytest.raises(Cancelled):
            connection.open(1.0)
    eventually(lambda: not keepers(server.address))


def test_closing_in_back_off_waits_for_no_attempt() -> None:
    address = f"127.0.0.1:{free_port()}"
    never = Backoff(first=1000.0, ceiling=1000.0)
    connection = Connection(address, hello(), ConnectionOptions(patience=2000.0), never)
    one = exchange(1, b"x", seconds=2000.0)
    connection.submit(one)
    eventually(lambda: connection.state is State.BACKOFF)
    connection.close()
    assert isinstance(one.error, Cancelled)
    eventually(lambda: not keepers(address))
    assert connection.counters.attempts == 1


def test_backoff_grows_within_bounds() -> None:
    backoff = Backoff(first=1.0, factor=2.0, ceiling=5.0, draw=lambda low, high: high)
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next() == 1.0
    assert all(0.2 <= Backoff(first=0.4).next() <= 0.4 for _ in range(50))


@pytest.mark.parametrize(
    "options", [{"chunk_bytes": 1}, {"chunk_bytes": 2 * MIB}, {"max_in_flight": 0}, {"patience": 0}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        ConnectionOptions(**options)
