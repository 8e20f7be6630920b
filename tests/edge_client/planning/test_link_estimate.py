"""Sizes tell goodput and round trip apart; a burst that a bucket lets through is not believed; a change is."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_client.planning.link import Curve, Link, LinkEstimate, Tracker
from tests.edge_client.planning.made import MS


def estimate(mbit: float = 10.0, rtt_ms: float = 10.0) -> LinkEstimate:
    return LinkEstimate(Link(Curve.line(rtt_ms * MS, mbit * 125_000), Curve.line(0, 125e6)), 200_000)


def test_large_transfers_tell_the_goodput() -> None:
    one = estimate()
    for _ in range(4):
        one.observe(200_000, 500, 10 * MS + 200_000 / 250_000 * 1e9)  # 2 Mbit/s
    assert one.goodput()[0] == pytest.approx(250_000, rel=0.1)
    assert one.rtt_ns == pytest.approx(10 * MS, rel=0.1)


def test_where_no_candidate_sends_anything_there_is_a_goodput_all_the_same() -> None:
    assert min(LinkEstimate(Link(Curve.line(1 * MS, 125_000), Curve.line(0, 125e6)), 0).goodput()) > 0


def test_small_transfers_tell_the_round_trip() -> None:
    one = estimate()
    for _ in range(4):
        one.observe(100, 100, 40 * MS)
    assert one.rtt_ns == pytest.approx(40 * MS, rel=0.1)
    assert one.goodput()[0] == pytest.approx(1_250_000, rel=0.01)


def test_a_burst_is_a_doubt_and_no_goodput() -> None:
    one = estimate(mbit=1)
    for _ in range(10):
        one.observe(10_000, 100, 10.5 * MS)
    assert one.doubtful
    assert one.goodput()[0] == pytest.approx(125_000, rel=0.1)


def test_a_bound_makes_way_for_what_is_then_seen() -> None:
    one = estimate(mbit=100)
    one.bound(200_000, 0, 500 * MS)
    assert one.goodput()[0] < 410_000
    one.observe(200_000, 500, 10 * MS + 200_000 / 125_000 * 1e9)
    assert one.goodput()[0] == pytest.approx(125_000, rel=0.1)
    one.bound(200_000, 0, 1 * MS)  # nothing new
    assert one.goodput()[0] == pytest.approx(125_000, rel=0.1)


def test_a_probe_that_waited_behind_other_bytes_is_asked_again() -> None:
    one = estimate(mbit=1)
    waited = Link(Curve(((0, 250 * MS), (16_384, 250 * MS), (32_768, 261 * MS))), Curve(((0, 0.0),)))
    assert not one.replace(waited)
    assert one.doubtful and one.rtt_ns == pytest.approx(10 * MS, rel=0.1)
    one.replace(waited)
    assert not one.doubtful


def test_a_probe_behind_a_bucket_counts_its_last_piece() -> None:
    one = estimate(mbit=100)
    one.replace(Link(Curve(((0, 10 * MS), (16_384, 10 * MS), (32_768, 141 * MS))), Curve(((0, 0.0),))))
    assert one.goodput()[0] == pytest.approx(125_000, rel=0.05)


@example(226.0, 5.0, 44)  # small transfers between kept the large ones from ever being believed
@given(st.floats(0.5, 500), st.floats(0.5, 100), st.integers(0, 1000))
def test_it_finds_any_link_from_transfers_of_two_sizes(mbit: float, rtt_ms: float, seed: int) -> None:
    one, draw = estimate(), random.Random(seed)
    truth = estimate(mbit, rtt_ms)
    for _ in range(60):
        for nbytes in (200_000, 100):
            one.observe(nbytes, 100, truth.ns(nbytes, 100) * draw.lognormvariate(0, 0.05))
    for nbytes in (200_000, 100):
        assert one.ns(nbytes, 100) == pytest.approx(truth.ns(nbytes, 100), rel=0.35)


def test_a_tracker_ignores_one_outlier_and_believes_two() -> None:
    one = Tracker(100.0)
    assert not one.observe(1000.0)
    assert one.value == pytest.approx(100.0)
    assert not one.observe(100.0)
    assert not one.observe(1000.0)
    assert one.observe(1100.0)
    assert one.value == pytest.approx(1050, rel=0.01)


@given(st.floats(1e-3, 1e9), st.lists(st.floats(0, 1e10), max_size=30))
def test_a_tracker_stays_within_what_it_has_seen(first: float, seen: list[float]) -> None:
    one = Tracker(first, offset=1.0)
    for value in seen:
        one.observe(value)
    assert min([first, *seen]) * 0.999 - 1e-6 <= one.value <= max([first, *seen]) * 1.001 + 1e-6
