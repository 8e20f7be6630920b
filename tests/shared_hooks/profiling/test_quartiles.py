"""Summaries of repeated measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.profiling.profile import Quartiles, middle_half

NUMBERS = st.lists(st.floats(0, 1e12), min_size=1, max_size=50)


@given(NUMBERS)
def test_the_middle_is_within_the_measurements_and_survives_the_file(values: list[float]) -> None:
    found = Quartiles.of(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.middle <= max(values) + slack
    assert Quartiles.from_dict(found.as_dict()) == found


def test_one_wild_measurement_moves_neither_median_nor_middle() -> None:
    assert Quartiles.of([1, 2, 3, 4, 5, 6, 7, 1e9]).middle == Quartiles.of([1, 2, 3, 4, 5, 6, 7, 8]).middle == 4.5


def test_a_middle_that_is_not_given_is_the_median() -> None:
    assert Quartiles(3.0, 2.0, 5.0, 4).middle == 3.0


@given(NUMBERS)
def test_as_much_is_left_out_at_either_end(values: list[float]) -> None:
    left = middle_half(sorted(values))
    assert len(values) - len(left) == 2 * (len(values) // 4)


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        Quartiles.of([])
