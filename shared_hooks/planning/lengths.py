"""Cuts for input sizes that were never planned, from those that were: a sequence of another length, another batch size.

Three plans that differ in one size, and otherwise do the same, tell how every number of a cut's description moves with
it: not at all, in a straight line, or as ``a L^2 + b L``; two of them make the rule, the third has to fit. Nothing is
believed for that: the head compares what it captures with what was foretold, storages cross whole, and the tail's side
finds shapes and path by itself and refuses what differs. Then the inputs are planned as any others.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
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
    """How one cut moves with the size at position ``first`` of all sizes."""

    def __init__(self, plan: Plan, cutting: Cutting, sized: SizedCrossing, captures: Moving, first: int) -> None:
        self.plan = plan
        self.cutting = cutting
        self.sized = sized
        self.captures = captures
        self.first = first

    @classmethod
    def of(cls, sizes: list[Sizes], plans: list[Plan], first: int, cut: Cut, *, wide: bool = True) -> Rule | None:
        """From three plans of these sizes; None where they differ in more than numbers. ``wide``: see `Plan.cutting`.
        Raises CutRefused, UnknownLayer.
        """
        cuts = [plan.cutting(cut, wide=wide) for plan in plans]
        items = [
            () if c.layer_id < 0 else tuple(p.trace.path_items(p.position(cut)))
            for p, (_, c) in zip(plans, cuts, strict=True)
        ]
        lengths = [known[first] for known in sizes]
        values = [(crossing, *more) for (_, crossing), *more in zip(cuts, items, sizes, strict=True)]
        sized = SizedCrossing.of(values, lengths)
        captures = Moving.of([cutting.captures for cutting, _ in cuts], lengths)
        if sized is None or captures is None:
            return None
        return cls(plans[-1], cuts[-1][0], sized, captures, first)

    def at(self, sizes: Sizes) -> tuple[Plan, Cutting, Crossing] | None:
        """The plan's numbers at these sizes; None where a number follows no rule."""
        crossing, captures = self.sized.at(sizes[self.first], sizes), self.captures.at(sizes[self.first])
        if crossing is None or captures is None:
            return None
        known = {name: getattr(crossing, name) for name in _PARTS[:-1]}
        cutting = dataclasses.replace(self.cutting, captures=captures, storages=(), **known)
        return self.plan, cutting, crossing


