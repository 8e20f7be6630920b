"""Cuts whose sizes vary, predicted from a model's example: another batch, or another length."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final
from weakref import ReferenceType, ref

import torch

from shared_hooks.batching.batches import Batches, Joinable
from shared_hooks.batching.family import core
from shared_hooks.batching.proof import Doubt, Proof, Seconds
from shared_hooks.crossing import Crossing, EarlyOutput, NamedCrossing, decode, named_crossing
from shared_hooks.crossing.description import CALL
from shared_hooks.errors import CutRefused, IsthmusError, UnknownLayer
from shared_hooks.planning import Plan, Size, SizedCrossing
from shared_hooks.tensors import Structure, own_class, unflatten
from shared_hooks.tensors.staging import wait
from shared_hooks.wrapped import WrappedModel

BATCH: Final = "batch"
LENGTH: Final = "length"
BOTH: Final = "both"
_AXES: Final = {BATCH: (0,), LENGTH: (1,), BOTH: (0, 1)}
SAMPLES: Final = 3
"""The number of lengths or batches from which others follow; of two batches each if both change."""
LARGEST: Final = ((16, 8), (4, 4), (2, 2))
"""Multiples of the example's batch and length that are tried as the largest; the first that the model accepts."""


class OtherSizes:
    """A model's example with another batch or length, or both: `plans` for some `sizes`, from which others follow, up
    to the last, the `largest`, where a plan is compared with the rule, because Python may behave differently from some
    size on.

    Axis 0 (``vary`` is `BATCH`), axis 1 (`LENGTH`) or both change in all inputs that have the same size there as the
    first that has this axis; for lengths, the first of integers. Raises CutRefused if none does, or the model does not
    accept it.
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
        """Numbers of the inputs whose size changes, and their axes."""
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
        """The largest size that is predicted, for each axis."""
        return dict(zip(self.axes, _sizes_of(self.sizes[-1]), strict=True))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each axis an input that has it."""
        return tuple(next((number, axis) for number, axes in self.free.items() if axis in axes) for axis in self.axes)

    def others(self) -> list[Size]:
        """Sizes to compare answers at: ones, some without a plan, the largest."""
        last = _sizes_of(self.sizes[-2])
        few, more = (1,) * len(last), tuple(size + 2 for size in last)
        return [*(one if len(one) == 2 else one[0] for one in (few, more)), self.sizes[-1]]

    def _plan(self, wrapped: WrappedModel, size: Size) -> Plan:
        try:
            args, kwargs = unflatten(self._structure, self.inputs(size), own_class)
            return wrapped.plan(*args, **kwargs)
        except Exception as error:  # a model may raise anything for a size that it does not accept
            raise CutRefused(f"the model does not take {size} along {self.axes}: {error}") from error

    def inputs(self, size: Size) -> list[torch.Tensor]:
        """Return the example at this size, with repeated rows. New tensors."""
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
        """Return the crossing for any size.

        Raises CutRefused if the plans give no rule, or the last one is not the same cut, and if the shapes of what
        crosses do not determine the size: the server has nothing else to find it by, and the tail may use it.
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
        """Return all sizes of all inputs."""
        wanted = dict(zip(self.axes, _sizes_of(size), strict=True))
        return tuple(
            wanted[axis] if axis in self.free.get(number, ()) else own
            for number, one in enumerate(self._tensors)
            for axis, own in enumerate(one.shape)
        )

    def described(self) -> str:
        """Return what all cuts share, as JSON: sizes, and what the model's forward calls and does at all but
        the last.
        """
        items = [[_as_json(item) for item in plan.trace.path_items(plan.trace.end)] for plan in self.plans[:-1]]
        return json.dumps({"sizes": self.sizes, "items": items})

    def cut_described(self, cut: str) -> str:
        """Return one cut's own part, as JSON: `sized_crossing` makes `crossing` of both. Raises CutRefused."""
        self.crossing(cut)
        plans = self.plans[:-1]
        texts = [plan.cutting(cut)[1].to_bytes().decode() for plan in plans]
        return json.dumps(
            {"crossings": texts, "items": sum(1 for _ in plans[0].trace.path_items(plans[0].position(cut)))}
        )

    def shapes(self, cut: str, inputs: Sequence[str]) -> list[list[int]]:
        """Return the shapes of what crosses, with -1 for sizes that change. Raises CutRefused."""
        return moving_shapes(self.crossing(cut), inputs)


