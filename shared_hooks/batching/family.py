"""Plans of one model on inputs that differ in the size of their batch alone, and what they tell of its other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shared_hooks.batching.growth import SIZES, Growth, of_pieces
from shared_hooks.batching.samples import Samples
from shared_hooks.crossing import INPUTS, Crossing, EarlyOutput, Mark, Slot, TensorForm
from shared_hooks.errors import CutRefused
from shared_hooks.planning import INPUT, Plan, Rule
from shared_hooks.tensors import ClassFinder, View, unflatten
from shared_hooks.wrapped import WrappedModel

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Rows:
    """Where a cut's inputs have their rows, if it is dimension ``axis``, and how many: ``count``."""

    def __init__(self, forms: Sequence[TensorForm], axis: int) -> None:
        """Raises CutRefused where no tensor has that dimension, or they do not agree on its size."""
        sizes = [form.shape[axis] if len(form.shape) > axis else 1 for form in forms]
        self.axis = axis
        self.count = max(sizes, default=0)
        # of one row, which tensors would grow is not to be seen: all that can
        self.batched = tuple(
            size == self.count and len(form.shape) > axis for size, form in zip(sizes, forms, strict=True)
        )
        if not any(self.batched) or self.count < 1 or any(size not in (1, self.count) for size in sizes):
            raise CutRefused(f"dimension {axis} of the inputs has no size that could be that of a batch")


class Family:
    """The plans of one form of inputs at several numbers of rows. ``plans``: for 1, 2, 3 rows, and for 4 where a rule
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
        """Plans. Raises CutRefused where rows cannot be known, or depend on each other, TooLarge where that would be
        more work than a request may be, and what the model raises.
        """
        self.rows = rows
        self.wrapped = wrapped
        self._structure = crossing.input_structure
        self._forms = crossing.inputs
        self._find = find
        self._context = crossing.context
        if not self._is_foreseen() and example is None:
            raise CutRefused("what the model does with inputs given like these cannot be foreseen, and is not tried")
        self._samples = Samples(crossing.inputs, rows.batched, rows.axis, example, wrapped.device)
        self.plans = [self._plan(size) for size in SIZES]

    def inputs(self, rows: int) -> Inputs:
        """Random ones, new at each call."""
        made: Inputs = unflatten(self._structure, self._samples.rows(rows), self._find)
        return made

    def _is_foreseen(self) -> bool:
        """What comes here as a few words of a client's is about to be run: its work is counted first, on tensors
        without memory. Whether that goes to the end. Raises TooLarge.
        """
        sizes = self._sizes(sum(SIZES))
        forms, slots, marks = [], [], []
        for leaf, form in enumerate(self._forms):
            shape, sizes = sizes[: len(form.shape)], sizes[len(form.shape) :]
            stride = tuple(torch.empty(shape, device="meta").stride())  # how it lies changes no work
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

    def cut(self, layer_id: int) -> CutOfAnyBatch:
        """What this cut is for any number of rows. Raises CutRefused where plans make no rule, and UnknownLayer."""
        try:
            return CutOfAnyBatch(self.plans, SIZES, layer_id, self._sizes)
        except CutRefused as error:
            # many a model takes a way of its own for one row: that plan counts for itself, the rule begins with two
            larger = range(2, 2 + len(SIZES))
            if len(self.plans) < larger[-1]:
                self.plans.append(self._plan(larger[-1]))
            try:
                return CutOfAnyBatch(self.plans, larger, layer_id, self._sizes)
            except CutRefused:
                raise error from None

    def _sizes(self, rows: int) -> tuple[int, ...]:
        """All sizes of all inputs."""
        return tuple(
            rows if grows and axis == self.rows.axis else size
            for form, grows in zip(self._forms, self.rows.batched, strict=True)
            for axis, size in enumerate(form.shape)
        )


def check_plan(plan: Plan) -> None:
    """Raises CutRefused for a way through the model on which rows may depend on each other whatever it computes."""
    if plan.trace.unsteady:
        raise CutRefused(plan.trace.unsteady)
    if plan.trace.dynamic:
        raise CutRefused("the model decides by what it reads from its data, and so by all rows of a batch")
    if plan.trace.dice:
        raise CutRefused("the model draws random numbers, which rows would share")


class CutOfAnyBatch:
    """One cut, foretold for any number of rows."""

    def __init__(
        self, plans: Sequence[Plan], ruling: Sequence[int], layer_id: int, sizes: Callable[[int], tuple[int, ...]]
    ) -> None:
        """``plans``: of 1, 2, ... rows, of which those of ``ruling`` make the rule; ``sizes``: of all inputs, by rows.
        Raises CutRefused where they make none, and at which more crosses than rows: what Python read, generators.
        """
        self.layer_id = layer_id
        self._first = plans[0]
        self._sizes = sizes
        known = [sizes(rows) for rows in ruling]
        moving = next(at for at, pair in enumerate(zip(known[0], known[1], strict=True)) if pair[0] != pair[1])
        chosen = [plans[rows - 1] for rows in ruling]
        narrow, wide = (Rule.of(known, chosen, moving, layer_id, wide=wide) for wide in (False, True))
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
        """Raises CutRefused where the rule gives none."""
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._foretold(rows, wide=False)
        return found

    def is_at(self, crossing: Crossing, rows: int) -> bool:
        """Whether this is the same cut, as it is planned or as it is foretold (storages whole)."""
        same = partial(_core, replace(crossing, context={}))
        return any(same() == _core(replace(self._foretold(rows, wide=wide), context={})) for wide in (False, True))

    def _foretold(self, rows: int, *, wide: bool) -> Crossing:
        if rows == 1:
            return self._first.cutting(self.layer_id, wide=wide)[1]
        found = self._rules[wide].at(self._sizes(rows))
        if found is None:
            raise CutRefused(f"no rule holds for {rows} rows: their plans differ in more than sizes")
        return found[2]


def _form_of(slot: Slot) -> tuple[torch.dtype, int]:
    return slot.dtype, len(slot.pieces)


def _core(crossing: Crossing) -> bytes:
    """What both sides must see alike. The context is compared before each tail, the plan's digest covers what follows,
    how pieces travel is over by then; and what a run was seen to leave behind (`Crossing.leaves`) hangs on what ran
    before it: a batch's tail may leave what this side has seen.
    """
    return replace(crossing, plan_digest="", leaves=(), books=(), cache={}).to_bytes()
