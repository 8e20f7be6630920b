"""Cuts whose sizes vary, foretold from a model's example: another batch, or another length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import torch

from shared_hooks.batching.family import core
from shared_hooks.crossing import Crossing, NamedCrossing, decode, named_crossing
from shared_hooks.crossing.description import CALL
from shared_hooks.errors import CutRefused, IsthmusError, UnknownLayer
from shared_hooks.planning import Plan, Size, SizedCrossing
from shared_hooks.tensors import Structure, own_class, unflatten
from shared_hooks.wrapped import WrappedModel

BATCH: Final = "batch"
LENGTH: Final = "length"
BOTH: Final = "both"
_AXES: Final = {BATCH: (0,), LENGTH: (1,), BOTH: (0, 1)}
SAMPLES: Final = 3
"""Lengths or batches from which others follow; of two batches each where both move."""
LARGEST: Final = ((16, 8), (4, 4), (2, 2))
"""How many times the example's batch and length may be at most: the first that the model takes."""


class OtherSizes:
    """A model's example with another batch or length, or both: `plans` of it for some `sizes`, from which others
    follow, up to the last, the `largest`: there a plan is compared with the rule, for Python may do something else from
    a size on.

    What moves is axis 0 (``vary`` is `BATCH`), axis 1 (`LENGTH`) or both of all inputs that have the same size there as
    the first that has this axis; of lengths, the first of whole numbers. Raises CutRefused where nothing does, or where
    the model does not take it.
    """

    def __init__(self, wrapped: WrappedModel, structure: Structure, tensors: Sequence[torch.Tensor], vary: str) -> None:
        self.axes = _AXES[vary]
        self._structure = structure
        self._tensors = tensors
        tokens = [one for one in tensors if one.dim() > 1 and not one.is_floating_point()]
        if 1 in self.axes and not tokens:
            raise CutRefused(f"{vary}: no input is of tokens")
        first_with = {0: tensors, 1: tokens}
        own = {axis: next((one.shape[axis] for one in first_with[axis] if one.dim()), 0) for axis in self.axes}
        if not all(own.values()):
            raise CutRefused(f"{vary}: no input has one")
        self.free = {
            number: axes
            for number, one in enumerate(tensors)
            if (axes := tuple(axis for axis in self.axes if one.dim() > axis and one.shape[axis] == own[axis]))
        }
        """Numbers of the inputs whose size moves, and along which axes."""
        first = {axis: max(size, 2) for axis, size in own.items()}
        self.sizes = _grid([first[axis] for axis in self.axes])
        self.plans = [self._plan(wrapped, size) for size in self.sizes]
        for times in LARGEST:
            most = tuple(first[axis] * times[axis] + SAMPLES for axis in self.axes)
            largest: Size = most if len(most) == 2 else most[0]
            try:
                self.plans.append(self._plan(wrapped, largest))
            except CutRefused:
                continue
            self.sizes.append(largest)
            break
        else:
            raise CutRefused(f"{vary}: the model takes few more than {self.sizes[-1]}")
        self._known: dict[str, SizedCrossing] = {}

    @property
    def largest(self) -> dict[int, int]:
        """The largest size that is foretold, of each axis."""
        return dict(zip(self.axes, _sizes_of(self.sizes[-1]), strict=True))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each axis an input that has it."""
        return tuple(next((number, axis) for number, axes in self.free.items() if axis in axes) for axis in self.axes)

    def others(self) -> list[Size]:
        """Sizes to compare answers on: ones, some that no plan has, the largest."""
        last = _sizes_of(self.sizes[-2])
        few, more = (1,) * len(last), tuple(size + 2 for size in last)
        return [*(one if len(one) == 2 else one[0] for one in (few, more)), self.sizes[-1]]

    def _plan(self, wrapped: WrappedModel, size: Size) -> Plan:
        try:
            args, kwargs = unflatten(self._structure, self.inputs(size), own_class)
            return wrapped.plan(*args, **kwargs)
        except Exception as error:  # whatever a model raises for a size that it does not take
            raise CutRefused(f"the model does not take {size} along {self.axes}: {error}") from error

    def inputs(self, size: Size) -> list[torch.Tensor]:
        """The example at this size: its rows, over and over. New tensors."""
        wanted = dict(zip(self.axes, _sizes_of(size), strict=True))
        found = []
        for number, one in enumerate(self._tensors):
            made = one.clone()
            for axis in self.free.get(number, ()):
                rows = torch.arange(wanted[axis], device=one.device) % max(one.shape[axis], 1)
                made = made.index_select(axis, rows)
            found.append(made)
        return found

    def crossing(self, cut: str) -> SizedCrossing:
        """Raises CutRefused where plans give no rule, or the last another cut than that, and where shapes of what
        crosses do not tell the size: the server has nothing else to find it by, and the tail may use it.
        """
        if cut in self._known:
            return self._known[cut]
        sizes = [self._all_sizes(size) for size in self.sizes]
        try:
            sized = SizedCrossing.of_plans(self.plans[:-1], sizes[:-1], self.sizes[:-1], cut, wide=False)
            largest = None if sized is None else sized.at(self.sizes[-1], sizes[-1])
            if sized is None or largest is None or core(largest) != core(self.plans[-1].cutting(cut)[1]):
                raise CutRefused("plans of several sizes differ in more than sizes")
        except UnknownLayer as error:
            raise CutRefused(f"{error}") from error
        for size in (self.sizes[0], self.sizes[-2], *self.others()):
            known = sized.at(size)
            shapes = [] if known is None else [one.shape for one in named_crossing(known)]
            if _size_for(sized, (), shapes) != size:
                raise CutRefused(f"what crosses does not tell how large the inputs are ({size})")
        found = self._known[cut] = replace(sized, largest=self.sizes[-1])
        return found

    def _all_sizes(self, size: Size) -> tuple[int, ...]:
        """All sizes of all inputs."""
        wanted = dict(zip(self.axes, _sizes_of(size), strict=True))
        return tuple(
            wanted[axis] if axis in self.free.get(number, ()) else own
            for number, one in enumerate(self._tensors)
            for axis, own in enumerate(one.shape)
        )

    def described(self) -> str:
        """What all cuts share, as JSON: sizes, and what the model's forward calls and does at all but the last."""
        items = [[_as_json(item) for item in plan.trace.path_items(plan.trace.end)] for plan in self.plans[:-1]]
        return json.dumps({"sizes": self.sizes, "items": items})

    def cut_described(self, cut: str) -> str:
        """What is one cut's own, as JSON: `sized_crossing` makes of both what `crossing` is. Raises CutRefused."""
        self.crossing(cut)
        plans = self.plans[:-1]
        texts = [plan.cutting(cut)[1].to_bytes().decode() for plan in plans]
        return json.dumps(
            {"crossings": texts, "items": sum(1 for _ in plans[0].trace.path_items(plans[0].position(cut)))}
        )

    def shapes(self, cut: str, inputs: Sequence[str]) -> list[list[int]]:
        """Shapes of what crosses, with -1 where a size moves. Raises CutRefused."""
        return moving_shapes(self.crossing(cut), inputs)


