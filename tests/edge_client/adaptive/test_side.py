"""What a part of the model says of its side: much where it is most of the model, little where it is hardly any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.adaptive.controller import UNTOLD_SHARE, Side

WHOLE = 50e6
PARTS = {"whole": WHOLE, "half": WHOLE / 2, "tiny": 0.1e6}


def reported(part: str, times: float, often: int = 50) -> float:
    side = Side(WHOLE, PARTS)
    for _ in range(often):
        side.observe(part, times * PARTS[part])
    return side.factor


@pytest.mark.parametrize("times", [0.3, 5.0])
def test_a_tiny_part_says_nothing_of_the_whole_model(times: float) -> None:
    assert reported("tiny", times) == 1.0


def test_a_tiny_part_that_takes_as_long_as_much_of_the_model_does() -> None:
    assert reported("tiny", 100.0) > 3


@given(times=st.floats(0.2, 20))
def test_the_whole_model_says_how_slow_it_is(times: float) -> None:
    assert reported("whole", times) == pytest.approx(times, rel=0.01)


@given(times=st.floats(0.2, 20))
def test_half_the_model_says_it_nearly(times: float) -> None:
    assert reported("half", times) == pytest.approx(times, abs=1.01 * UNTOLD_SHARE * max(1.0, times))


def test_a_tiny_part_as_quick_as_ever_ends_what_was_slow() -> None:
    side = Side(WHOLE, PARTS)
    for _ in range(5):
        side.observe("whole", 5 * WHOLE)
    assert side.factor == pytest.approx(5, rel=0.01)
    for _ in range(5):
        side.observe("tiny", PARTS["tiny"])
    assert side.factor == pytest.approx(1, rel=0.01)


def test_unprofiled_side_gives_no_estimate() -> None:
    side = Side(0.0, {"nothing": 0.0})
    assert not side.observe("unknown", 1e9) and not side.observe("nothing", 1e9)
    assert side.factor == 1.0 and side.expected_ns("unknown") == 0.0


def test_two_equal_outliers_are_a_change() -> None:
    side = Side(WHOLE, PARTS)
    assert not side.observe("whole", 3 * WHOLE)
    assert side.observe("whole", 3 * WHOLE)
    assert side.expected_ns("half") == pytest.approx(1.5 * WHOLE)
