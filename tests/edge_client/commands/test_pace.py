"""How long requests took: the first apart, latency one at a time, throughput besides with several under way."""

from __future__ import annotations

import pytest

from edge_client.commands.feed import RunRate
from edge_client.screen import number


def paced(*latencies_ms: int, in_flight: int = 1, warmup: int = 0) -> RunRate:
    """One answer a tenth of a second, from 10 s on."""
    times = iter([*([9.0, 9.9] if warmup else []), *(10 + 0.1 * at for at in range(len(latencies_ms)))])
    pace = RunRate(in_flight, warmup, clock=lambda: next(times))
    pace.start()
    for latency in latencies_ms:
        pace.add(latency * 1_000_000)
    return pace


def test_first_answer_is_in_no_figure() -> None:
    pace = paced(500, 10, 20, 30)
    assert pace.lines() == [
        "first request 500.000 ms; it makes plans and caches, and is left out below",
        "latency: median 20.000 ms, 90 % within 30.000 ms (3 requests, one at a time)",
    ]
    assert pace.per_second == pytest.approx(10)


def test_no_answer_is_excluded_after_a_warm_up() -> None:
    pace = paced(10, 20, warmup=3)
    assert pace.lines() == ["latency: median 10.000 ms, 90 % within 20.000 ms (2 requests, one at a time)"]
    assert pace.as_dict()["first_ns"] is None and pace.per_second == pytest.approx(10)  # since 9.9


def test_several_in_flight_show_both() -> None:
    latency, throughput = paced(500, 10, 20, 30, in_flight=4).lines()[1:]
    assert latency.endswith("(3 requests, up to 4 in flight)")
    assert throughput == "throughput: 10.0 requests a second with up to 4 in flight"


def test_one_alone_and_none() -> None:
    assert paced(500).lines() == ["first request 500.000 ms"]
    assert paced().lines() == [] and paced().as_dict()["per_second"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.455e-17, "0"),
        (0.0, "0"),
        (-2.5, "-2.5"),
        (0.00012345, "0.0001234"),
        (3.14159, "3.142"),
        (1.2e8, "120000000"),
        (float("inf"), "without limit"),
        (float("nan"), "none"),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert number(value) == text