def _grid(first: Sequence[int]) -> list[Size]:
    """The first sizes and a few more; of two, two batches with each length."""
    *batch, length = first
    lengths = [length + more for more in range(SAMPLES)]
    return [*lengths] if not batch else [(batch[0] + more, one) for more in range(2) for one in lengths]


def _sizes_of(size: Size) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


def _as_json(item: tuple[Any, ...]) -> list[Any]:
    if item[0] == CALL:
        return list(item)
    return [item[0], [[list(shape), str(dtype)] for shape, dtype in item[1]]]


@lru_cache(4096)
def sized_crossing(shared: str, own: str) -> SizedCrossing:
    """What `OtherSizes.described` and `cut_described` say."""
    known, cut = json.loads(shared), json.loads(own)
    values = []
    for text, items in zip(cut["crossings"], known["items"], strict=True):
        path = tuple(
            tuple(item) if item[0] == CALL else (item[0], [(tuple(shape), dtype) for shape, dtype in item[1]])
            for item in items[: cut["items"]]
        )
        values.append((decode(text.encode()), path))
    sizes: list[Size] = [tuple(one) if isinstance(one, list) else one for one in known["sizes"]]
    found = SizedCrossing.of(values, sizes[:-1])
    if found is None:
        raise CutRefused("what is said of several sizes differs in more than sizes")
    return replace(found, largest=sizes[-1])


