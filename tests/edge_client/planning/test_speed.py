"""How fast a link is: near the truth, with an interval that holds it; or it cannot be known, and that is said."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.planning.link import LEAST_ROUNDS, WIDEST, Curve, Link, Speed, mbit, speed_of

SIZES = (0, 1_400, 8_339, 16_410, 16_531, 32_768, 65_536)
GAP = 65_536 - 32_768
MS = 1e6


def probed(noise: list[float], rate: float, rtt_ns: float, count: int) -> dict[int, list[float]]:
    """Rounds of a link of ``rate`` bytes per second; each takes its share of ``noise`` (ns) longer."""
    more = iter(noise)
    return {size: [rtt_ns + size / rate * 1e9 + next(more) for _ in range(count)] for size in SIZES}


@settings(max_examples=50)
@given(
    rate=st.floats(1e4, 2e9),
    rtt_ms=st.floats(0.05, 300.0),
    count=st.integers(LEAST_ROUNDS, 15),
    most_ms=st.floats(0.0, 50.0),
    shares=st.lists(st.floats(0.0, 1.0), min_size=len(SIZES) * 15, max_size=len(SIZES) * 15),
)
def test_with_noise_up_to_a_bound_the_figure_is_as_near_as_that_bound_allows_or_unknown(
    rate: float, rtt_ms: float, count: int, most_ms: float, shares: list[float]
) -> None:
    found = speed_of(probed([share * most_ms * MS for share in shares], rate, rtt_ms * MS, count))
    true, most = GAP / rate * 1e9, most_ms * MS  # of what 32 KiB more really take, a bound on what is wrong with it
    slack = 1e-6 * (true + most + rtt_ms * MS)  # floats
    if found.value is not None:
        assert true - most - slack <= GAP / found.value * 1e9 <= true + most + slack
        assert found.low is not None and found.high is not None
        assert found.low <= found.value <= found.high <= WIDEST * found.low * (1 + 1e-9)
    else:
        assert found.why
        assert most > 0.5 * true - slack  # noise of less than half of the bytes' time never hides it
    if found.low is not None:
        assert GAP / found.low * 1e9 <= true + most + slack


@pytest.mark.parametrize("outliers", [0.0, 0.1])
@pytest.mark.parametrize("count", [3, 7, 15])
def test_the_interval_holds_the_truth_nineteen_times_of_twenty_whatever_the_link(count: int, outliers: float) -> None:
    dice = random.Random(count)
    held = reported = near = untold = 0
    for _ in range(200):
        rate, rtt = 10 ** dice.uniform(4, 9), 10 ** dice.uniform(-1, 2) * MS
        scale = 10 ** dice.uniform(-3, 0.5)
        rounds = {
            size: [
                (rtt + size / rate * 1e9)
                * dice.lognormvariate(0, 0.05)
                * (dice.uniform(2, 20) if dice.random() < outliers else 1)
                + dice.expovariate(1) * scale * MS
                for _ in range(count)
            ]
            for size in SIZES
        }
        found = speed_of(rounds)
        if found.value is None:
            untold += 1
            continue
        assert found.low is not None and found.high is not None
        reported += 1
        held += found.low <= rate <= found.high
        near += rate / 2 <= found.value <= rate * 2
    assert reported > 50 and untold > 20
    assert held / reported > (0.85 if count == LEAST_ROUNDS else 0.92)
    assert near / reported > (0.93 if count == LEAST_ROUNDS else 0.97)


def test_burst_of_a_token_bucket_is_not_the_rate() -> None:
    """A bucket of half of the largest round: the rate is what the rest takes."""
    rate, bucket = 125_000.0, 32_768
    rounds = {size: [20 * MS + max(0, size - bucket) / rate * 1e9] * 5 for size in SIZES}
    assert speed_of(rounds).value == pytest.approx(rate)


def test_sizes_that_hardly_differ_decide_nothing() -> None:
    """As it was seen: 16,410 and 16,531 bytes, and noise, gave 0.1 to 0.9 Mbit/s on loopback."""
    curve = Curve(((0, 0.4 * MS), (8_265, 0.6 * MS), (16_410, 0.7 * MS), (16_531, 2.0 * MS)))
    assert curve.bytes_per_second * 8 > 40e6
    assert curve.ns(64 << 10) < 12 * MS


def test_no_rounds_and_few_rounds_tell_nothing() -> None:
    assert speed_of({}).why == "no bytes were sent"
    assert speed_of({0: [1.0] * 9}).why == "no bytes were sent"
    assert "2 rounds" in speed_of({0: [1.0] * 9, 1000: [5.0, 6.0]}).why
    flat = speed_of({0: [5.0] * 9, 1000: [5.0] * 9})
    assert flat.value is None and flat.low is None and "no more time" in flat.why


def test_people_read_the_figure_its_spread_or_a_bound() -> None:
    assert str(Speed(5e6, 4.5e6, 5.6e6)) == "40 Mbit/s (36 Mbit/s to 44.8 Mbit/s)"
    assert str(Speed.exactly(625_000)) == "5 Mbit/s"
    assert str(Speed(None, 1e8, None, "noise")) == "at least 800 Mbit/s; cannot be known more closely: noise"
    assert str(Speed(None, None, None, "noise")) == "cannot be known: noise"
    assert [mbit(value) for value in (None, 1e3, 1e6, 1e9)] == ["-", "8 kbit/s", "8 Mbit/s", "8 Gbit/s"]


def test_json_says_null_and_why_where_it_is_not_known() -> None:
    link = Link(Curve(((0, 1e6),)), Curve.line(0, 1e6), measured_up=Speed(None, 2e6, None, "noise"))
    reported = json.loads(json.dumps(link.as_dict(), allow_nan=False))
    assert (reported["up_bytes_per_second"], reported["up_bytes_per_second_low"]) == (None, 2e6)
    assert reported["up_bytes_per_second_note"] == "noise"
    assert reported["down_bytes_per_second"] == pytest.approx(1e6)
