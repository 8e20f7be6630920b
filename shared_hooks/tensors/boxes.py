"""Sets of storage elements as boxes of a grid: what slices, strides and tiles select, whatever its size.

A *grid* is a tuple of strides, falling, each a multiple of the next, the last one 1: the digits of an address. A *box*
is a range (start, stop) for every digit. A view whose strides fit the grid is one box, or a few where it runs over the
edge of a row. All functions here are exact; None says that something cannot be expressed in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

Grid = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
Dims = list[tuple[int, int]]
"""(size, stride), outer ones first; every element once."""

LINE: Grid = (1,)


def dims_of(shape: Sequence[int], stride: Sequence[int]) -> Dims | None:
    """The elements that a view touches, each once: sorted, joined where there is no gap. None where it overlaps itself
    otherwise than as a sliding window does.
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
    """The grid, made finer so that the dimensions fit."""
    strides = {step for _, step in dims}
    if strides.issubset(grid):
        return grid
    finer = tuple(sorted(strides.union(grid), reverse=True))
    return finer if all(a % b == 0 for a, b in pairwise(finer)) else None


def boxes_of(dims: Dims, offset: int, grid: Grid) -> list[Box] | None:
    """The boxes that hold these elements. A range that runs over the end of its digit is carried to the next one."""
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
    """The dimensions and the offset of a box."""
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
    """The same boxes in a finer grid."""
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
    """The elements of a box."""
    return prod([stop - start for start, stop in box])


def with_box(boxes: list[Box], box: Box) -> list[Box]:
    """Disjoint boxes that hold another one, too."""
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
    """Disjoint boxes that hold nothing of another one."""
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
    """What of ``a`` is not in ``b``: outer digits are cut first, so that what is left stays in one piece."""
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
    """With one more, which is joined to those it continues."""
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