def moving_shapes(sized: SizedCrossing, inputs: Sequence[str]) -> list[list[int]]:
    """Shapes of a `NamedCrossing`, with -1 where a size moves. Raises CutRefused."""
    known = [named_crossing(found, inputs) for at in sized.lengths if (found := sized.at(at)) is not None]
    shapes = [[one.shape for one in named] for named in known]
    return [
        [own[0] if len(set(own)) == 1 else -1 for own in zip(*alike, strict=True)]
        for alike in zip(*shapes, strict=True)
    ]


def for_shapes(
    sized: SizedCrossing, inputs: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[Crossing, NamedCrossing] | None:
    """What crosses where tensors by name have these shapes; None where they fit no size."""
    size = _size_for(sized, inputs, shapes)
    if size is None or any(
        not 1 <= one <= most for one, most in zip(_sizes_of(size), _sizes_of(sized.largest or size), strict=True)
    ):
        return None
    crossing = sized.at(size)
    if crossing is None:
        return None
    named = named_crossing(crossing, inputs)
    return (crossing, named) if [list(x.shape) for x in named] == [list(x) for x in shapes] else None


def _size_for(sized: SizedCrossing, inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> Size | None:
    """The size at which a tensor's size is that of ``shapes``: each by one that moves with it alone; where batch and
    length move, the other by one that moves with both.
    """
    wanted = [size for shape in shapes for size in shape]

    def at(size: Size) -> list[int]:
        found = sized.at(size)
        return [] if found is None else [size for one in named_crossing(found, inputs) for size in one.shape]

    first = sized.lengths[0]
    if not isinstance(first, tuple):
        return _solved(first, at(first), sized.lengths[1], at(sized.lengths[1]), wanted)  # type: ignore[arg-type]
    batch, length = first
    here, longer, wider = at(first), at((batch, length + 1)), at((batch + 1, length))
    by_batch = _solved(batch, here, batch + 1, wider, wanted, besides=longer)
    by_length = _solved(length, here, length + 1, longer, wanted, besides=wider)
    if by_batch is None and by_length is not None:
        by_batch = _solved(batch, at((batch, by_length)), batch + 1, at((batch + 1, by_length)), wanted)
    elif by_length is None and by_batch is not None:
        by_length = _solved(length, at((by_batch, length)), length + 1, at((by_batch, length + 1)), wanted)
    return None if by_batch is None or by_length is None else (by_batch, by_length)


def _solved(
    one: int, here: list[int], other: int, there: list[int], wanted: list[int], besides: list[int] | None = None
) -> int | None:
    """The number at which a size that is ``here`` at one number and ``there`` at the other is as ``wanted``, in a line;
    of sizes that are ``besides`` as they are here. None where none is, or it is no whole number.
    """
    if not len(here) == len(there) == len(wanted):
        return None
    for a, b, same, size in zip(here, there, besides or here, wanted, strict=True):
        if a != b and a == same:
            found = one + Fraction(size - a, b - a) * (other - one)
            return int(found) if found.denominator == 1 and found >= 1 else None
    return None


def other_sizes(wrapped: WrappedModel, structure: Structure, tensors: Sequence[torch.Tensor]) -> Iterator[OtherSizes]:
    """Those that the model takes: batch and length at once, or else a length; and a batch alone: more cuts tell it."""
    found: list[OtherSizes] = []
    for vary in (BOTH, LENGTH, BATCH):
        if vary == LENGTH and found:
            continue
        try:
            found.append(OtherSizes(wrapped, structure, tensors, vary))
        except IsthmusError:
            continue
    yield from found
