"""The rows of a request's time add up to what was measured, whatever the server says and however often it was sent."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.transport.times import ServerTimes, Stamps, Times

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
    st.lists(st.integers(0, 10**10), min_size=6, max_size=6),
    st.sets(st.sampled_from(["prepared", "first_sent", "last_sent"])),
    st.integers(0, 10**10),
)
def test_the_sum_is_exact(steps: list[int], server: list[int], missing: set[str], head: int) -> None:
    at, readings = 0, []
    for step in steps:
        at += step
        readings.append(at)
    one = Stamps(*readings, head_ns=head)
    for name in missing:
        setattr(one, name, None)
    times = Times.from_stamps(one, ServerTimes(*server))
    assert times.end_to_end == readings[-1] - readings[0]
    assert all(value >= 0 or label.startswith("in transit") for label, value in times.rows())
    assert times.server == sum(server[:5])


def test_rows_have_names_and_totals_add_up() -> None:
    times = Times.from_stamps(stamps(), SERVER)
    labels = [row.metadata["label"] for row in fields(Times)]
    assert [label for label, _ in times.rows()] == [label for label in labels if label != "edge earlier attempt"]
    assert [label for label, _ in Times(retry=1).rows()] == labels
    assert Times.total([times, times]).end_to_end == 2 * times.end_to_end
    assert times.as_dict()["end_to_end"] == 2_100
    assert Times.total([]) == Times()
