"""Views of a storage, and sets of storage elements.

Liveness is kept per storage and per element: two tensors may be views of one storage, and the tail may read only a
slice of what was computed. A live set is turned into *pieces*: disjoint views that cover it exactly, which is what is
sent. All numbers here are in elements of the storage's own item size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

MAX_RUNS = 4096


@dataclass(frozen=True)
class View:
    """Shape, stride and offset of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, base: int = 0) -> View:
        """The view that ``tensor`` is, its offset counted from element ``base`` of the storage."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()) - base)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def end(self) -> int:
        """One past the last element the view touches."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def distinct(self) -> View:
        """The same elements without repetition by broadcasting."""
        shape = tuple(1 if step == 0 and size > 1 else size for size, step in zip(self.shape, self.stride, strict=True))
        return View(shape, self.stride, self.offset)

    def is_run(self) -> bool:
        """Whether the view touches one gapless run of elements, each once, in whatever order."""
        return self.numel == self.end - self.offset and _no_overlap(self)

    def in_order(self) -> bool:
        """Whether the view's row-major order is the order of the storage."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


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


@dataclass(frozen=True)
class LiveSet:
    """Which elements of one storage are still to be read: all of them (``mask`` is None) or those set in ``mask``.

    ``views`` remembers what was read, as candidates for pieces. Immutable: every change gives a new set.
    """

    elements: int
    mask: torch.Tensor | None
    views: tuple[View, ...] = ()

    @classmethod
    def empty(cls, elements: int) -> LiveSet:
        return cls(elements, torch.zeros(elements, dtype=torch.bool))

    @classmethod
    def full(cls, elements: int) -> LiveSet:
        return cls(elements, None)

    def __bool__(self) -> bool:
        return self.elements > 0 and (self.mask is None or bool(self.mask.any()))

    def add(self, view: View) -> LiveSet:
        """With the elements of ``view``."""
        view = view.distinct()
        if self.mask is None or view.numel == 0 or view in self.views:
            return self
        if view.end > self.elements:  # the storage was resized after it was first seen
            return LiveSet.full(self.elements)
        if view.offset == 0 and view.numel == self.elements and view.is_run():
            return LiveSet.full(self.elements)
        mask = self.mask.clone()
        mask.as_strided(view.shape, view.stride, view.offset).fill_(True)
        return LiveSet(self.elements, mask, (*self.views, view))

    def remove(self, view: View) -> LiveSet:
        """Without the elements of ``view``: they are overwritten before anybody reads them."""
        view = view.distinct()
        if view.numel == 0 or view.end > self.elements:
            return self
        if view.offset == 0 and view.numel == self.elements and view.is_run():
            return LiveSet.empty(self.elements)
        mask = torch.ones(self.elements, dtype=torch.bool) if self.mask is None else self.mask.clone()
        mask.as_strided(view.shape, view.stride, view.offset).fill_(False)
        return LiveSet(self.elements, mask)

    def join(self, other: LiveSet) -> LiveSet:
        """The union of two sets of the same storage."""
        if self.mask is None or other.mask is None:
            return LiveSet.full(self.elements)
        return LiveSet(self.elements, self.mask | other.mask, (*self.views, *other.views))

    @cached_property
    def pieces(self) -> tuple[View, ...]:
        """Disjoint views that cover the set exactly.

        One run where there are no gaps; else the views as they were read, if they are disjoint; else the runs of the
        set. Only a set in more than ``MAX_RUNS`` runs is widened to the run that spans it.
        """
        if self.mask is None:
            return (run(0, self.elements),)
        count = int(self.mask.sum())
        edges = torch.diff(self.mask.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8)).nonzero()[:, 0]
        if count == 0:
            return ()
        starts_and_stops = [*edges.tolist(), self.elements]
        runs = [run(a, b) for a, b in zip(starts_and_stops[0::2], starts_and_stops[1::2], strict=False)]
        if len(runs) == 1:
            return (runs[0],)
        chosen = self._disjoint_views(count)
        if chosen is not None:
            return chosen
        if len(runs) <= MAX_RUNS:
            return tuple(runs)
        return (run(runs[0].offset, runs[-1].end),)

    def _disjoint_views(self, count: int) -> tuple[View, ...] | None:
        assert self.mask is not None
        left = self.mask.clone()
        chosen: list[View] = []
        for view in sorted(set(self.views), key=lambda view: (-view.numel, view.offset, view.shape, view.stride)):
            window = left.as_strided(view.shape, view.stride, view.offset)
            if _no_overlap(view) and bool(window.all()):
                window.fill_(False)
                chosen.append(view)
                count -= view.numel
        return tuple(chosen) if count == 0 else None
