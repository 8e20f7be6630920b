"""Cuts for input sizes that were never planned, from those that were: a sequence of another length, another batch size.

Three plans that differ in one size, and otherwise do the same, tell how every number of a cut's description moves with
it: not at all, in a straight line, or as ``a L^2 + b L``; two of them make the rule, the third has to fit. Nothing is
believed for that: the head compares what it captures with what was foretold, storages cross whole, and the tail's side
finds shapes and path by itself and refuses what differs. Then the inputs are planned as any others.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch

from shared_hooks.crossing import Crossing, PathDigest
from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.planning.cutting import Cutting
from shared_hooks.planning.plan import Cut, Plan

SAMPLES = 3
MAX_FAMILIES = 16
MAX_PLANS = 6

Sizes = tuple[int, ...]


class Lengths:
    """Plans by family: what is alike in their inputs but for sizes. The caller guards it against threads."""

    def __init__(self) -> None:
        self._families: OrderedDict[Any, _Family] = OrderedDict()

    def add(self, family: Any, sizes: Sizes, plan: Plan) -> None:
        """A plan was made."""
        found = self._families.setdefault(family, _Family())
        self._families.move_to_end(family)
        found.add(sizes, plan)
        while len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)

    def foretold(self, family: Any, sizes: Sizes, cut: Cut) -> tuple[Plan, Cutting, Crossing] | None:
        """A plan of another size, and what the head does at this cut; None where no rule is known."""
        found = self._families.get(family)
        return None if found is None else found.foretold(sizes, cut)

    def forget(self, family: Any) -> None:
        """What was foretold was not so."""
        self._families.pop(family, None)


def family_of(key: Any, tensors: list[torch.Tensor]) -> tuple[Any, Sizes] | None:
    """What inputs share whatever their sizes, and the sizes. ``key``: all else that a plan hangs on. None for inputs
    that are not simply contiguous.
    """
    if not tensors or any(t.layout != torch.strided or not t.is_contiguous() for t in tensors):
        return None
    if len({t.untyped_storage()._cdata for t in tensors}) < len(tensors):
        return None
    forms = tuple((tensor.dtype, tensor.device, tensor.dim()) for tensor in tensors)
    return (key, forms), tuple(size for tensor in tensors for size in tensor.shape)


class _Family:
    def __init__(self) -> None:
        self.plans: OrderedDict[Sizes, Plan] = OrderedDict()
        self.rules: dict[Any, Rule | None] = {}

    def add(self, sizes: Sizes, plan: Plan) -> None:
        self.plans[sizes] = plan
        self.rules.clear()
        while len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)

    def foretold(self, sizes: Sizes, cut: Cut) -> tuple[Plan, Cutting, Crossing] | None:
        for moving in {tuple(a != b for a, b in zip(sizes, known, strict=True)) for known in self.plans}:
            if (cut, moving) not in self.rules:
                self.rules[cut, moving] = self._rule(sizes, moving, cut)
            rule = self.rules[cut, moving]
            if rule is not None:
                found = rule.at(sizes)
                if found is not None:
                    return found
        return None

    def _rule(self, sizes: Sizes, moving: tuple[bool, ...], cut: Cut) -> Rule | None:
        """From plans that have these sizes but for those that move."""
        like = [
            (known, plan)
            for known, plan in self.plans.items()
            if all(m or a == b for a, b, m in zip(sizes, known, moving, strict=True))
        ]
        first = moving.index(True) if True in moving else -1
        distinct = {known[first]: (known, plan) for known, plan in like} if first >= 0 else {}
        if len(distinct) < SAMPLES:
            return None
        chosen = list(distinct.values())[-SAMPLES:]
        try:
            if any(plan.layer_id(cut) < 0 for _, plan in chosen):
                return None  # all inputs cross: a plan of them says it as well
            return Rule.of([known for known, _ in chosen], [plan for _, plan in chosen], first, cut)
        except (CutRefused, UnknownLayer):
            return None


class Rule:
    """How the numbers of one cut move with the size at position ``first`` of all sizes."""

    def __init__(self, plan: Plan, cutting: Cutting, crossing: Crossing, skeleton: Any, first: int) -> None:
        self.plan = plan
        self.cutting = cutting
        self.crossing = crossing
        self.skeleton = skeleton
        self.first = first
        self.rows: list[tuple[int, ...]] = []
        self.lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: list[Sizes], plans: list[Plan], first: int, cut: Cut, *, wide: bool = True) -> Rule | None:
        """From three plans of these sizes; None where they differ in more than numbers. ``wide``: see `Plan.cutting`.
        Raises CutRefused, UnknownLayer.
        """
        made: Rule | None = None
        numbers: list[list[int]] = []
        for known, plan in zip(sizes, plans, strict=True):
            cutting, crossing = plan.cutting(cut, wide=wide)
            own: list[int] = []
            items = () if crossing.layer_id < 0 else tuple(plan.trace.path_items(plan.position(cut)))
            parts = _parts(cutting, crossing), items, known
            skeleton = _apart(parts, own)
            rule = cls(plan, cutting, crossing, skeleton, first)
            if made is not None and made.skeleton != skeleton:
                return None
            made = rule
            numbers.append(own)
        assert made is not None
        made.rows = list(zip(*numbers, strict=True))
        made.lengths = tuple(known[first] for known in sizes)
        return made

    def at(self, sizes: Sizes) -> tuple[Plan, Cutting, Crossing] | None:
        """The plan's numbers at these sizes; None where a number follows no rule."""
        length = sizes[self.first]
        memo: dict[tuple[int, ...], int | None] = {}
        numbers: list[int] = []
        for row in self.rows:
            if row not in memo:
                memo[row] = _at(row, self.lengths, length)
            value = memo[row]
            if value is None:
                return None
            numbers.append(value)
        parts, items, foretold_sizes = _together(self.skeleton, iter(numbers))
        if foretold_sizes != sizes:
            return None
        slots, marks, fills, given, reads, layouts, captures, inputs = parts
        digest = PathDigest()
        for item in items:
            digest.item(item)
        path = digest.hexadecimal() if self.crossing.layer_id >= 0 else ""
        known = {"slots": slots, "marks": marks, "fills": fills, "given": given, "reads": reads, "layouts": layouts}
        cutting = dataclasses.replace(self.cutting, captures=captures, storages=(), **known)
        crossing = dataclasses.replace(
            self.crossing, inputs=inputs, path_digest=path, plan_digest="", cache={}, **known
        )
        return self.plan, cutting, crossing


