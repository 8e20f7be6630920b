"""Describe views of a storage, and sets of storage elements.

Liveness is tracked per storage and per element: two tensors may be views of one storage, and the tail may read only a
slice of what was computed. A live set is turned into *pieces*: disjoint views that cover it exactly, which are sent.
All numbers here are in elements of the storage's own item size.

A set's cost depends on its description, not on its size: boxes of a grid (`boxes`), and where views do not fit one
grid, runs (`runs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# Sets of storage elements as runs without a gap: two rows of numbers, where each run starts and stops.
#
# For sets that boxes of one grid cannot express. Runs are sorted, disjoint, and do not touch.


Runs = NDArray[np.int64]

MOST = 1 << 18
"""Maximum number of runs, at 16 bytes each and some temporary copies: a set of more is widened."""


def one(start: int, stop: int) -> Runs:
    return np.array([[start], [stop]], dtype=np.int64)


NONE: Runs = np.zeros((2, 0), dtype=np.int64)


def of_view(shape: Sequence[int], stride: Sequence[int], offset: int) -> Runs | None:
    """Return the runs that a view touches; None if there may be more than `MOST`."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1 and step > 0)
    length = 1
    while dims and dims[0][0] <= length:
        # a dimension that continues where the one inside ends, or earlier
        step, size = dims.pop(0)
        length += step * (size - 1)
    many = 1
    for _, size in dims:
        many *= size
    if many > MOST:
        return None
    starts: Any = np.full(1, offset, dtype=np.int64)
    for step, size in dims:
        starts = (np.arange(size, dtype=np.int64)[:, None] * step + starts).reshape(-1)
    starts.sort()
    return _closed(np.stack([starts, starts + length]))


def union(*parts: Runs) -> Runs:
    """Return the union of runs."""
    together = np.concatenate(parts, axis=1)
    return _closed(together[:, np.argsort(together[0], kind="stable")])


def _closed(runs: Runs) -> Runs:
    """Join runs, sorted by their starts, that touch or overlap."""
    if not runs.size:
        return runs
    reach = np.maximum.accumulate(runs[1])
    gaps = runs[0, 1:] > reach[:-1]
    first = np.concatenate([[True], gaps])
    last = np.concatenate([gaps, [True]])
    return np.stack([runs[0, first], reach[last]])


def difference(a: Runs, b: Runs) -> Runs:
    """Return what is in the first and not in the second."""
    at = np.concatenate([a[0], a[1], b[0], b[1]])
    order = np.argsort(at, kind="stable")
    steps = np.zeros((2, at.size), dtype=np.int64)
    mine, theirs = a.shape[1], b.shape[1]
    steps[0, :mine], steps[0, mine : 2 * mine] = 1, -1
    steps[1, 2 * mine : 2 * mine + theirs], steps[1, 2 * mine + theirs :] = 1, -1
    depth = np.cumsum(steps[:, order], axis=1)
    at = at[order]
    final = np.concatenate([at[1:] != at[:-1], [True]])  # at one address only the last step counts
    inside = (depth[0, final] > 0) & (depth[1, final] == 0)
    at = at[final]
    before = np.concatenate([[False], inside[:-1]])
    return np.stack([at[inside & ~before], at[~inside & before]])


# Sets of storage elements as boxes of a grid: what slices, strides and tiles select, whatever its size.
#
# A *grid* is a tuple of strides, falling, each a multiple of the next, the last one 1: the digits of an address. A
# *box* is a range (start, stop) for every digit. A view whose strides fit the grid is one box, or a few where it runs
# over the edge of a row. All functions here are exact; None means that something cannot be expressed in this way.


Grid = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
Dims = list[tuple[int, int]]
"""(size, stride), outer ones first; every element once."""

LINE: Grid = (1,)


