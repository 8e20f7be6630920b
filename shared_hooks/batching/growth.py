"""How a tensor grows with the rows of a batch: along one dimension, in proportion, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared_hooks.crossing import Crossing
from shared_hooks.errors import CutRefused

SIZES = (1, 2, 3)
"""Rows of the plans and runs that are compared."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """``axis`` has ``each`` elements a row; of ``shape`` all other sizes hold for any number of rows."""

    shape: Shape
    axis: int
    each: int

    def at(self, rows: int) -> Shape:
        """The shape of so many rows."""
        return (*self.shape[: self.axis], self.each * rows, *self.shape[self.axis + 1 :])


def growth(shapes: Sequence[Shape]) -> Growth | None:
    """From the shapes at `SIZES`; None where all are the same. Raises CutRefused where they are neither."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return None
    if len({len(shape) for shape in shapes}) == 1:
        moving = [axis for axis in range(len(first)) if len({shape[axis] for shape in shapes}) > 1]
        if len(moving) == 1:
            found = Growth(first, moving[0], first[moving[0]])
            if all(found.at(rows) == shape for rows, shape in zip(SIZES, shapes, strict=True)):
                return found
    raise CutRefused(f"batches of {SIZES} rows have tensors of {shapes}, which do not grow with one dimension")


def of_pieces(crossings: Sequence[Crossing]) -> tuple[Growth | None, ...]:
    """How each piece of a cut grows with rows, from its crossings at `SIZES`. A piece that is a whole storage is flat:
    how its elements lie there is said by a mark, if one covers it. Raises CutRefused.
    """
    found: list[Growth | None] = []
    for number, slot in enumerate(crossings[-1].slots):
        for index, piece in enumerate(slot.pieces):
            shapes = None
            if len(slot.pieces) == 1 and piece.numel == slot.elements:
                shapes = _laid_out(crossings, number)
            if shapes is None:
                shapes = [crossing.slots[number].pieces[index].shape for crossing in crossings]
            found.append(growth(shapes))
    return tuple(found)


def _laid_out(crossings: Sequence[Crossing], slot: int) -> list[Shape] | None:
    """The shapes of the tensor that is all of a slot, its dimensions in the order of memory."""
    several = [[mark for mark in crossing.marks if mark.slot == slot] for crossing in reversed(crossings)]
    if len({len(marks) for marks in several}) > 1:
        return None
    for mark, *others in zip(*several, strict=True):
        if mark.view.offset or mark.view.numel != crossings[-1].slots[slot].elements or not mark.view.is_run():
            continue
        # of the largest: where a batch has one row, its stride says nothing
        order = sorted(range(len(mark.view.shape)), key=lambda axis: -mark.view.stride[axis])
        views = [one.view for one in (mark, *others)]
        return [tuple(view.shape[axis] for axis in order) for view in reversed(views)]
    return None
