"""Plans of one model on inputs that differ only in their batch size, and what follows for other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shared_hooks.crossing import INPUTS, Crossing, EarlyOutput, Mark, Slot, TensorForm
from shared_hooks.errors import CutRefused
from shared_hooks.modules import INPUT
from shared_hooks.planning import Cut, Plan, Rule
from shared_hooks.tensors import ClassFinder, View, dtype_name, unflatten
from shared_hooks.wrapped import WrappedModel

# How a tensor grows with the rows of a batch: along one dimension, in proportion, or not at all.


SIZES = (1, 2, 3)
"""The numbers of rows in the plans and runs that are compared."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """``axis`` has ``each`` elements per row; all other sizes of ``shape`` hold for any number of rows."""

    shape: Shape
    axis: int
    each: int

    def at(self, rows: int) -> Shape:
        """Return the shape for a number of rows."""
        return (*self.shape[: self.axis], self.each * rows, *self.shape[self.axis + 1 :])


def growth(shapes: Sequence[Shape]) -> Growth | None:
    """Return the growth from the shapes at `SIZES`; None if all are equal. Raises CutRefused if they are neither."""
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
    """Return how each piece of a cut grows with rows, from its crossings at `SIZES`.

    A piece that is a whole storage is flat: a mark that covers it tells the layout of its elements. Raises CutRefused.
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
    """Return the shapes of the tensor that covers a slot, with its dimensions in the order of memory."""
    several = [[mark for mark in crossing.marks if mark.slot == slot] for crossing in reversed(crossings)]
    if len({len(marks) for marks in several}) > 1:
        return None
    for mark, *others in zip(*several, strict=True):
        if mark.view.offset or mark.view.numel != crossings[-1].slots[slot].elements or not mark.view.is_run():
            continue
        # by the largest: where a batch has one row, its stride carries no information
        order = sorted(range(len(mark.view.shape)), key=lambda axis: -mark.view.stride[axis])
        views = [one.view for one in (mark, *others)]
        return [tuple(view.shape[axis] for axis in order) for view in reversed(views)]
    return None


# Random inputs of a given form, with contents like the model's example: valid token ids, masks of its kind.


MAX_VALUES = 4096
"""Most elements of an example's tensor from which integers are drawn."""


def order_of(form: TensorForm) -> tuple[int, ...]:
    """Return the dimensions in the order of memory, the outermost first: (0, 2, 3, 1) for a channels-last image.
    Strides of dimensions of size 1 mean nothing: these stay before the next one.
    """
    axes = range(len(form.shape))
    found = sorted((axis for axis in axes if form.shape[axis] > 1), key=lambda axis: -form.stride[axis])
    for axis in axes:
        if axis not in found:
            found.insert(next((at for at, other in enumerate(found) if other > axis), len(found)), axis)
    return tuple(found)