def dims_of(shape: Sequence[int], stride: Sequence[int]) -> Dims | None:
    """Return the elements that a view touches, each once: sorted, joined where there is no gap. None if it overlaps
    itself in another way than a sliding window.
    """
    dims: Dims = []
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1 and step > 0):
        if dims:
            inner, unit = dims[-1]
            if step % unit == 0 and step <= inner * unit:
                dims[-1] = ((size - 1) * (step // unit) + inner, unit)
                continue
            if step < inner * unit:
                return None
        dims.append((size, step))
    dims.reverse()
    return dims


def grid_with(grid: Grid, dims: Dims) -> Grid | None:
    """Return the grid, refined so that the dimensions fit; None if impossible."""
    strides = {step for _, step in dims}
    if strides.issubset(grid):
        return grid
    finer = tuple(sorted(strides.union(grid), reverse=True))
    return finer if all(a % b == 0 for a, b in pairwise(finer)) else None


def boxes_of(dims: Dims, offset: int, grid: Grid) -> list[Box] | None:
    """Return the boxes that hold these elements. A range that exceeds its digit carries over to the next one."""
    sizes = {step: size for size, step in dims}
    # boxes begun at the inner digits: (ranges so far, inner first; start and count of what is carried)
    begun: list[tuple[Box, int, int]] = [((), offset, 1)]
    for place in range(len(grid) - 1, -1, -1):
        own = sizes.get(grid[place], 1)
        radix = grid[place - 1] // grid[place] if place else 0
        further: list[tuple[Box, int, int]] = []
        for ranges, start, count in begun:
            if own > 1 and count > 1:
                return None
            count = max(own, count)
            if not place:
                further.append(((*ranges, (start, start + count)), 0, 1))
                continue
            carry, digit = divmod(start, radix)
            if digit + count <= radix:
                further.append(((*ranges, (digit, digit + count)), carry, 1))
                continue
            if digit:
                further.append(((*ranges, (digit, radix)), carry, 1))
                carry, count = carry + 1, count - (radix - digit)
            rows, rest = divmod(count, radix)
            if rows:
                further.append(((*ranges, (0, radix)), carry, rows))
            if rest:
                further.append(((*ranges, (0, rest)), carry + rows, 1))
        begun = further
    return [ranges[::-1] for ranges, _, _ in begun]


def dims_in(box: Box, grid: Grid) -> tuple[Dims, int]:
    """Return the dimensions and the offset of a box."""
    dims: Dims = []
    offset = 0
    for (start, stop), step in zip(box, grid, strict=True):
        offset += start * step
        if stop - start > 1:
            if dims and dims[-1][1] == (stop - start) * step:
                dims[-1] = (dims[-1][0] * (stop - start), step)
            else:
                dims.append((stop - start, step))
    return dims, offset


def refined(boxes: Iterable[Box], grid: Grid, finer: Grid) -> list[Box] | None:
    """Return the same boxes in a finer grid."""
    if grid == finer:
        return list(boxes)
    found: list[Box] = []
    for box in boxes:
        parts = boxes_of(*dims_in(box, grid), finer)
        if parts is None:
            return None
        found += parts
    return found


def count(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod([stop - start for start, stop in box])


def with_box(boxes: list[Box], box: Box) -> list[Box]:
    """Return disjoint boxes that also hold ``box``."""
    found = boxes
    parts = [box]
    for other in boxes:
        if _meet(other, box):
            if _holds(box, other):
                found = [one for one in found if one is not other]
            else:
                parts = [rest for part in parts for rest in _less(part, other)]
    for part in parts:
        found = _merged(found, part)
    return found


def without_box(boxes: list[Box], box: Box) -> list[Box]:
    """Return disjoint boxes without the elements of ``box``."""
    kept: list[Box] = []
    cut: list[Box] = []
    for other in boxes:
        if _meet(other, box):
            cut += _less(other, box)
        else:
            kept.append(other)
    for part in cut:
        kept = _merged(kept, part)
    return kept


def _meet(a: Box, b: Box) -> bool:
    for (start, stop), (begin, end) in zip(a, b, strict=True):  # noqa: SIM110 (a generator is three times as slow)
        if stop <= begin or end <= start:
            return False
    return True


def _holds(a: Box, b: Box) -> bool:
    return all(start <= begin and end <= stop for (start, stop), (begin, end) in zip(a, b, strict=True))


def _less(a: Box, b: Box) -> list[Box]:
    """Return what of ``a`` is not in ``b``: outer digits are cut first, so that the rest stays in one piece."""
    if not _meet(a, b):
        return [a]
    parts: list[Box] = []
    for place, ((start, stop), (begin, end)) in enumerate(zip(a, b, strict=True)):
        if start < begin:
            parts.append((*a[:place], (start, begin), *a[place + 1 :]))
        if end < stop:
            parts.append((*a[:place], (end, stop), *a[place + 1 :]))
        a = (*a[:place], (max(start, begin), min(stop, end)), *a[place + 1 :])
    return parts


def _merged(boxes: list[Box], box: Box) -> list[Box]:
    """Return the boxes with one more, joined to those it continues."""
    for number, other in enumerate(boxes):
        whole = _joined(other, box)
        if whole is not None:
            return _merged(boxes[:number] + boxes[number + 1 :], whole)
    return [*boxes, box]


def _joined(a: Box, b: Box) -> Box | None:
    place = -1
    for number, (mine, other) in enumerate(zip(a, b, strict=True)):
        if mine != other:
            if place >= 0:
                return None
            place = number
    (start, stop), (begin, end) = a[place], b[place]
    if stop == begin:
        return (*a[:place], (start, end), *a[place + 1 :])
    if end == start:
        return (*a[:place], (begin, stop), *a[place + 1 :])
    return None


MAX_RUNS = 4096
MAX_BOXES = 64


# called by a named tuple's own constructor, here directly: recording makes some for every kernel
_new_view: Any = tuple.__new__


class View(NamedTuple):
    """Shape, stride and offset of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, base: int = 0) -> View:
        """Return the view of ``tensor``, with its offset counted from element ``base`` of the storage."""
        made: View = _new_view(cls, (tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - base))
        return made

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element the view touches."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def is_run(self) -> bool:
        """Return whether the view touches one gapless run of elements, each once, in any order."""
        return self.numel == self.end - self.offset and _no_overlap(self)


def _no_overlap(view: View) -> bool:
    reach = 1
    for step, size in sorted((step, size) for size, step in zip(view.shape, view.stride, strict=True) if size > 1):
        if step < reach:
            return False
        reach = step * size
    return True


def run(start: int, stop: int) -> View:
    """Return the one-dimensional view of elements ``start`` up to ``stop``."""
    return View((stop - start,), (1,), start)


@dataclass(frozen=True, eq=False)
class LiveSet:
    """The elements of one storage that are still to be read: disjoint ``boxes`` of a ``grid``, or ``runs`` instead.

    Immutable: every change returns a new set. Exact, except for sets of very many runs, which are widened (`MOST`): a
    set may then hold too much, never too little.
    """

    elements: int
    boxes: tuple[Box, ...] = ()
    grid: Grid = LINE
    runs: Runs | None = None

    @classmethod
    def empty(cls, elements: int) -> LiveSet:
        return cls(elements)

    @classmethod
    def full(cls, elements: int) -> LiveSet:
        return cls(elements, (((0, elements),),))

    def __bool__(self) -> bool:
        return self.elements > 0 and (len(self.boxes) > 0 if self.runs is None else self.runs.size > 0)

    @property
    def is_full(self) -> bool:
        return self.boxes == (((0, self.elements),),)

    @property
    def weight(self) -> int:
        """Approximate number of integers in the set's description."""
        return 2 * len(self.boxes) * len(self.grid) if self.runs is None else int(self.runs.size)

    def add(self, view: View) -> LiveSet:
        """Return the set with the elements of ``view``."""
        if view.numel == 0 or self.is_full:
            return self
        if view.end > self.elements:  # the storage was resized after it was first seen
            return LiveSet.full(self.elements)
        dims = dims_of(view.shape, view.stride)
        if dims == [(self.elements, 1)]:
            return LiveSet.full(self.elements)
        fitted = self._fitted(dims, view.offset)
        if fitted is None:
            more = of_view(view.shape, view.stride, view.offset)
            return self._of_runs(union(self._as_runs(), one(view.offset, view.end) if more is None else more))
        grid, mine, new = fitted
        for box in new:
            mine = with_box(mine, box)
        return self._of_boxes(mine, grid)

    def remove(self, view: View) -> LiveSet:
        """Return the set without the elements of ``view``, which are overwritten before they are read."""
        if view.numel == 0 or view.end > self.elements or not self:
            return self
        dims = dims_of(view.shape, view.stride)
        if dims == [(self.elements, 1)]:
            return LiveSet.empty(self.elements)
        fitted = self._fitted(dims, view.offset)
        if fitted is None:
            less = of_view(view.shape, view.stride, view.offset)
            return self if less is None else self._of_runs(difference(self._as_runs(), less))
        grid, mine, gone = fitted
        for box in gone:
            mine = without_box(mine, box)
        return self._of_boxes(mine, grid)

    def join(self, other: LiveSet) -> LiveSet:
        """Return the union of two sets of the same storage."""
        if self.is_full or other.is_full:
            return LiveSet.full(self.elements)
        if other.runs is not None:
            return self._of_runs(union(self._as_runs(), other.runs))
        joined = self
        for box in other.boxes:
            joined = joined.add(_view(box, other.grid))
        return joined

    @cached_property
    def pieces(self) -> tuple[View, ...]:
        """Return disjoint views that cover the set exactly.

        One run if there are no gaps; else the boxes, which are the views as they were read if these are disjoint and
        none continues another; else the runs. Only a set of more than ``MAX_RUNS`` runs is widened to the run that
        spans it.
        """
        if self.is_full:
            return (run(0, self.elements),)
        if self.runs is not None:
            starts, stops = self.runs.tolist()
            if len(starts) > MAX_RUNS:
                return (run(starts[0], stops[-1]),)
            return tuple(run(start, stop) for start, stop in zip(starts, stops, strict=True))
        if not self.boxes:
            return ()
        views = sorted((_view(box, self.grid) for box in self.boxes), key=lambda view: view.offset)
        first, end = views[0].offset, max(view.end for view in views)
        if sum(view.numel for view in views) == end - first:
            return (run(first, end),)
        return tuple(views)

    @cached_property
    def sent(self) -> int:
        """Return the number of elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)

    def _fitted(self, dims: Dims | None, offset: int) -> tuple[Grid, list[Box], list[Box]] | None:
        """Return a grid for the set and a view, and the boxes of both in it; None if there is none."""
        if self.runs is not None or dims is None:
            return None
        grid = grid_with(self.grid, dims)
        if grid is None:
            return None
        mine, other = refined(self.boxes, self.grid, grid), boxes_of(dims, offset, grid)
        return None if mine is None or other is None else (grid, mine, other)

    def _of_boxes(self, found: list[Box], grid: Grid) -> LiveSet:
        if not found:
            return LiveSet.empty(self.elements)
        if len(found) == 1 and count(found[0]) == self.elements:
            return LiveSet.full(self.elements)
        made = LiveSet(self.elements, tuple(found), grid)
        return made if len(found) <= MAX_BOXES else self._of_runs(made._as_runs())

    def _of_runs(self, found: Runs) -> LiveSet:
        many = found.shape[1]
        if many > MOST:
            return self._of_runs(one(int(found[0, 0]), int(found[1, -1])))
        if many <= 1:
            return LiveSet(self.elements, tuple(((int(start), int(stop)),) for start, stop in found.T))
        return LiveSet(self.elements, runs=found)

    def _as_runs(self) -> Runs:
        if self.runs is not None:
            return self.runs
        parts = [NONE]
        for box in self.boxes:
            view = _view(box, self.grid)
            own = of_view(view.shape, view.stride, view.offset)
            parts.append(one(view.offset, view.end) if own is None else own)
        return union(*parts)


def _view(box: Box, grid: Grid) -> View:
    dims, offset = dims_in(box, grid)
    dims = dims or [(1, 1)]
    return View(tuple(size for size, _ in dims), tuple(step for _, step in dims), offset)