def _grid(first: Sequence[int]) -> list[Size]:
    """Return the first sizes and a few more; for two, two batches with each length."""
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
    """Return the result of `OtherSizes.described` and `cut_described`."""
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
        raise CutRefused("descriptions of several sizes differ in more than sizes")
    return replace(found, largest=sizes[-1])


def moving_shapes(sized: SizedCrossing, inputs: Sequence[str]) -> list[list[int]]:
    """Return the shapes of a `NamedCrossing`, with -1 for sizes that change. Raises CutRefused."""
    known = [named_crossing(found, inputs) for at in sized.lengths if (found := sized.at(at)) is not None]
    shapes = [[one.shape for one in named] for named in known]
    return [
        [own[0] if len(set(own)) == 1 else -1 for own in zip(*alike, strict=True)]
        for alike in zip(*shapes, strict=True)
    ]


def for_shapes(
    sized: SizedCrossing, inputs: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[Crossing, NamedCrossing] | None:
    """Return what crosses if tensors by name have these shapes; None if they fit no size."""
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
    """Return the size that fits ``shapes``: each by one that depends on it alone; if batch and length change, the other
    by one that depends on both.
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
    """Return the number at which a size is as ``wanted``, given its linear values ``here`` and ``there`` at two
    numbers, among sizes equal to ``besides``. None if there is none, or it is no integer.
    """
    if not len(here) == len(there) == len(wanted):
        return None
    for a, b, same, size in zip(here, there, besides or here, wanted, strict=True):
        if a != b and a == same:
            found = one + Fraction(size - a, b - a) * (other - one)
            return int(found) if found.denominator == 1 and found >= 1 else None
    return None


def other_sizes(wrapped: WrappedModel, structure: Structure, tensors: Sequence[torch.Tensor]) -> Iterator[OtherSizes]:
    """Yield the variations that the model accepts: batch and length together, or else a length; and a batch alone,
    which determines more cuts.
    """
    found: list[OtherSizes] = []
    for vary in (BOTH, LENGTH, BATCH):
        if vary == LENGTH and found:
            continue
        try:
            found.append(OtherSizes(wrapped, structure, tensors, vary))
        except IsthmusError:
            continue
    yield from found


# From one cut to a later one: a request runs the middle part by itself, and joins a batch of those cut there.
#
# Up to the later cut nothing changes: a middle part produces exactly the bytes that a head produces there
# (`shared_hooks.middle`). After it, what joins, and what rows may influence, is as for requests that were cut there
# (`proof`).
#
# It pays off where a tail gains from more rows, and the middle is not most of it; this is not guessed: tails of
# several sizes and the middle are timed where they are tried, and whenever they run.


MAX_WAYS: Final = 256
MAX_CUTS: Final = 64
MAX_SURE: Final = 256
GAIN: Final = 0.05
"""The least gain, as a share of the time that both take separately; less is within measurement noise."""


@dataclass(frozen=True)
class BatchingCut:
    """A cut with batches; its proof is kept elsewhere."""

    batch_key: int
    form: Hashable
    position: int
    proof: ReferenceType[Proof]

    @classmethod
    def of(cls, joinable: Joinable) -> BatchingCut:
        return cls(joinable.batch_key, joinable.form, joinable.position, ref(joinable.proof))


@dataclass(frozen=True)
class LaterCut:
    """Some rows of a cut may run on to a later one, which takes ``seconds``. ``sure``: digests of descriptions from
    which it was seen to lead there.
    """

    seconds: Seconds = field(default_factory=Seconds)
    sure: set[str] = field(default_factory=set)


class Ways:
    """What is faster at the cuts of one model with batches. Thread-safe; `learn` one at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._lock = threading.Lock()
        self._cuts: OrderedDict[int, BatchingCut] = OrderedDict()
        """By batch key, the cut whose requests came last."""
        self._ways: OrderedDict[tuple[int, int, int], LaterCut | Doubt] = OrderedDict()
        """By batch key, rows, and the later key."""

    def record(self, joinable: Joinable) -> None:
        """Record a request at this cut."""
        with self._lock:
            self._cuts[joinable.batch_key] = BatchingCut.of(joinable)
            self._cuts.move_to_end(joinable.batch_key)
            while len(self._cuts) > MAX_CUTS:
                self._cuts.popitem(last=False)

    def learn(self, joinable: Joinable) -> bool:
        """Try the way to one later cut with requests of the same form, if there is an untried one; returns whether it
        did.

        Plans and runs the model.
        """
        with self._lock:
            later = [
                one for one in self._cuts.values() if one.form == joinable.form and one.position > joinable.position
            ]
            unknown = [one for one in later if self._known(joinable, one.batch_key) is None]
        if not unknown:
            return False
        last = unknown[-1]
        try:
            found: LaterCut | Doubt = self._tried(joinable, last)
        except IsthmusError as error:
            found = Doubt(str(error))
        with self._lock:
            self._ways[joinable.batch_key, joinable.rows, last.batch_key] = found
            while len(self._ways) > MAX_WAYS:
                self._ways.popitem(last=False)
        return True

    def _known(self, joinable: Joinable, last: int) -> LaterCut | Doubt | None:
        found = self._ways.get((joinable.batch_key, joinable.rows, last))
        return None if isinstance(found, Doubt) and found.is_over else found

    def _tried(self, joinable: Joinable, last: BatchingCut) -> LaterCut:
        if (proof := last.proof()) is None:
            raise CutRefused("requests no longer join there")
        early = joinable.proof.sample(joinable.rows)
        way = LaterCut()
        self.run(way, early, joinable.rows, proof)  # plans, and builds the middle part
        way.seconds.clear()
        self.run(way, early, joinable.rows, proof)
        return way

    def run(self, way: LaterCut, early: EarlyOutput, rows: int, last: Proof) -> EarlyOutput:
        """Return what crosses the later cut, of which ``last`` is the proof; ``early`` is not modified.

        Raises CutRefused if that is another cut than its batches have.
        """
        started = time.perf_counter()
        found: EarlyOutput = self._batches.wrapped.forward(replace(early, disposable=False), end=last.cut.cut)
        if early.crossing.digest not in way.sure:
            if not last.cut.is_at(found.crossing, rows):
                raise CutRefused("the middle part leads to another cut than the batch is of")
            if len(way.sure) < MAX_SURE:
                way.sure.add(early.crossing.digest)
        wait(self._batches.wrapped.device)
        way.seconds.add(rows, time.perf_counter() - started)
        return found

    def way(self, joinable: Joinable, last: int) -> LaterCut | None:
        """Return the span from a request's cut to the cut of another batch key."""
        with self._lock:
            found = self._known(joinable, last)
        return found if isinstance(found, LaterCut) else None

    def compatible_keys(self, batch_key: int, waiting: Callable[[int], int], most: int) -> list[int]:
        """Return the batch keys whose requests are worth joining with those of ``batch_key``: ``waiting`` returns the
        rows of a key that wait, or are taken, and a batch has at most ``most``.
        """
        with self._lock:
            pairs = [
                (first, rows, last, way)
                for (first, rows, last), way in self._ways.items()
                if isinstance(way, LaterCut)
                and batch_key in (first, last)
                and first in self._cuts
                and last in self._cuts
            ]
            cuts = dict(self._cuts)
        found = []
        for first, rows, last, way in pairs:
            other = last if first == batch_key else first
            if other not in found and self._pays(cuts[first], cuts[last], way, rows, waiting, most):
                found.append(other)
        return found

    def _pays(
        self, first: BatchingCut, last: BatchingCut, way: LaterCut, rows: int, waiting: Callable[[int], int], most: int
    ) -> bool:
        """Return whether rows take less time as one batch at the later cut than in the batches that each cut would
        have.
        """
        here, there = first.proof(), last.proof()
        ones, others = min(waiting(first.batch_key), most), min(waiting(last.batch_key), most)
        if not ones or not others or here is None or there is None:
            return False
        fits = min(1.0, most / (ones + others))  # of each; full batches gain nothing
        early, late = here.seconds.of(ones), there.seconds.of(others)
        middle, together = way.seconds.of(rows), there.seconds.of(round(fits * (ones + others)))
        if early is None or late is None or middle is None or together is None:
            return False
        return middle * fits * ones / rows + together < (1 - GAIN) * fits * (early + late)
