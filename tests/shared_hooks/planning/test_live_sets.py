"""Sets of storage elements and frontiers, against the plainest thing that does the same: one truth value an element."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_hooks.planning.cutting import Liveness
from shared_hooks.tensors import views
from shared_hooks.tensors.views import LiveSet, View

ELEMENTS = 48


def elements_of(view: View) -> set[int]:
    """By the definition of a strided view."""
    found = {view.offset}
    for size, step in zip(view.shape, view.stride, strict=True):
        found = {start + place * step for start in found for place in range(size)}
    return found


def held(live: LiveSet) -> set[int]:
    """The elements of a set, which no two of its pieces may share."""
    found: set[int] = set()
    for piece in live.pieces:
        own = elements_of(piece)
        assert len(own) == piece.numel and not own & found
        found |= own
    assert live.sent == len(found)
    return found


@st.composite
def strided(draw: st.DrawFn) -> View:
    """Any view of `ELEMENTS` elements: gaps, windows that overlap, broadcasting, dimensions in any order."""
    offset = draw(st.integers(0, ELEMENTS - 1))
    left = ELEMENTS - 1 - offset
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 16))
        size = draw(st.integers(1, min(6, left // step + 1) if step else 3))
        left -= (size - 1) * step
        dims.append((size, step))
    return View(tuple(size for size, _ in dims), tuple(step for _, step in dims), offset)


@st.composite
def sliced(draw: st.DrawFn) -> View:
    """What slices and transpositions of one (2, 4, 6) tensor select."""
    dims, offset = [], 0
    for size, step in ((2, 24), (4, 6), (6, 1)):
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        skip = draw(st.integers(1, 2))
        dims.append((-(-(stop - start) // skip), step * skip))
        offset += start * step
    dims = draw(st.permutations(dims))
    return View(tuple(size for size, _ in dims), tuple(step for _, step in dims), offset)


changes = st.lists(st.tuples(st.sampled_from(["add", "remove", "join"]), st.one_of(strided(), sliced())), max_size=12)


@given(changes, st.booleans())
@settings(deadline=None, max_examples=400)
def test_a_set_is_what_was_added_and_not_removed(steps: list[tuple[str, View]], from_full: bool) -> None:
    live = LiveSet.full(ELEMENTS) if from_full else LiveSet.empty(ELEMENTS)
    expected = set(range(ELEMENTS)) if from_full else set()
    other, others = LiveSet.empty(ELEMENTS), set()
    for what, view in steps:
        before = held(live)
        if what == "add":
            changed, expected = live.add(view), expected | elements_of(view)
        elif what == "remove":
            changed, expected = live.remove(view), expected - elements_of(view)
        else:
            other, others = other.add(view), others | elements_of(view)
            changed, expected = live.join(other), expected | others
        assert held(live) == before, "sets do not change"
        live = changed
        assert held(live) == expected and bool(live) == bool(expected)


@given(changes)
@settings(deadline=None, max_examples=150)
def test_the_same_in_runs(steps: list[tuple[str, View]]) -> None:
    before, views.MAX_BOXES = views.MAX_BOXES, 1
    try:
        test_a_set_is_what_was_added_and_not_removed.hypothesis.inner_test(steps, False)  # type: ignore[attr-defined]
    finally:
        views.MAX_BOXES = before


@given(changes)
@settings(deadline=None, max_examples=150)
def test_where_runs_are_too_many_a_set_is_only_widened(steps: list[tuple[str, View]]) -> None:
    before, views.MOST, boxes, views.MAX_BOXES = views.MOST, 3, views.MAX_BOXES, 1
    try:
        live, expected = LiveSet.empty(ELEMENTS), set()
        for what, view in steps:
            live = live.remove(view) if what == "remove" else live.add(view)
            expected = expected - elements_of(view) if what == "remove" else expected | elements_of(view)
            assert held(live) >= expected
    finally:
        views.MOST, views.MAX_BOXES = before, boxes


class TestPieces:
    def test_views_that_were_read_stay_as_they_are(self) -> None:
        rows = torch.empty(8, 12)
        live = LiveSet.empty(96).add(View.of(rows[:, 2:4])).add(View.of(rows[::2, 7:9]))
        assert live.pieces == (View((8, 2), (12, 1), 2), View((4, 2), (24, 1), 7))

    def test_a_transposed_view_without_gaps_is_one_run(self) -> None:
        assert LiveSet.empty(24).add(View.of(torch.empty(4, 6).t()[:, :2])).pieces == (View((12,), (1,), 0),)

    def test_steps_of_a_loop_are_one_piece(self) -> None:
        x = torch.empty(32, 600, 64)
        live = LiveSet.empty(x.numel())
        for step in reversed(range(100, 600)):
            live = live.add(View.of(x[:, step]))
        assert live.pieces == (View((32, 500 * 64), (600 * 64, 1), 100 * 64),)

    def test_more_runs_than_are_kept_are_spanned(self) -> None:
        # strides of 2 and 3 have no grid in common
        live = LiveSet.empty(100_000).add(View((30_000,), (2,), 0)).add(View((30_000,), (3,), 1))
        assert live.pieces == (View((89_999,), (1,), 0),)


def test_tiles_of_a_large_tensor_take_no_time() -> None:
    """Each set is a few boxes; a mask of elements would be 12 million bytes, for each of 484 tiles."""
    whole = torch.empty(1, 3, 2048, 2048, device="meta")
    tiles = [View.of(whole[:, :, i : i + 96, j : j + 96]) for i in range(0, 2048, 96) for j in range(0, 2048, 96)]
    halos = [
        View.of(whole[:, :, max(0, i - 1) : i + 97, max(0, j - 1) : j + 97])
        for i in range(0, 2048, 96)
        for j in range(0, 2048, 96)
    ]
    started = time.process_time()
    live, read = LiveSet.full(whole.numel()), LiveSet.empty(whole.numel())
    for tile, halo in zip(reversed(tiles), reversed(halos), strict=True):
        live, read = live.remove(tile), read.add(halo)
        assert len(live.boxes) < 8 and len(read.boxes) < 8
    assert not live and read.is_full
    assert time.process_time() - started < 2


@pytest.mark.parametrize("first", ["first", "last", "random"])
def test_cuts_may_be_asked_for_in_any_order(first: str) -> None:
    from shared_hooks import WrappedModel
    from tests.zoo import CASES

    case = next(case for case in CASES if case.name == "preallocated_uninitialised")
    wrapped = WrappedModel(case.build())
    args, kwargs = case.inputs()
    trace = wrapped.plan(*args, **kwargs).trace
    cuts = list(range(trace.end + 1))
    expected = [{storage: live.pieces for storage, live in Liveness(trace).at(cut).items()} for cut in cuts]
    liveness = Liveness(trace)
    order = {"first": cuts, "last": cuts[::-1], "random": sorted(cuts, key=lambda cut: cut * 7919 % 101)}[first]
    found = {cut: {storage: live.pieces for storage, live in liveness.at(cut).items()} for cut in order}
    assert [found[cut] for cut in cuts] == expected
