"""Views of a storage, and sets of storage elements.

Liveness is kept per storage and per element: two tensors may be views of one storage, and the tail may read only a
slice of what was computed. A live set is turned into *pieces*: disjoint views that cover it exactly, which is what is
sent. All numbers here are in elements of the storage's own item size.

A set costs what its description costs, not what it holds: boxes of a grid (`boxes`), and where views do not fit one
grid, runs (`runs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shared_hooks.tensors import boxes, runs
from shared_hooks.tensors.boxes import LINE, Box, Dims, Grid
from shared_hooks.tensors.runs import Runs

MAX_RUNS = 4096
MAX_BOXES = 64


# what a named tuple's own constructor calls, without the call around it: recording makes some for every kernel
_new_view: Any = tuple.__new__


class View(NamedTuple):
    """Shape, stride and offset of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, base: int = 0) -> View:
        """The view that ``tensor`` is, its offset counted from element ``base`` of the storage."""
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
        """Whether the view touches one gapless run of elements, each once, in whatever order."""
        return self.numel == self.end - self.offset and _no_overlap(self)


def _no_overlap(view: View) -> bool:
    reach = 1
    for step, size in sorted((step, size) for size, step in zip(view.shape, view.stride, strict=True) if size > 1):
        if step < reach:
            return False
        reach = step * size
    return True


def run(start: int, stop: int) -> View:
    """The one-dimensional view of elements ``start`` up to ``stop``."""
    return View((stop - start,), (1,), start)


@dataclass(frozen=True, eq=False)
class LiveSet:
    """Which elements of one storage are still to be read: disjoint ``boxes`` of a ``grid``, or ``runs`` instead.

    Immutable: every change gives a new set. Exact, except for sets of very many runs, which are widened (`runs.MOST`):
    too much may be in a set, never too little.
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
        """How many numbers the set is made of, about."""
        return 2 * len(self.boxes) * len(self.grid) if self.runs is None else int(self.runs.size)

    def add(self, view: View) -> LiveSet:
        """With the elements of ``view``."""
        if view.numel == 0 or self.is_full:
            return self
        if view.end > self.elements:  # the storage was resized after it was first seen
            return LiveSet.full(self.elements)
        dims = boxes.dims_of(view.shape, view.stride)
        if dims == [(self.elements, 1)]:
            return LiveSet.full(self.elements)
        fitted = self._fitted(dims, view.offset)
        if fitted is None:
            more = runs.of_view(view.shape, view.stride, view.offset)
            return self._of_runs(runs.union(self._as_runs(), runs.one(view.offset, view.end) if more is None else more))
        grid, mine, new = fitted
        for box in new:
            mine = boxes.with_box(mine, box)
        return self._of_boxes(mine, grid)

    def remove(self, view: View) -> LiveSet:
        """Without the elements of ``view``: they are overwritten before anybody reads them."""
        if view.numel == 0 or view.end > self.elements or not self:
            return self
        dims = boxes.dims_of(view.shape, view.stride)
        if dims == [(self.elements, 1)]:
            return LiveSet.empty(self.elements)
        fitted = self._fitted(dims, view.offset)
        if fitted is None:
            less = runs.of_view(view.shape, view.stride, view.offset)
            return self if less is None else self._of_runs(runs.difference(self._as_runs(), less))
        grid, mine, gone = fitted
        for box in gone:
            mine = boxes.without_box(mine, box)
        return self._of_boxes(mine, grid)

    def join(self, other: LiveSet) -> LiveSet:
        """The union of two sets of the same storage."""
        if self.is_full or other.is_full:
            return LiveSet.full(self.elements)
        if other.runs is not None:
            return self._of_runs(runs.union(self._as_runs(), other.runs))
        joined = self
        for box in other.boxes:
            joined = joined.add(_view(box, other.grid))
        return joined

    @cached_property
    def pieces(self) -> tuple[View, ...]:
        """Disjoint views that cover the set exactly.

        One run where there are no gaps; else the boxes, which are the views as they were read where these are disjoint
        and none continues another; else the runs. Only a set in more than ``MAX_RUNS`` runs is widened to the run that
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
        """Elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)

    def _fitted(self, dims: Dims | None, offset: int) -> tuple[Grid, list[Box], list[Box]] | None:
        """A grid for the set and a view, and the boxes of both in it; None if there is none."""
        if self.runs is not None or dims is None:
            return None
        grid = boxes.grid_with(self.grid, dims)
        if grid is None:
            return None
        mine, other = boxes.refined(self.boxes, self.grid, grid), boxes.boxes_of(dims, offset, grid)
        return None if mine is None or other is None else (grid, mine, other)

    def _of_boxes(self, found: list[Box], grid: Grid) -> LiveSet:
        if not found:
            return LiveSet.empty(self.elements)
        if len(found) == 1 and boxes.count(found[0]) == self.elements:
            return LiveSet.full(self.elements)
        made = LiveSet(self.elements, tuple(found), grid)
        return made if len(found) <= MAX_BOXES else self._of_runs(made._as_runs())

    def _of_runs(self, found: Runs) -> LiveSet:
        many = found.shape[1]
        if many > runs.MOST:
            return self._of_runs(runs.one(int(found[0, 0]), int(found[1, -1])))
        if many <= 1:
            return LiveSet(self.elements, tuple(((int(start), int(stop)),) for start, stop in found.T))
        return LiveSet(self.elements, runs=found)

    def _as_runs(self) -> Runs:
        if self.runs is not None:
            return self.runs
        parts = [runs.NONE]
        for box in self.boxes:
            view = _view(box, self.grid)
            own = runs.of_view(view.shape, view.stride, view.offset)
            parts.append(runs.one(view.offset, view.end) if own is None else own)
        return runs.union(*parts)


def _view(box: Box, grid: Grid) -> View:
    dims, offset = boxes.dims_in(box, grid)
    dims = dims or [(1, 1)]
    return View(tuple(size for size, _ in dims), tuple(step for _, step in dims), offset)
