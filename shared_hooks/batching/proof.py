"""Whether the rows of a batch are independent of each other behind a cut: tested on random data, before it is used.

Three plans have identified the rows' dimension of every tensor. Here the tail itself runs: rows together give what they
give alone, within rounding; in another order, the same in that order; and whatever one row contains (another sample,
NaN everywhere), the others are equal to the last bit. A new number of rows is tested once more. What chosen data could
do and random data do not is detected by the kernels (`KernelWatch`).
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.batching.family import SIZES, CutOfAnyBatch, Family, Growth, growth
from shared_hooks.crossing import Crossing, EarlyOutput, Slot
from shared_hooks.errors import CutRefused, InputMismatch
from shared_hooks.forward import arguments_of
from shared_hooks.planning import Cut
from shared_hooks.tensors import Structure, flatten
from shared_hooks.tensors.staging import wait

# Joins several frontiers of one cut into the frontier of their batch, and splits the batch's output.
#
# Pure functions: their arguments name the batch dimension of each tensor, and nothing is looked up.


@dataclass(frozen=True, slots=True)
class BatchPart:
    """``rows`` of a batch: their frontier, and their cut as the batch's plans describe it."""

    early: EarlyOutput
    rows: int
    crossing: Crossing


def joined(parts: Sequence[BatchPart], crossing: Crossing, pieces: Sequence[Growth | None]) -> EarlyOutput:
    """Return the frontier of all rows, in the order of ``parts``, in memory of its own, so that a tail may write to it.

    ``crossing``: the cut for so many rows; ``pieces``: how each of its pieces grows. A piece that does not grow must be
    equal in all parts, bit for bit; raises InputMismatch otherwise.
    """
    several = [_pieces(part) for part in parts]
    rows = [part.rows for part in parts]
    shapes = [piece.shape for slot in crossing.slots for piece in slot.pieces]
    made = []
    for number, (grows, shape) in enumerate(zip(pieces, shapes, strict=True)):
        own = [one[number] for one in several]
        if grows is None:
            if not all(_same(own[0], other) for other in own[1:]):
                raise InputMismatch(
                    f"piece {number} of the frontier belongs to no row, and is not the same in all parts"
                )
            made.append(own[0].clone())
            continue
        rowed = [piece.reshape(grows.at(count)) for piece, count in zip(own, rows, strict=True)]
        made.append(torch.cat(rowed, grows.axis).reshape(shape))
    return EarlyOutput(crossing, tuple(made), (), disposable=True)


def apart(
    tensors: Sequence[torch.Tensor], rows: Sequence[int], grows: Sequence[Growth | None]
) -> list[list[torch.Tensor]]:
    """Split the tensors of a batch's output into those of its parts, of ``rows`` rows each; a tensor without a batch
    dimension goes to every part. Parts may share memory.
    """
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for tensor, one in zip(tensors, grows, strict=True):
        if one is None:
            for own in found:
                own.append(tensor)
            continue
        for own, part in zip(found, tensor.split([one.each * count for count in rows], one.axis), strict=True):
            own.append(part)
    return found


def _pieces(part: BatchPart) -> list[torch.Tensor]:
    """Return the part's pieces as the batch's plans have them: of a storage that came completely, what is read
    of it.
    """
    found: list[torch.Tensor] = []
    pieces = iter(part.early.pieces)
    for sent, wanted in zip(part.early.crossing.slots, part.crossing.slots, strict=True):
        own = [next(pieces) for _ in sent.pieces]
        if sent.pieces == wanted.pieces:
            found += own
        else:
            assert is_whole(sent), "parts are of a known cut, or whole storages"
            whole = own[0].reshape(-1)
            found += [
                whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset)
                for view in wanted.pieces
            ]
    return found


