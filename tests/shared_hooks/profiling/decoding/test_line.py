"""A line through measured numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.profiling.decoding import LineFit

NUMBERS = st.floats(0, 1e9)


@given(fixed=st.floats(1, 1e9), slope=st.floats(0, 1e6))
def test_points_on_a_line_give_that_line(fixed: float, slope: float) -> None:
    found = LineFit.fit([(x, fixed + slope * x) for x in (16, 128, 512)])
    for x in (1, 100, 600):
        assert found.at(x) == pytest.approx(fixed + slope * x, rel=1e-3)


@given(points=st.lists(st.tuples(st.integers(1, 10_000), NUMBERS), min_size=1, max_size=6))
def test_nothing_is_ever_predicted_to_take_less_than_nothing(points: list[tuple[float, float]]) -> None:
    found = LineFit.fit(points)
    assert found.fixed >= 0 and found.slope >= 0


@given(length=st.integers(1, 10_000), value=NUMBERS)
def test_one_length_gives_its_number_at_all(length: int, value: float) -> None:
    assert LineFit.fit([(length, value)]).at(5) == pytest.approx(value)


def test_small_numbers_are_met_as_closely_as_large_ones() -> None:
    found = LineFit.fit([(10, 11.0), (100, 90.0), (1000, 1300.0)])
    for x, y in ((10, 11.0), (100, 90.0), (1000, 1300.0)):
        assert found.at(x) == pytest.approx(y, rel=0.25)


def test_lines_add_up() -> None:
    assert LineFit.total([LineFit(1, 2), LineFit(3, 4)]) == LineFit(4, 6)
    assert LineFit(3, 4) - LineFit(1, 2) == LineFit(2, 2)
    assert LineFit(3, 4).times(2).at(1) == 14


def test_a_line_through_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        LineFit.fit([])
