"""Cuts for input sizes without a plan, derived from other sizes: another sequence length, another batch size.

Three plans that differ in one size only show how every number of a cut's description depends on it: not at all,
linearly, or as ``a L^2 + b L``; two of them determine the rule, and the third must fit. The result is not trusted: the
head compares what it captures with the prediction, storages cross completely, and the tail's side determines shapes and
path itself and refuses differences. Then the inputs are planned as usual.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import lcm
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
Size = int | tuple[int, int]
"""The size that changes: a length or a batch; or a batch and a length."""


class Lengths:
    """Plans by family: inputs that are alike except for sizes. Not thread-safe."""

    def __init__(self) -> None:
        self._families: OrderedDict[Any, _Family] = OrderedDict()

    def add(self, family: Any, sizes: Sizes, plan: Plan) -> None:
        """Add a plan."""
        found = self._families.setdefault(family, _Family())
        self._families.move_to_end(family)
        found.add(sizes, plan)
        while len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)

    def predicted_plan(self, family: Any, sizes: Sizes, cut: Cut) -> tuple[Plan, Cutting, Crossing] | None:
        """Return a plan of another size, and what the head does at this cut; None without a rule."""
        found = self._families.get(family)
        return None if found is None else found.predicted_plan(sizes, cut)

    def forget(self, family: Any) -> None:
        """Forget a family whose prediction was wrong."""
        self._families.pop(family, None)


def family_of(key: Any, tensors: list[torch.Tensor]) -> tuple[Any, Sizes] | None:
    """Return what inputs share regardless of their sizes, and the sizes. ``key``: everything else that a plan depends
    on. None for inputs that are not contiguous.
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

    def predicted_plan(self, sizes: Sizes, cut: Cut) -> tuple[Plan, Cutting, Crossing] | None:
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
        """Return the rule from plans that have these sizes except for those that change."""
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
                return None  # all inputs cross: a plan of them has the same information
            return Rule.of([known for known, _ in chosen], [plan for _, plan in chosen], first, cut)
        except (CutRefused, UnknownLayer):
            return None


class Rule:
    """How one cut depends on the size at position ``first`` of all sizes."""

    def __init__(self, plan: Plan, cutting: Cutting, sized: SizedCrossing, captures: MovingSizes, first: int) -> None:
        self.plan = plan
        self.cutting = cutting
        self.sized = sized
        self.captures = captures
        self.first = first

    @classmethod
    def of(cls, sizes: list[Sizes], plans: list[Plan], first: int, cut: Cut, *, wide: bool = True) -> Rule | None:
        """Return the rule from three plans of these sizes; None if they differ in more than numbers. ``wide``: see
        `Plan.cutting`.

        Raises CutRefused, UnknownLayer.
        """
        lengths = [known[first] for known in sizes]
        sized = SizedCrossing.of_plans(plans, sizes, lengths, cut, wide=wide)
        cuttings = [plan.cutting(cut, wide=wide)[0] for plan in plans]
        captures = MovingSizes.of([cutting.captures for cutting in cuttings], lengths)
        if sized is None or captures is None:
            return None
        return cls(plans[-1], cuttings[-1], sized, captures, first)

    def at(self, sizes: Sizes) -> tuple[Plan, Cutting, Crossing] | None:
        """Return the plan's numbers at these sizes; None if a number follows no rule."""
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
    _moving: MovingSizes
    largest: Size | None = None

    @classmethod
    def of_plans(
        cls, plans: Sequence[Plan], sizes: Sequence[Sizes], lengths: Sequence[Size], cut: Cut, *, wide: bool
    ) -> SizedCrossing | None:
        """Combine plans of inputs of these ``sizes``; ``wide``: see `Plan.cutting`. Raises CutRefused, UnknownLayer."""
        cuts = [plan.cutting(cut, wide=wide)[1] for plan in plans]
        items = [
            () if crossing.layer_id < 0 else tuple(plan.trace.path_items(plan.position(cut)))
            for plan, crossing in zip(plans, cuts, strict=True)
        ]
        return cls.of([*zip(cuts, items, sizes, strict=True)], lengths)

    @classmethod
    def of(cls, values: Sequence[tuple[Any, ...]], lengths: Sequence[Size]) -> SizedCrossing | None:
        """Combine crossings with their paths (`Trace.path_items`), and possibly all sizes; None if they differ
        otherwise.
        """
        moving = MovingSizes.of([(_parts(one[0]), one[1], one[2] if len(one) > 2 else ()) for one in values], lengths)
        return None if moving is None else cls(values[-1][0], moving)

    @property
    def lengths(self) -> tuple[Size, ...]:
        """The sizes that it was derived from."""
        return self._moving.lengths

    def at(self, length: Size, sizes: Sizes | None = None) -> Crossing | None:
        """Return what crosses at this size; None if a number follows no rule, or not all sizes equal ``sizes``, if
        given.
        """
        found = self._moving.at(length)
        if found is None:
            return None
        parts, items, predicted_plan = found
        if sizes is not None and predicted_plan != sizes:
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


