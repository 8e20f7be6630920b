"""The rows of a request's time add up to what was measured, whatever the server says and however often it was sent."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.transport.times import DRIFT, ServerClock, ServerTimes, Stamps, Times

SERVER = ServerTimes(queue=10, decode=20, inject=30, compute=400, encode=40, receive=90)


def stamps() -> Stamps:
    return Stamps(
        called=1_000,
        prepared=1_100,
        admitted=1_150,
        computed=2_150,
        packed=2_200,
        first_sent=2_230,
        last_sent=2_300,
        replied=3_000,
        received=3_050,
        taken=3_060,
        unpacked=3_100,
        head_ns=900,
    )


def test_every_row_is_what_its_name_says() -> None:
    times = Times.from_stamps(stamps(), SERVER)
    assert times == Times(
        prepare=100,
        wait=50,
        edge_other=100,
        edge_compute=900,
        encode=50,
        send_wait=30,
        upload=90,  # the server saw the transfer longer than the edge did
        in_transit=3_050 - 2_200 - 500 - 30 - 90 - 50,
        server_queue=10,
        server_decode=20,
        server_inject=30,
        server_compute=400,
        server_encode=40,
        download=50,
        turn=10,
        edge_decode=40,
    )
    assert times.end_to_end == 2_100
    assert times.network == times.upload + times.in_transit + times.download
    assert times.server == 500


def test_upload_is_the_longer_view() -> None:
    one = stamps()
    one.last_sent = 2_400
    assert Times.from_stamps(one, SERVER).upload == 170


def test_a_second_attempt_has_a_row_of_its_own() -> None:
    one = stamps()
    one.retry_ns = 40
    times = Times.from_stamps(one, SERVER)
    assert (times.retry, times.wait, times.end_to_end) == (40, 10, 2_100)


def test_an_answer_from_memory_counts_no_time_twice() -> None:
    """The server had computed before the sending that it answered: upload and waiting give way, the sum holds."""
    one = stamps()
    one.first_sent, one.last_sent, one.replied = 2_990, 3_000, 3_001
    times = Times.from_stamps(one, SERVER)
    assert times.end_to_end == 2_100
    assert min(value for _, value in times.rows()) >= 0


def test_a_server_that_claims_too_much_shows_as_a_negative_remainder() -> None:
    times = Times.from_stamps(stamps(), ServerTimes(compute=10_000))
    assert times.in_transit < 0 and times.upload == times.download == times.send_wait == 0
    assert times.end_to_end == 2_100


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 10**10), min_size=11, max_size=11),
    st.lists(st.integers(0, 10**10), min_size=7, max_size=7),
    st.sets(st.sampled_from(["prepared", "first_sent", "last_sent"])),
    st.integers(0, 10**10),
    st.none() | st.tuples(st.integers(-(10**19), 10**19), st.integers(0, 10**9)),
)
def test_the_sum_is_exact(
    steps: list[int], server: list[int], missing: set[str], head: int, clock: tuple[int, int] | None
) -> None:
    at, readings = 0, []
    for step in steps:
        at += step
        readings.append(at)
    one = Stamps(*readings, head_ns=head, clock=clock)
    for name in missing:
        setattr(one, name, None)
    times = Times.from_stamps(one, ServerTimes(*server))
    assert times.end_to_end == readings[-1] - readings[0]
    assert all(value >= 0 or label.startswith("in transit") for label, value in times.rows())
    assert times.server == sum(server[:5])


def test_upload_is_from_the_first_byte_here_to_the_last_one_there() -> None:
    """Whatever the transport took at once: the server's clock, which is 5,000 ahead, says when the bytes were there."""
    one = stamps()
    one.clock = (-5_000, 7)
    assert one.packed is not None and one.received is not None and one.first_sent is not None
    budget = one.received - one.packed - SERVER.total
    arrived = one.first_sent + 120
    times = Times.from_stamps(one, replace(SERVER, complete=arrived + 5_000))
    assert times.upload == arrived - max(one.first_sent, one.packed) and times.clock_error == 7
    assert times.send_wait + times.upload + times.download + times.in_transit == budget
    assert times.as_dict()["clock_error"] == 7 and Times.total([times, times]).clock_error == 14


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(1, 10**8), st.integers(1, 10**8), st.integers(0, 10**9)), min_size=1, max_size=30),
    st.floats(-DRIFT / 2, DRIFT / 2),
)
def test_the_servers_clock_is_where_it_is_said_to_be(
    offset: int, trips: list[tuple[int, int, int]], drift: float
) -> None:
    """However unlike both ways of a round trip are, and though one clock runs faster."""
    clock, now = ServerClock(), 10**12
    assert clock.offset(now) is None
    for up, down, pause in trips:
        number = clock.ping(now)
        read = now + up
        clock.pong(number, round(read - offset + drift * (read - 10**12)), read + down)
        now = read + down + pause
        known = clock.offset(now)
        assert known is not None
        there = now - offset + drift * (now - 10**12)
        assert abs(there + known[0] - now) <= known[1] + 2


def test_an_answer_to_another_ping_says_nothing() -> None:
    clock = ServerClock()
    assert clock.wants(0)
    number = clock.ping(0)
    assert not clock.wants(1)
    clock.pong(number + 1, 5, 10)
    clock.pong(number - 1, 5, 10)
    assert clock.offset(10) is None
    clock.pong(number, 5, 10)
    clock.pong(number, 10**9, 11)
    assert clock.offset(10) == (0, 5)
    assert clock.wants(10)


def test_rows_have_names_and_totals_add_up() -> None:
    times = Times.from_stamps(stamps(), SERVER)
    labels = [row.metadata["label"] for row in fields(Times) if "label" in row.metadata]
    rare = ("edge earlier attempt", "next servers and their links")
    assert [label for label, _ in times.rows()] == [label for label in labels if label not in rare]
    assert [label for label, _ in Times(retry=1, onward=1).rows()] == labels
    assert Times.total([times, times]).end_to_end == 2 * times.end_to_end
    assert times.as_dict()["end_to_end"] == 2_100
    assert Times.total([]) == Times()
