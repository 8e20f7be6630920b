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
from shared_hooks.planning import Plan, Rule, SizedCrossing
from shared_hooks.tensors import Structure, own_class, unflatten
from shared_hooks.wrapped import WrappedModel

BATCH: Final = "batch"
LENGTH: Final = "length"
_AXES: Final = {BATCH: 0, LENGTH: 1}
SAMPLES: Final = 3
LARGEST: Final = {BATCH: (16, 4, 2), LENGTH: (8, 4, 2)}
"""How many times the example's size sizes may be at most: the first that the model takes."""


class OtherSizes:
    """A model's example with another batch or length: `plans` of it for three `lengths`, from which others follow, up
    to a fourth, the `largest`: there a plan is compared with the rule, for Python may do something else from a size on.

    What moves is axis 0 (``vary`` is `BATCH`) or axis 1 (`LENGTH`) of all inputs that have the same size there as the
    first that has this axis. Raises CutRefused where nothing does, or where the model does not take it.
    """

    def __init__(self, wrapped: WrappedModel, structure: Structure, tensors: Sequence[torch.Tensor], vary: str) -> None:
        self.axis = _AXES[vary]
        self._structure = structure
        self._tensors = tensors
        known = [one.shape[self.axis] for one in tensors if one.dim() > self.axis]
        tokens = any(one.dim() > 1 and not one.is_floating_point() for one in tensors)
        if not known or not known[0] or (vary == LENGTH and not tokens):
            raise CutRefused(f"{vary}: no input has one")
        self.which = tuple(
            n for n, one in enumerate(tensors) if one.dim() > self.axis and one.shape[self.axis] == known[0]
        )
        """Numbers of the inputs whose size moves."""
        first = max(known[0], 2)
        lengths = [first + more for more in range(SAMPLES)]
        self.plans = [self._plan(wrapped, length) for length in lengths]
        for times in LARGEST[vary]:
            try:
                self.plans.append(self._plan(wrapped, first * times + SAMPLES))
            except CutRefused:
                continue
            lengths.append(first * times + SAMPLES)
            break
        else:
            raise CutRefused(f"{vary}: the model takes few more than {lengths[-1]}")
        self.lengths = tuple(lengths)
        self._known: dict[str, SizedCrossing] = {}

    @property
    def largest(self) -> int:
        """The largest size that is foretold."""
        return self.lengths[-1]

    def _plan(self, wrapped: WrappedModel, length: int) -> Plan:
        try:
            args, kwargs = unflatten(self._structure, self.inputs(length), own_class)
            return wrapped.plan(*args, **kwargs)
        except Exception as error:  # whatever a model raises for a size that it does not take
            raise CutRefused(f"the model does not take {length} along axis {self.axis}: {error}") from error

    def inputs(self, length: int) -> list[torch.Tensor]:
        """The example at this size: its rows, over and over. New tensors."""
        found = []
        for number, one in enumerate(self._tensors):
            rows = (
                torch.arange(length, device=one.device) % max(one.shape[self.axis], 1) if number in self.which else None
            )
            found.append(one.clone() if rows is None else one.index_select(self.axis, rows))
        return found

    def crossing(self, cut: str) -> SizedCrossing:
        """Raises CutRefused where three plans give no rule, or a fourth another cut than that."""
        if cut in self._known:
            return self._known[cut]
        sizes = [self._sizes(length) for length in self.lengths]
        first = next(at for at, (one, other) in enumerate(zip(*sizes[:2], strict=True)) if one != other)
        try:
            rule = Rule.of(sizes[:SAMPLES], self.plans[:SAMPLES], first, cut, wide=False)
            largest = None if rule is None else rule.sized.at(self.largest, sizes[-1])
            if rule is None or largest is None or core(largest) != core(self.plans[-1].cutting(cut)[1]):
                raise CutRefused("plans of several sizes differ in more than sizes")
        except UnknownLayer as error:
            raise CutRefused(f"{error}") from error
        found = self._known[cut] = replace(rule.sized, largest=self.largest)
        return found

    def _sizes(self, length: int) -> tuple[int, ...]:
        """All sizes of all inputs."""
        return tuple(
            length if number in self.which and axis == self.axis else size
            for number, one in enumerate(self._tensors)
            for axis, size in enumerate(one.shape)
        )

    def described(self) -> str:
        """What all cuts share, as JSON: sizes, and what the model's forward calls and does at the first three."""
        plans = self.plans[:SAMPLES]
        items = [[_as_json(item) for item in plan.trace.path_items(plan.trace.end)] for plan in plans]
        return json.dumps({"lengths": self.lengths[:SAMPLES], "largest": self.largest, "items": items})

    def cut_described(self, cut: str) -> str:
        """What is one cut's own, as JSON: `sized_crossing` makes of both what `crossing` is. Raises CutRefused."""
        self.crossing(cut)
        plans = self.plans[:SAMPLES]
        texts = [plan.cutting(cut)[1].to_bytes().decode() for plan in plans]
        return json.dumps(
            {"crossings": texts, "items": sum(1 for _ in plans[0].trace.path_items(plans[0].position(cut)))}
        )

    def shapes(self, cut: str, inputs: Sequence[str]) -> list[list[int]]:
        """Shapes of what crosses, with -1 where a size moves. Raises CutRefused."""
        return moving_shapes(self.crossing(cut), inputs)


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
    found = SizedCrossing.of(values, known["lengths"])
    if found is None:
        raise CutRefused("what is said of several sizes differs in more than sizes")
    return replace(found, largest=known["largest"])


def moving_shapes(sized: SizedCrossing, inputs: Sequence[str]) -> list[list[int]]:
    """Shapes of a `NamedCrossing`, with -1 where a size moves. Raises CutRefused."""
    one, other = (named_crossing(found, inputs) for at in sized.lengths[:2] if (found := sized.at(at)) is not None)
    return [
        [-1 if a != b else a for a, b in zip(mine.shape, theirs.shape, strict=True)]
        for mine, theirs in zip(one, other, strict=True)
    ]


def for_shapes(
    sized: SizedCrossing, inputs: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[Crossing, NamedCrossing] | None:
    """What crosses where tensors by name have these shapes; None where they fit no size."""
    one, other = (named_crossing(found, inputs) for at in sized.lengths[:2] if (found := sized.at(at)) is not None)
    for mine, theirs, shape in zip(one, other, shapes, strict=True):
        for a, b, size in zip(mine.shape, theirs.shape, shape, strict=True):
            if a != b:
                length = sized.lengths[0] + Fraction(size - a, b - a) * (sized.lengths[1] - sized.lengths[0])
                if length.denominator != 1 or not 1 <= length <= (sized.largest or length):
                    return None
                crossing = sized.at(int(length))
                if crossing is None:
                    return None
                named = named_crossing(crossing, inputs)
                return (crossing, named) if [list(x.shape) for x in named] == [list(x) for x in shapes] else None
    return None


def other_sizes(wrapped: WrappedModel, structure: Structure, tensors: Sequence[torch.Tensor]) -> Iterator[OtherSizes]:
    """Those that the model takes."""
    for vary in (BATCH, LENGTH):
        try:
            yield OtherSizes(wrapped, structure, tensors, vary)
        except IsthmusError:
            continue
