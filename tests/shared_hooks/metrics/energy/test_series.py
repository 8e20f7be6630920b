"""What samples say about an interval: measured, estimated, or nothing; never more than they know."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.metrics.sampler import LENGTH, REACH_NS, Series, SeriesNotes, Track

MS = 1_000_000


def series(*samples: tuple[float, float], period_ms: int = 20) -> Series:
    """Samples at so many milliseconds."""
    made = Series("meter", period_ms * MS)
    for at, value in samples:
        made.append(round(at * MS), value)
    return made


def steady(count: int = 50, watts: float = 5.0) -> Series:
    return series(*((20 * i, watts * 0.02 * i) for i in range(count)))


def test_a_long_interval_inside_the_samples_is_measured() -> None:
    track = steady().since(0)
    reading = track.growth(100 * MS, 300 * MS)
    assert (reading.status, reading.note) == ("measured", "meter, sampled every 20 ms")
    assert reading.value == pytest.approx(1.0)


def test_a_short_interval_gets_its_share_by_time() -> None:
    reading = steady().since(0).growth(100 * MS, 101 * MS)
    assert (reading.status, reading.note) == ("estimated", "share by time of 20 ms samples of meter")
    assert reading.value == pytest.approx(0.005)


def test_an_interval_that_the_samples_do_not_enclose_is_an_estimate() -> None:
    track = steady().since(0)
    last = track.times[-1]
    assert track.growth(last - 100 * MS, last + 5 * MS).status == "estimated"
    assert track.growth(-5 * MS, 100 * MS).status == "estimated"
    assert track.growth(last - 100 * MS, last + 5 * MS).value == pytest.approx(0.525)


def test_a_late_sample_makes_an_estimate_of_what_it_missed() -> None:
    track = series((0, 0), (20, 1), (120, 9), (140, 10), (160, 11), (180, 12)).since(0)
    assert track.growth(10 * MS, 70 * MS).status == "estimated"
    assert track.growth(125 * MS, 170 * MS).status == "measured"


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_samples_are_no_energy(count: int) -> None:
    reading = steady(count).since(0).growth(0, 100 * MS)
    assert (reading.value, reading.status, reading.note) == (None, "unavailable", "too few samples yet of meter")


def test_samples_of_another_time_say_nothing() -> None:
    track = steady().since(0)
    after = track.times[-1] + REACH_NS
    for start, stop in ((after, after + MS), (-REACH_NS - 5 * MS, -REACH_NS - MS)):
        assert track.growth(start, stop).note == "no samples at that time of meter"
        assert track.mean(start, stop).status == "unavailable"
        assert track.end(start, stop).status == track.peak(start, stop).status == "unavailable"


def test_a_level_is_the_mean_over_time_and_the_end_and_the_peak() -> None:
    track = series((0, 10), (20, 20), (40, 80), (60, 30), (80, 40)).since(0)
    # 20 until 20 ms, 80 until 40 ms, 30 until 60 ms
    reading = track.mean(10 * MS, 60 * MS)
    assert (reading.value, reading.status) == (pytest.approx((10 * 20 + 20 * 80 + 20 * 30) / 50), "measured")
    assert track.end(10 * MS, 60 * MS).value == 30
    assert track.peak(10 * MS, 60 * MS).value == 80
    assert track.mean(41 * MS, 42 * MS).value == 30
    assert track.mean(41 * MS, 42 * MS).status == "estimated"
    assert track.mean(41 * MS, 42 * MS) is track.mean(43 * MS, 44 * MS)


def test_after_the_last_sample_the_last_level_holds() -> None:
    track = series((0, 10), (20, 20)).since(0)
    reading = track.mean(30 * MS, 100 * MS)
    assert (reading.value, reading.status) == (20, "estimated")
    assert track.peak(30 * MS, 100 * MS).value == 20


def test_a_series_is_bounded_and_gives_what_is_needed() -> None:
    made = steady(LENGTH + 100)
    assert len(made) == LENGTH
    end = (LENGTH + 99) * 20 * MS
    assert len(made.since(end - 100 * MS).times) == 7  # five after, one at, one before it
    made.clear()
    assert made.since(0).times == []


@given(
    gaps=st.lists(st.integers(1, 10**9), min_size=2, max_size=30),
    steps=st.lists(st.floats(0, 1e6), min_size=30, max_size=30),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_neighbouring_intervals_add_up(gaps: list[int], steps: list[float], cuts: list[float]) -> None:
    made, at, value = Series("meter", 20 * MS), 0, 0.0
    for gap, step in zip(gaps, steps, strict=False):
        made.append(at, value)
        at, value = at + gap, value + step
    track = made.since(0)
    edges = sorted({0, track.times[-1], *(round(cut * track.times[-1]) for cut in cuts)})
    parts = [track.growth(a, b) for a, b in itertools.pairwise(edges)]
    whole = track.growth(edges[0], edges[-1])
    assert sum(part.value or 0.0 for part in parts) == pytest.approx(whole.value or 0.0, rel=1e-6, abs=1e-6)
    assert all(part.value is not None and part.value >= 0 for part in parts)


class Thorough(Track):
    """Works every interval out by itself."""

    def _gap(self, start: int, stop: int) -> int:
        return 0


@given(
    gaps=st.lists(st.integers(1, 100 * MS), min_size=0, max_size=8),
    levels=st.lists(st.integers(0, 5), min_size=9, max_size=9),
    start=st.integers(-3 * REACH_NS // 2, 3 * REACH_NS),
    length=st.integers(0, 100 * MS),
)
def test_shared_interval_equals_separate_ones(gaps: list[int], levels: list[int], start: int, length: int) -> None:
    times = list(itertools.accumulate(gaps))
    values = [float(level) for level in levels[: len(times)]]
    words = SeriesNotes.of("meter", 20 * MS)
    quick, thorough = Track(words, 20 * MS, times, values), Thorough(words, 20 * MS, times, values)
    on_samples = times[:3]
    for begin in (start, start % (200 * MS), *on_samples, *(at - length for at in on_samples)):
        for ask in (Track.mean, Track.end, Track.peak):
            assert ask(quick, begin, begin + length) == ask(thorough, begin, begin + length)