def is_whole(slot: Slot) -> bool:
    """Return whether all of its storage crosses, unchanged."""
    return len(slot.pieces) == 1 and slot.pieces[0].shape == (slot.elements,) and slot.pieces[0].offset == 0


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.reshape(-1), other.reshape(-1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# What no trial on random data can show of rows: a tail in which data decide, where rows may influence each other.
#
# A mixture of experts with capacity gives each row its place until an expert is full: random rows never fill it, and
# chosen rows do. So a proof fails where integers or truth values computed from floating-point numbers are used for
# more than element-wise choice (counted, sorted, used as indices) or returned, where a cumulative or sorting kernel
# runs along the rows, and where a size is neither the same for all numbers of rows nor proportional to it.

_ORDERS = frozenset(
    """
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk kthvalue median nanmedian mode cumsum_ cumprod_ _cummax
    cumulative_trapezoid unique_dim unique_consecutive
    """.split()
)
# They return a copy, a form or a part of their argument.
_PLAIN = frozenset(
    """
    clone copy_ _to_copy where masked_fill masked_fill_ detach alias cat stack constant_pad_nd repeat expand_copy
    lift_fresh contiguous is_same_size
    """.split()
)


class KernelWatch(TorchDispatchMode):
    """Watches the kernels of one tail. Raises CutRefused, naming the kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[str, tuple[int, ...]]] = []
        """What kernels returned: names, and sizes of results; for sorting kernels, the length that they sort."""
        self._decided: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = arguments_of(args, kwargs)
        decided = [one for one in given if _key(one) in self._decided]
        chooses = torch.Tag.pointwise in func.tags or name in _PLAIN
        is_view = all(one.alias_info is not None for one in func._schema.returns)
        if decided and not chooses and not is_view:
            raise CutRefused(f"{name}() takes integers or truth values that come of data: rows may meet there")
        found = func(*args, **kwargs)
        made = arguments_of((found,), {})
        floats = any(one.is_floating_point() or one.is_complex() for one in given)
        all_decided = bool(decided) and len(decided) == len(given)
        for one in made:
            is_number = one.is_floating_point() or one.is_complex()
            if (not is_number and (floats or decided)) or (is_number and all_decided):
                self._decided[_key(one)] = one
        length = (given[0].shape[_dim(func, args, kwargs)],) if name in _ORDERS and given and given[0].dim() else ()
        self.sizes += [(name, (*one.shape, *length)) for one in made]
        return found

    def check_result(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check a tail's results. Raises CutRefused if data has decided them."""
        if any(_key(one) in self._decided for one in tensors):
            raise CutRefused("it gives integers or truth values that come of data, which rounding may change")


def check_sizes(seen: Sequence[KernelWatch], rows: Sequence[int]) -> None:
    """Compare tails of ``rows`` rows each; the first, of one row, may take another path. Raises CutRefused."""
    names = [[name for name, _ in one.sizes] for one in seen]
    if rows[0] == 1 and names[0] != names[1]:
        seen, rows, names = seen[1:], rows[1:], names[1:]
    if any(one != names[0] for one in names):
        raise CutRefused("it takes another path for another number of rows")
    for several in zip(*(one.sizes for one in seen), strict=True):
        name = several[0][0]
        if len({len(one[1]) for one in several}) > 1:
            raise CutRefused("it takes another path for another number of rows")
        for number, sizes in enumerate(zip(*(one[1] for one in several), strict=True)):
            if len(set(sizes)) == 1:
                continue
            shares = {size * rows[0] == sizes[0] * count for size, count in zip(sizes, rows, strict=True)}
            if shares != {True}:
                raise CutRefused(f"{name}() gives a size of {sizes} for {tuple(rows)} rows")
            if name in _ORDERS and number == len(several[0][1]) - 1:
                raise CutRefused(f"{name}() runs along the rows")


def _dim(func: Any, args: Any, kwargs: Any) -> int:
    """Return the dimension that a kernel works along; by default the last."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            value = args[number] if number < len(args) else kwargs.get("dim", argument.default_value)
            return value if isinstance(value, int) else -1
    return -1


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


ROUNDINGS = 256
"""The tolerated difference of results, as root mean square in units of the dtype's rounding: a tail of many layers adds
up in different orders for one row and for several.
"""
MOST_APART = 0.05
"""The tolerated difference for any dtype."""

REFUSAL_SECONDS = 300.0
"""How long a refusal is valid."""

Tensors = list[torch.Tensor]


class Doubt:
    """Why there are no batches, for a while."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._until = time.monotonic() + REFUSAL_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether it is time to verify again."""
        return self._until < time.monotonic()


class Proof:
    """The proof for one cut and form of inputs, for tails or, with ``end``, for what runs up to that later cut. Raises
    CutRefused if it fails. Not thread-safe.

    ``structure``: of the output. ``last``: the later cut, whose pieces are then the output.
    """

    def __init__(self, family: Family, cut: Cut, end: str = "") -> None:
        self.cut: CutOfAnyBatch = family.cut(cut)
        self.last: CutOfAnyBatch | None = family.cut(end) if end else None
        self.wrapped = family.wrapped
        self._parts = [self._sample(family, rows) for rows in SIZES]
        seen = [KernelWatch() for _ in SIZES]
        alone = [self._watched(part, one) for part, one in zip(self._parts, seen, strict=True)]
        check_sizes(seen, SIZES)
        self.structure: Structure = alone[0][0]
        if any(structure != self.structure for structure, _ in alone):
            raise CutRefused(f"outputs of {SIZES} rows differ in more than one size")
        self.outputs = _growths([tensors for _, tensors in alone]) if self.last is None else self.last.pieces
        self._alone = [tensors for _, tensors in alone]
        self.most: float = math.inf
        """The largest number of rows, as far as known: a larger one exceeded the rehearsal's limits."""
        self.doubt: Doubt | None = None
        """A failure of its batches."""
        self._tried: set[int] = set()
        self._prove([self._sample(family, rows) for rows in SIZES])
        self.seconds = Seconds()
        """The durations of its tails, including joining."""
        for part in (self._parts[0], self._parts[-1]) * 2:
            self._time([part])
        self._time(self._parts)

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps to test other sizes."""
        kept = [piece for part in self._parts for piece in part.early.pieces]
        return sum(tensor.nbytes for tensor in [*kept, *(one for own in self._alone for one in own)])

    def joined(self, earlies: Sequence[EarlyOutput], rows: Sequence[int]) -> EarlyOutput:
        """Several frontiers as one; see `joined`."""
        parts = [BatchPart(early, count, self.cut.at(count)) for early, count in zip(earlies, rows, strict=True)]
        return joined(parts, self.cut.at(sum(rows)), self.cut.pieces)

    def apart(self, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[Tensors]:
        """Return the tensors of the batch's output for each of its parts. Raises CutRefused for other sizes than
        predicted.
        """
        pairs = zip(tensors, self.outputs, strict=False)
        expected = [tuple(tensor.shape) if one is None else one.at(sum(rows)) for tensor, one in pairs]
        if [tuple(tensor.shape) for tensor in tensors] != expected:
            raise CutRefused(f"a batch of {sum(rows)} rows gave another form of output than smaller ones predicted")
        return apart(tensors, rows, self.outputs)

    def output(self, early: EarlyOutput, rows: int) -> tuple[Structure, Tensors]:
        """Run the tail, or the middle part up to the later cut, on a batch of ``rows`` rows.

        Raises the model's errors, and CutRefused if something else crosses than planned.
        """
        if self.last is None:
            return flatten(self.wrapped.tail(early))
        found: EarlyOutput = self.wrapped.forward(early, end=self.last.cut)
        if found.crossing.slots != self.last.at(rows).slots:
            raise CutRefused(f"up to {found.layer_name} {rows} rows lead to another cut than their plans say")
        pairs = zip(found.pieces, self.last.pieces, strict=True)
        return ["cut"], [piece if own is None else piece.reshape(own.at(rows)) for piece, own in pairs]

    def crossing(self, own: Tensors, rows: int, target: Crossing) -> EarlyOutput:
        """Return what crosses the later cut of one request; ``own``: its part of the batch, ``target``: its description
        there.

        Raises CutRefused if that is another cut.
        """
        assert self.last is not None
        if target.slots != self.last.at(rows).slots or target.reads or target.generators:
            raise CutRefused("the middle part leads to another cut than the batch is of")
        shapes = [piece.shape for slot in target.slots for piece in slot.pieces]
        pieces = [tensor.reshape(shape) for tensor, shape in zip(own, shapes, strict=True)]
        return EarlyOutput(target, tuple(pieces), ())

    def sample(self, rows: int) -> EarlyOutput:
        """Return a frontier of so many rows of random inputs. Raises CutRefused for more than it keeps."""
        for part in self._parts:
            if part.rows == rows:
                return part.early
        raise CutRefused(f"requests of {rows} rows run on to no later cut")

    def knows(self, rows: int) -> bool:
        """Return whether a batch of so many rows was tested."""
        return rows in self._tried

    def check(self, rows: int) -> None:
        """Test a batch of so many rows. Raises CutRefused if the results differ from those alone, and what a tail
        raises.
        """
        whole, left = divmod(rows, sum(SIZES))
        order = list(islice(cycle(range(len(SIZES))), len(SIZES) * whole))
        order += {0: [], 1: [0], 2: [1], 3: [2], 4: [0, 2], 5: [1, 2]}[left]
        self._compare(order, f"{rows} rows together")
        self._tried.add(rows)

    def _sample(self, family: Family, rows: int) -> BatchPart:
        args, kwargs = family.inputs(rows)
        return BatchPart(self.wrapped.head(self.cut.cut, *args, **kwargs), rows, self.cut.at(rows))

    def _watched(self, part: BatchPart, decisions: KernelWatch) -> tuple[Structure, Tensors]:
        """Return a tail's output, after checking that no kernel may mix rows."""
        self.output(part.early, part.rows)  # rehearsing and building are not the tail's own time
        with decisions:
            structure, tensors = self.output(part.early, part.rows)
        decisions.check_result(tensors)
        return structure, tensors

    def _prove(self, others: list[BatchPart]) -> None:
        together = self._compare([0, 1, 2], "rows together")
        self._compare([2, 0, 1], "rows in another order")
        for number in range(len(SIZES)):
            for altered in (others[number], _poisoned(self._parts[number], self.cut.pieces)):
                parts = [*self._parts[:number], altered, *self._parts[number + 1 :]]
                found = self._run(parts)
                for other in range(len(SIZES)):
                    if other != number and not all(map(_identical, found[other], together[other])):
                        raise CutRefused("what is in one row of a batch changes other rows")
        self._tried.add(sum(SIZES))

    def _compare(self, order: list[int], what: str) -> list[Tensors]:
        found = self._run([self._parts[number] for number in order])
        for number, own in zip(order, found, strict=True):
            pairs = zip(self.outputs, own, self._alone[number], strict=True)
            if not all(agree(a, b) if grows is not None else _identical(a, b) for grows, a, b in pairs):
                raise CutRefused(f"{what} do not give what they give alone")
        return found

    def _time(self, parts: Sequence[BatchPart]) -> None:
        started = time.perf_counter()
        self._run(parts)
        wait(self.wrapped.device)
        self.seconds.add(sum(part.rows for part in parts), time.perf_counter() - started)

    def _run(self, parts: Sequence[BatchPart]) -> list[Tensors]:
        """Return the outputs of each part, from one tail."""
        rows = [part.rows for part in parts]
        structure, tensors = self.output(self.joined([part.early for part in parts], rows), sum(rows))
        if structure != self.structure:
            raise CutRefused(f"a batch of {sum(rows)} rows gave another form of output than smaller ones")
        return self.apart(tensors, rows)


def _growths(outputs: Sequence[Tensors]) -> tuple[Growth, ...]:
    found = []
    for several in zip(*outputs, strict=True):
        one = growth([tuple(tensor.shape) for tensor in several])
        if one is None:
            raise CutRefused("an output has no dimension of its rows")
        found.append(one)
    return tuple(found)


def _poisoned(part: BatchPart, grows: Sequence[Growth | None]) -> BatchPart:
    """Return the values with NaN wherever possible, except in what belongs to no row."""
    pieces = [
        torch.full_like(piece, torch.nan) if own is not None and piece.dtype.is_floating_point else piece
        for piece, own in zip(part.early.pieces, grows, strict=True)
    ]
    return BatchPart(replace(part.early, pieces=tuple(pieces)), part.rows, part.crossing)


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether they are equal to the last bit, except for zeros' signs; all NaNs are equal."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results are equal within rounding; non-finite numbers and integers exactly."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()) or not _identical(one[~finite], other[~finite]):
        return False
    if not bool(finite.any()):
        return True
    bound = min(ROUNDINGS * torch.finfo(one.dtype).eps, MOST_APART)
    return _size(one[finite] - other[finite]) <= bound * _size(other[finite])


def _size(tensor: torch.Tensor) -> float:
    """Return the root mean square."""
    return float(tensor.abs().double().square().mean().sqrt())


# Durations of a tail by its number of rows, as measured on this machine.


LAST: Final = 8
"""The number of recent measurements per number of rows."""
MAX_SIZES: Final = 64


class Seconds:
    """Durations by the number of rows. Thread-safe: workers add to what others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Add a measurement."""
        with self._lock:
            if rows in self._seen or len(self._seen) < MAX_SIZES:
                self._seen.setdefault(rows, deque(maxlen=LAST)).append(seconds)

    def clear(self) -> None:
        """Discard the measurements of first runs."""
        with self._lock:
            self._seen.clear()

    def of(self, rows: int) -> float | None:
        """Return the expected duration for ``rows``: the median of its measurements, or interpolated between its
        neighbours. None if too little is known.
        """
        with self._lock:
            return self._of(rows)

    def _of(self, rows: int) -> float | None:
        sizes = sorted(self._seen)
        if rows in self._seen:
            return self._median(rows)
        if len(sizes) < 2:
            return None
        at = min(max(1, bisect_left(sizes, rows)), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = max(0.0, self._median(high) - self._median(low)) / (high - low)
        return max(0.0, self._median(low) + slope * (rows - low))

    def _median(self, rows: int) -> float:
        seen = sorted(self._seen[rows])
        return seen[len(seen) // 2]