@dataclasses.dataclass(frozen=True, eq=False)
class SizedCrossing:
    """What crosses at one cut, for any size. ``crossing``: for one of them; ``largest``: the last that was compared."""

    crossing: Crossing
    _moving: Moving
    largest: int | None = None

    @classmethod
    def of(cls, values: Sequence[tuple[Any, ...]], lengths: Sequence[int]) -> SizedCrossing | None:
        """From crossings with their paths (`Trace.path_items`), and perhaps all sizes; None where more is unlike."""
        moving = Moving.of([(_parts(one[0]), one[1], one[2] if len(one) > 2 else ()) for one in values], lengths)
        return None if moving is None else cls(values[-1][0], moving)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that it was worked out from."""
        return self._moving.lengths

    def at(self, length: int, sizes: Sizes | None = None) -> Crossing | None:
        """None where a number follows no rule, or where not all sizes are ``sizes``, if given."""
        found = self._moving.at(length)
        if found is None:
            return None
        parts, items, foretold = found
        if sizes is not None and foretold != sizes:
            return None
        digest = PathDigest()
        for item in items:
            digest.item(item)
        path = digest.hexadecimal() if self.crossing.layer_id >= 0 else ""
        known = dict(zip(_PARTS, parts, strict=True))
        return dataclasses.replace(self.crossing, path_digest=path, plan_digest="", cache={}, **known)


_PARTS = ("slots", "marks", "fills", "given", "reads", "layouts", "inputs")


def _parts(crossing: Crossing) -> tuple[Any, ...]:
    return tuple(getattr(crossing, name) for name in _PARTS)


class Moving:
    """Nested values that are alike but for whole numbers, and how these move with a length."""

    def __init__(self, skeleton: Any, rows: list[tuple[int, ...]], lengths: tuple[int, ...]) -> None:
        self._skeleton = skeleton
        self._rows = rows
        self.lengths = lengths

    @classmethod
    def of(cls, values: Sequence[Any], lengths: Sequence[int]) -> Moving | None:
        """From the values at these lengths; None where they differ in more than numbers."""
        skeletons: list[Any] = []
        numbers: list[list[int]] = []
        for value in values:
            numbers.append([])
            skeletons.append(_apart(value, numbers[-1]))
            if skeletons[-1] != skeletons[0]:
                return None
        return cls(skeletons[0], list(zip(*numbers, strict=True)), tuple(lengths))

    def at(self, length: int) -> Any:
        """The value at another length; None where a number follows no rule."""
        memo: dict[tuple[int, ...], int | None] = {}
        for row in self._rows:
            if row not in memo:
                memo[row] = _at(row, self.lengths, length)
        return None if None in memo.values() else _together(self._skeleton, iter([memo[row] for row in self._rows]))

    def with_numbers(self, make: Callable[[Polynomial], Any]) -> Any:
        """The value with what ``make`` gives in place of each number that moves; None where one follows no rule."""
        found: list[Any] = []
        for row in self._rows:
            rule = (Fraction(0), Fraction(0), Fraction(row[0])) if len(set(row)) == 1 else _rule(row, self.lengths)
            if rule is None:
                return None
            found.append(row[0] if len(set(row)) == 1 else make(rule))
        return _together(self._skeleton, iter(found))


Polynomial = tuple[Fraction, Fraction, Fraction]
"""``a L^2 + b L + c``, of which a or c is 0."""


def _at(row: tuple[int, ...], lengths: tuple[int, ...], length: int) -> int | None:
    """The number at another length; None where no rule of the kinds that are known fits all samples."""
    if row.count(row[0]) == len(row):
        return row[0]
    rule = _rule(row, lengths)
    if rule is None:
        return None
    a, b, c = rule
    found = a * length * length + b * length + c
    return int(found) if found.denominator == 1 and found >= 0 else None


def _rule(row: tuple[int, ...], lengths: tuple[int, ...]) -> Polynomial | None:
    line = _line([Fraction(value) for value in row], lengths)
    if line is not None:
        return Fraction(0), *line
    slope = _line([Fraction(value, known) for value, known in zip(row, lengths, strict=True)], lengths)
    return None if slope is None else (*slope, Fraction(0))


def _line(values: list[Fraction], lengths: tuple[int, ...]) -> tuple[Fraction, Fraction] | None:
    slope = (values[1] - values[0]) / (lengths[1] - lengths[0])
    start = values[0] - slope * lengths[0]
    if any(start + slope * known != value for value, known in zip(values, lengths, strict=True)):
        return None
    return slope, start


@dataclasses.dataclass(frozen=True)
class _Number:
    """Stands for a number in a skeleton."""


def _apart(value: Any, numbers: list[int]) -> Any:
    """What is left of a nested value without its numbers, which are added to ``numbers``."""
    if type(value) is int:
        numbers.append(value)
        return _Number()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_apart(getattr(value, one.name), numbers) for one in dataclasses.fields(value)))
    if isinstance(value, dict):
        return (_as_dict, *(_apart(item, numbers) for item in value.items()))
    if isinstance(value, slice):
        return (_as_slice, *(_apart(item, numbers) for item in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, torch.Size) else type(value), *(_apart(item, numbers) for item in value))
    return value


def _together(skeleton: Any, numbers: Iterator[Any]) -> Any:
    """The reverse."""
    if isinstance(skeleton, _Number):
        return next(numbers)
    if type(skeleton) is not tuple:
        return skeleton
    kind, *parts = skeleton
    made = [_together(part, numbers) for part in parts]
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(*made)
    return kind(made)


def _as_dict(items: list[Any]) -> dict[Any, Any]:
    return dict(items)


def _as_slice(ends: list[Any]) -> slice:
    return slice(*ends)
