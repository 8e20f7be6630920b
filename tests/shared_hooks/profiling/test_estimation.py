"""Which cuts are measured, and that an estimate agrees with its neighbours."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.profiling.profile import Quartiles
from shared_hooks.profiling.profiler import SMALLEST, MeasuredCut, between, estimate, pick

cut_lists = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=80).map(
    lambda sizes: [(number - 1, nbytes) for number, nbytes in enumerate(sizes)]
)


@given(cut_lists, st.integers(0, 100))
def test_first_last_and_smallest_are_always_measured(cuts: list[tuple[int, int]], room: int) -> None:
    chosen = pick(cuts, room)
    ids = [layer_id for layer_id, _ in cuts]
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(ids)
    assert {ids[0], ids[-1]} <= set(chosen)
    small = sorted(cuts, key=lambda cut: cut[1])[:SMALLEST]
    assert {layer_id for layer_id, _ in small} <= set(chosen)
    assert len(chosen) <= max(room, SMALLEST + 2)
    if room >= len(cuts):
        assert chosen == ids
    elif room >= SMALLEST + 2:
        assert len(chosen) == room


def test_wanted_cuts_take_the_places_that_are_left_and_no_more() -> None:
    cuts = [(number, 1000 - number) for number in range(100)]
    always = set(pick(cuts, 0))
    few = pick(cuts, 16, {10, 50, 51})
    assert {10, 50, 51} | always <= set(few) and len(few) == 16
    many = pick(cuts, 16, set(range(20, 80)))
    assert set(many) - always <= set(range(20, 80)) and len(many) == 16
    assert pick(cuts, 0, {10}) == sorted(always)


def test_the_rest_is_spread_evenly() -> None:
    chosen = pick([(number, 1000 - number) for number in range(100)], 16)
    assert max(right - left for left, right in pairwise(chosen)) < 15


def stage(median: float) -> Quartiles:
    return Quartiles(median, median * 0.9, median * 1.2, 20)


def known(*ids: int) -> list[MeasuredCut]:
    """A world of straight lines: a layer takes 100 ns, a byte 2 ns to encode."""
    return [
        MeasuredCut(
            number,
            64 * (10 + number),
            64 * (10 + number) + 200,
            {"head": stage(50 + 100 * (number + 1)), "encode": stage(128.0 * (10 + number))},
        )
        for number in ids
    ]


def test_an_estimate_is_exact_where_the_world_is_straight() -> None:
    stages, wire, how = estimate(4, 64 * 14, known(-1, 2, 9), {"head": lambda layer_id: 100.0 * (layer_id + 1)})
    assert abs(stages["head"].median - 550) < 1e-6
    assert abs(stages["encode"].median - 128 * 14) < 1e-6
    assert wire == 64 * 14 + 200
    assert how


def test_an_estimate_says_that_nothing_was_measured_and_keeps_the_spread() -> None:
    stages, _, _ = estimate(4, 64 * 14, known(-1, 9), {"head": lambda layer_id: 100.0 * (layer_id + 1)})
    head = stages["head"]
    assert head.n == 0
    assert abs(head.q1 / head.median - 0.9) < 1e-6
    assert abs(head.q3 / head.median - 1.2) < 1e-6


def test_a_slow_layer_between_two_measured_cuts_lands_in_the_right_place() -> None:
    slow = {"head": lambda layer_id: 100.0 * (layer_id + 1) + (5000 if layer_id >= 5 else 0)}
    ends = known(0, 9)
    ends[1] = MeasuredCut(9, 64 * 19, 64 * 19 + 200, {"head": stage(1050 + 5000), "encode": stage(128.0 * 19)})
    before, _, _ = estimate(4, 64 * 14, ends, slow)
    after, _, _ = estimate(5, 64 * 15, ends, slow)
    assert after["head"].median - before["head"].median > 5000


def test_the_clouds_answer_does_not_depend_on_the_frontier() -> None:
    cut = {"decode": stage(10), "inject": stage(5), "compute": stage(100), "encode": stage(7)}
    pair = [MeasuredCut(0, 10, 20, cut), MeasuredCut(9, 10, 20, {**cut, "encode": stage(9)})]
    stages, _, _ = estimate(3, 1 << 20, pair, {"compute": lambda layer_id: 100.0})
    assert 7 <= stages["encode"].median <= 9


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_between_stays_between(at: float, values: list[float]) -> None:
    points = [(float(number), value) for number, value in enumerate(values)]
    assert min(values) - 1e-6 <= between(at, points) <= max(values) + 1e-6
