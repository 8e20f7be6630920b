"""Bounds of shares and means, against scipy's distributions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from edge_client.calibrating import inputs


@given(st.integers(1, 20_000), st.data(), st.sampled_from([0.9, 0.95, 0.99]))
def test_a_share_has_the_exact_bounds(n: int, data: st.DataObject, confidence: float) -> None:
    hits = data.draw(st.integers(0, n))
    low, high = inputs.share(hits, n, confidence)
    assert low == pytest.approx(stats.beta.ppf(1 - confidence, hits, n - hits + 1) if hits else 0, rel=1e-6, abs=1e-12)
    assert high == pytest.approx(stats.beta.ppf(confidence, hits + 1, n - hits) if hits < n else 1, rel=1e-6, abs=1e-12)


@given(st.sampled_from([0.9, 0.95, 0.99]), st.integers(1, 5000))
def test_the_quantile_of_student(confidence: float, freedom: int) -> None:
    assert inputs.student(confidence, freedom) == pytest.approx(stats.t.ppf(confidence, freedom), rel=1e-6)


@given(st.floats(0.0005, 0.5))
def test_as_many_inputs_as_are_said_to_be_needed_show_a_loss_and_one_less_does_not(loss: float) -> None:
    n = inputs.needed(loss)
    assert inputs.share(0, n)[1] <= loss * (1 + 1e-6)
    assert n == 1 or inputs.share(0, n - 1)[1] > loss * (1 - 1e-6)
    assert n == pytest.approx(3 / loss, rel=0.35, abs=1)


def test_student_interval_needs_enough_values() -> None:
    assert inputs.mean(9, 0.0, 0.0) == (-math.inf, math.inf)
    values = [0.1 * number for number in range(20)]
    low, high = inputs.mean(20, sum(values), sum(one * one for one in values))
    mine = stats.t.interval(0.9, 19, loc=sum(values) / 20, scale=stats.sem(values))
    assert (low, high) == pytest.approx(mine)
    assert inputs.share(0, 0) == (0.0, 1.0)