def _parts(cutting: Cutting, crossing: Crossing) -> tuple[Any, ...]:
    return (
        crossing.slots,
        crossing.marks,
        crossing.fills,
        crossing.given,
        crossing.reads,
        crossing.layouts,
        cutting.captures,
        crossing.inputs,
    )


def _at(row: tuple[int, ...], lengths: tuple[int, ...], length: int) -> int | None:
    """The number at another length; None where no rule of the kinds that are known fits all samples."""
    if row.count(row[0]) == len(row):
        return row[0]
    found = _line([Fraction(value) for value in row], lengths, length)
    if found is None and all(lengths):
        slope = _line([Fraction(value, known) for value, known in zip(row, lengths, strict=True)], lengths, length)
        found = None if slope is None else slope * length
    if found is None or found.denominator != 1 or found < 0:
        return None
    return int(found)


def _line(values: list[Fraction], lengths: tuple[int, ...], length: int) -> Fraction | None:
    slope = (values[1] - values[0]) / (lengths[1] - lengths[0])
    start = values[0] - slope * lengths[0]
    if any(start + slope * known != value for value, known in zip(values, lengths, strict=True)):
        return None
    return start + slope * length


class _Number:
    """Stands for a number in a skeleton."""

    def __repr__(self) -> str:
        return "#"


_NUMBER = _Number()


def _apart(value: Any, numbers: list[int]) -> Any:
    """What is left of a nested value without its numbers, which are added to ``numbers``."""
    if type(value) is int:
        numbers.append(value)
        return _NUMBER
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_apart(getattr(value, one.name), numbers) for one in dataclasses.fields(value)))
    if isinstance(value, (tuple, list)):
        return (type(value), *(_apart(item, numbers) for item in value))
    return value


def _together(skeleton: Any, numbers: Iterator[int]) -> Any:
    """The reverse."""
    if skeleton is _NUMBER:
        return next(numbers)
    if type(skeleton) is not tuple:
        return skeleton
    kind, *parts = skeleton
    made = [_together(part, numbers) for part in parts]
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(*made)
    return kind(made)