class MovingSizes:
    """Nested values that are equal except for integers, and how these depend on a size."""

    def __init__(self, skeleton: Any, rows: list[tuple[int, ...]], lengths: tuple[Size, ...]) -> None:
        self._skeleton = skeleton
        self._rows = rows
        self.lengths = lengths

    @classmethod
    def of(cls, values: Sequence[Any], lengths: Sequence[Size]) -> MovingSizes | None:
        """Combine the values at these sizes: three, or, if batch and length change, three lengths of one batch and the
        same of another; None if they differ in more than numbers.
        """
        skeletons: list[Any] = []
        numbers: list[list[int]] = []
        for value in values:
            numbers.append([])
            skeletons.append(_apart(value, numbers[-1]))
            if skeletons[-1] != skeletons[0]:
                return None
        return cls(skeletons[0], list(zip(*numbers, strict=True)), tuple(lengths))

    def at(self, length: Size) -> Any:
        """Return the value at another size; None if a number follows no rule."""
        memo: dict[tuple[int, ...], int | None] = {}
        for row in self._rows:
            if row not in memo:
                memo[row] = _at(row, self.lengths, length)
        return None if None in memo.values() else _together(self._skeleton, iter([memo[row] for row in self._rows]))

    def with_numbers(self, make: Callable[[Terms], Any]) -> Any:
        """Return the value with ``make`` of the terms in place of each number that changes; None if one follows no
        rule.
        """
        found: list[Any] = []
        for row in self._rows:
            rule = None if len(set(row)) == 1 else _rule(row, self.lengths)
            if rule is None and len(set(row)) > 1:
                return None
            found.append(row[0] if rule is None else make(rule))
        return _together(self._skeleton, iter(found))


Terms = tuple[tuple[int, int, Fraction], ...]
"""The sum of ``c B^i L^j``, each as (i, j, c); j is at most 2, and then no term is constant."""


def value_at(terms: Terms, size: Any) -> tuple[Any, int]:
    """Return a numerator and its denominator. ``size``: a length, or a batch and a length; also an exporter's
    symbols.
    """
    batch, length = size if isinstance(size, tuple) else (1, size)
    shared = lcm(*(factor.denominator for *_, factor in terms))
    found: Any = 0
    for of_batch, of_length, factor in terms:
        one: Any = int(factor * shared)
        for _ in range(of_length):
            one = one * length
        found = found + (one * batch if of_batch else one)
    return found, shared


def _at(row: tuple[int, ...], sizes: tuple[Size, ...], size: Size) -> int | None:
    """Return the number at another size; None if no known kind of rule fits all samples."""
    if row.count(row[0]) == len(row):
        return row[0]
    rule = _rule(row, sizes)
    if rule is None:
        return None
    found, shared = value_at(rule, size)
    return int(found // shared) if found % shared == 0 and found >= 0 else None


def _rule(row: tuple[int, ...], sizes: tuple[Size, ...]) -> Terms | None:
    """Terms by length, from the numbers of each of two batches; each factor is linear in the batch."""
    if not isinstance(sizes[0], tuple):
        factors = _by_length(row, sizes)  # type: ignore[arg-type]  # all are of a kind
        return None if factors is None else tuple((0, power, one) for power, one in enumerate(factors) if one)
    pairs: list[tuple[int, int]] = [*sizes]  # type: ignore[list-item]
    first, second = pairs[0][0], pairs[-1][0]
    found = []
    for batch in (first, second):
        mine = [(number, length) for number, (own, length) in zip(row, pairs, strict=True) if own == batch]
        found.append(_by_length(tuple(number for number, _ in mine), tuple(length for _, length in mine)))
    if found[0] is None or found[1] is None:
        return None
    terms = []
    for power, (one, other) in enumerate(zip(*found, strict=True)):
        slope = (other - one) / (second - first)
        terms += [(0, power, one - slope * first), (1, power, slope)]
    return tuple(term for term in terms if term[2])


def _by_length(row: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Fraction, Fraction, Fraction] | None:
    """Return the factors of 1, L and L^2, of which the first or the last is 0."""
    line = _line([Fraction(value) for value in row], lengths)
    if line is not None:
        return line[1], line[0], Fraction(0)
    slope = _line([Fraction(value, known) for value, known in zip(row, lengths, strict=True)], lengths)
    return None if slope is None else (Fraction(0), slope[1], slope[0])


def _line(values: list[Fraction], lengths: tuple[int, ...]) -> tuple[Fraction, Fraction] | None:
    slope = (values[1] - values[0]) / (lengths[1] - lengths[0])
    start = values[0] - slope * lengths[0]
    if any(start + slope * known != value for value, known in zip(values, lengths, strict=True)):
        return None
    return slope, start


@dataclasses.dataclass(frozen=True)
class _Number:
    """Takes the place of a number in a skeleton."""


def _apart(value: Any, numbers: list[int]) -> Any:
    """Return a nested value without its numbers, which are added to ``numbers``."""
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
    """Return the reverse of `_apart`."""
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