class RandomInputs:
    """Creates random inputs for ``forms``; those with ``batched`` have their rows in dimension ``axis``.

    ``example``: the tensors of the model's own example, if its inputs have the same form; else None.
    """

    def __init__(
        self,
        forms: Sequence[TensorForm],
        batched: Sequence[bool],
        axis: int,
        example: Sequence[torch.Tensor] | None,
        device: torch.device,
    ) -> None:
        self._forms = forms
        self._batched = batched
        self._axis = axis
        self._device = device
        self._example = example
        self._generator = torch.Generator().manual_seed(0)
        self._shared = [
            None if grows else self._drawn(number, form.shape) for number, (form, grows) in self._numbered()
        ]

    def _numbered(self) -> list[tuple[int, tuple[TensorForm, bool]]]:
        return list(enumerate(zip(self._forms, self._batched, strict=True)))

    def rows(self, count: int) -> list[torch.Tensor]:
        """New inputs with so many rows; tensors without rows are always the same. Raises CutRefused."""
        made = []
        for number, (form, _) in self._numbered():
            shared = self._shared[number]
            shape = (*form.shape[: self._axis], count, *form.shape[self._axis + 1 :])
            made.append(self._drawn(number, shape) if shared is None else shared.clone())
        return made

    def _drawn(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a random tensor with its dimensions in the form's order of memory."""
        order = order_of(self._forms[number])
        drawn = self._contiguous(number, tuple(shape[axis] for axis in order))
        return drawn.permute([order.index(axis) for axis in range(len(shape))])

    def _contiguous(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self._forms[number].dtype
        like = None if self._example is None else self._example[number].detach().cpu().reshape(-1)
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=self._generator)
            if like is not None and like.numel() > 1:
                spread, middle = torch.std_mean(like.double())
                if bool(spread.isfinite()) and bool(spread > 0):
                    values = values * spread.item() + middle.item()
            return values.to(self._device, dtype)
        if like is None or not like.numel():
            raise CutRefused(f"no example shows valid values for an input of {dtype_name(dtype)}")
        chosen = torch.randint(min(like.numel(), MAX_VALUES), shape, generator=self._generator)
        return like[chosen].to(self._device, dtype)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Rows:
    """The rows of a cut's inputs, if dimension ``axis`` has them; ``count``: their number."""

    def __init__(self, forms: Sequence[TensorForm], axis: int) -> None:
        """Raises CutRefused if no tensor has that dimension, or their sizes differ."""
        sizes = [form.shape[axis] if len(form.shape) > axis else 1 for form in forms]
        self.axis = axis
        self.count = max(sizes, default=0)
        # with one row the growing tensors cannot be recognised: all that may grow
        self.batched = tuple(
            size == self.count and len(form.shape) > axis for size, form in zip(sizes, forms, strict=True)
        )
        if not any(self.batched) or self.count < 1 or any(size not in (1, self.count) for size in sizes):
            raise CutRefused(f"dimension {axis} of the inputs has no size that could be that of a batch")


class Family:
    """The plans of one form of inputs for several numbers of rows. ``plans``: for 1, 2, 3 rows, and for 4 if a rule
    needs it.
    """

    def __init__(
        self,
        wrapped: WrappedModel,
        crossing: Crossing,
        rows: Rows,
        example: Sequence[torch.Tensor] | None,
        find: ClassFinder,
    ) -> None:
        """Make the plans. Raises CutRefused if rows cannot be identified, or depend on each other, TooLarge if that
        would be more work than a request may be, and what the model raises.
        """
        self.rows = rows
        self.wrapped = wrapped
        self._structure = crossing.input_structure
        self._forms = crossing.inputs
        self._find = find
        self._context = crossing.context
        if not self._is_foreseen() and example is None:
            raise CutRefused("what the model does with inputs given like these cannot be foreseen, and is not tried")
        self._samples = RandomInputs(crossing.inputs, rows.batched, rows.axis, example, wrapped.device)
        self.plans = [self._plan(size) for size in SIZES]

    def inputs(self, rows: int) -> Inputs:
        """New random inputs."""
        made: Inputs = unflatten(self._structure, self._samples.rows(rows), self._find)
        return made

    def _is_foreseen(self) -> bool:
        """Check the work of a client's cut before it runs, on tensors without memory; returns whether that reached the
        end.

        Raises TooLarge.
        """
        sizes = self._sizes(sum(SIZES))
        forms, slots, marks = [], [], []
        for leaf, form in enumerate(self._forms):
            shape, sizes = sizes[: len(form.shape)], sizes[len(form.shape) :]
            stride = tuple(torch.empty(shape, device="meta").stride())  # strides change no work
            forms.append(TensorForm(shape, stride, form.dtype))
            count = math.prod(shape)
            slots.append(Slot(form.dtype, count, (View((count,), (1,), 0),), written=True))
            marks.append(Mark(INPUTS, leaf, leaf, View(shape, stride, 0), form.dtype))
        cut = -1, INPUT, self.wrapped.depth, self._context, self._structure
        crossing = Crossing(*cut, tuple(forms), tuple(slots), tuple(marks), (), (), (), (), "")
        return not self.wrapped.recipes.recipe(EarlyOutput(crossing, (), ()), self.wrapped.device).is_open

    def _plan(self, rows: int) -> Plan:
        args, kwargs = self.inputs(rows)
        plan = self.wrapped.plan(*args, **kwargs)
        check_plan(plan)
        return plan

    def cut(self, cut: Cut) -> CutOfAnyBatch:
        """Return this cut for any number of rows. Raises CutRefused if the plans make no rule, and UnknownLayer."""
        try:
            return CutOfAnyBatch(self.plans, SIZES, cut, self._sizes)
        except CutRefused as error:
            # many models take a path of their own for one row: that plan counts for itself, the rule begins with two
            larger = range(2, 2 + len(SIZES))
            if len(self.plans) < larger[-1]:
                self.plans.append(self._plan(larger[-1]))
            try:
                return CutOfAnyBatch(self.plans, larger, cut, self._sizes)
            except CutRefused:
                raise error from None

    def _sizes(self, rows: int) -> tuple[int, ...]:
        """Return all sizes of all inputs."""
        return tuple(
            rows if grows and axis == self.rows.axis else size
            for form, grows in zip(self._forms, self.rows.batched, strict=True)
            for axis, size in enumerate(form.shape)
        )


def check_plan(plan: Plan) -> None:
    """Raise CutRefused for a path through the model on which rows may depend on each other, whatever it computes."""
    if plan.trace.unsteady:
        raise CutRefused(plan.trace.unsteady)
    if plan.trace.dynamic:
        raise CutRefused("the model decides by what it reads from its data, and so by all rows of a batch")
    if plan.trace.dice:
        raise CutRefused("the model draws random numbers, which rows would share")


class CutOfAnyBatch:
    """One cut, predicted for any number of rows."""

    def __init__(
        self, plans: Sequence[Plan], ruling: Sequence[int], cut: Cut, sizes: Callable[[int], tuple[int, ...]]
    ) -> None:
        """``plans``: of 1, 2, ... rows, of which those of ``ruling`` make the rule; ``sizes``: of all inputs, by rows.

        Raises CutRefused if they make none, or more than rows crosses: what Python read, generators.
        """
        self.cut = cut
        self._first = plans[0]
        self.position = self._first.position(cut)
        """Later cuts have larger positions."""
        self._sizes = sizes
        known = [sizes(rows) for rows in ruling]
        moving = next(at for at, pair in enumerate(zip(known[0], known[1], strict=True)) if pair[0] != pair[1])
        chosen = [plans[rows - 1] for rows in ruling]
        narrow, wide = (Rule.of(known, chosen, moving, cut, wide=wide) for wide in (False, True))
        if narrow is None or wide is None:
            raise CutRefused(f"plans of {ruling[0]} to {ruling[-1]} rows differ in more than their sizes")
        self._rules = narrow, wide
        self._known: dict[int, Crossing] = {}
        crossings = [self.at(rows) for rows in SIZES]
        if crossings[0].reads or crossings[0].generators:
            raise CutRefused("values that Python read before the cut, or generators, cross")
        if len({tuple(map(_form_of, crossing.slots)) for crossing in crossings}) > 1:
            raise CutRefused(f"for {SIZES} rows, other things cross")
        self.pieces: tuple[Growth | None, ...] = of_pieces(crossings)

    def at(self, rows: int) -> Crossing:
        """Return the crossing for so many rows. Raises CutRefused if the rule gives none."""
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._predicted(rows, wide=False)
        return found

    def is_at(self, crossing: Crossing, rows: int) -> bool:
        """Return whether this is the same cut, as planned or as predicted (with whole storages)."""
        same = partial(core, replace(crossing, context={}))
        return any(same() == core(replace(self._predicted(rows, wide=wide), context={})) for wide in (False, True))

    def _predicted(self, rows: int, *, wide: bool) -> Crossing:
        if rows == 1:
            return self._first.cutting(self.cut, wide=wide)[1]
        found = self._rules[wide].at(self._sizes(rows))
        if found is None:
            raise CutRefused(f"no rule holds for {rows} rows: their plans differ in more than sizes")
        return found[2]


def _form_of(slot: Slot) -> tuple[torch.dtype, int]:
    return slot.dtype, len(slot.pieces)


def core(crossing: Crossing) -> bytes:
    """Return what must be equal on both sides. The context is compared before each tail, the plan's digest covers what
    follows, codecs no longer matter by then; and what a run was seen to leave behind (`Crossing.leaves`) depends on
    earlier runs.
    """
    return replace(crossing, plan_digest="", leaves=(), books=(), cache={}).to_bytes()
