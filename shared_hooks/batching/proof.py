"""Whether the rows of a batch are independent of each other behind a cut: tried on random data, before it is used.

Three plans have said which dimension of every tensor the rows are in. Here the tail itself runs: rows together give
what they give alone, within rounding; in another order, the same in that order; and whatever is in one row (another
sample, NaN everywhere), the others are the same to the last bit. A number of rows that is new is tried once more. What
chosen data could do and random data do not is looked for in the kernels (`decisions`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch

from shared_hooks.batching.decisions import Decisions, check_sizes
from shared_hooks.batching.family import CutOfAnyBatch, Family
from shared_hooks.batching.growth import SIZES, Growth, growth
from shared_hooks.batching.joining import Part, apart, joined
from shared_hooks.batching.times import Seconds
from shared_hooks.crossing import EarlyOutput
from shared_hooks.errors import CutRefused
from shared_hooks.tensors import Structure, flatten
from shared_hooks.tensors.staging import wait

ROUNDINGS = 256
"""How far results may differ, by root mean square, in units of the dtype's rounding: a tail of many layers adds up in
different orders for one row and for several."""
MOST_APART = 0.05
"""... and of no dtype more than this."""

REFUSAL_SECONDS = 300.0
"""How long a doubt is believed without another look."""

Tensors = list[torch.Tensor]


class Doubt:
    """Why there is no batch, for now."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._until = time.monotonic() + REFUSAL_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether it is time to look again."""
        return self._until < time.monotonic()


class Proof:
    """Of one cut and form of inputs; `joined` and `apart` are for requests of it. Raises CutRefused when it fails.

    ``structure``: of the output. One thread at a time.
    """

    def __init__(self, family: Family, layer_id: int) -> None:
        self.cut: CutOfAnyBatch = family.cut(layer_id)
        self.wrapped = family.wrapped
        self._parts = [self._sample(family, layer_id, rows) for rows in SIZES]
        seen = [Decisions() for _ in SIZES]
        alone = [self._watched(part, one) for part, one in zip(self._parts, seen, strict=True)]
        check_sizes(seen, SIZES)
        self.structure: Structure = alone[0][0]
        if any(structure != self.structure for structure, _ in alone):
            raise CutRefused(f"outputs of {SIZES} rows differ in more than one size")
        self.outputs = _growths([tensors for _, tensors in alone])
        self._alone = [tensors for _, tensors in alone]
        self.most: float = math.inf
        """Rows of a batch, as far as is known: a larger one was more than the rehearsal's limits allow."""
        self.doubt: Doubt | None = None
        """What came of its batches."""
        self._tried: set[int] = set()
        self._prove([self._sample(family, layer_id, rows) for rows in SIZES])
        self.seconds = Seconds()
        """What its tails take, joining included."""
        for part in (self._parts[0], self._parts[-1]) * 2:
            self._time([part])
        self._time(self._parts)

    @property
    def nbytes(self) -> int:
        """Memory of what it keeps, to try other sizes."""
        kept = [piece for part in self._parts for piece in part.early.pieces]
        return sum(tensor.nbytes for tensor in [*kept, *(one for own in self._alone for one in own)])

    def joined(self, earlies: Sequence[EarlyOutput], rows: Sequence[int]) -> EarlyOutput:
        """One frontier of several; see `joining.joined`."""
        parts = [Part(early, count, self.cut.at(count)) for early, count in zip(earlies, rows, strict=True)]
        return joined(parts, self.cut.at(sum(rows)), self.cut.pieces)

    def apart(self, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[Tensors]:
        """The tensors of the batch's output, for each of its parts. Raises CutRefused for other sizes than foretold."""
        expected = [one.at(sum(rows)) for one in self.outputs]
        if [tuple(tensor.shape) for tensor in tensors] != expected:
            raise CutRefused(f"a batch of {sum(rows)} rows gave another form of output than smaller ones foretold")
        return apart(tensors, rows, self.outputs)

    def sample(self, rows: int) -> EarlyOutput:
        """A frontier of so many rows, of random inputs. Raises CutRefused for more than it keeps."""
        for part in self._parts:
            if part.rows == rows:
                return part.early
        raise CutRefused(f"requests of {rows} rows run on to no later cut")

    def knows(self, rows: int) -> bool:
        """Whether a batch of so many rows was tried."""
        return rows in self._tried

    def check(self, rows: int) -> None:
        """Tries a batch of so many rows. Raises CutRefused where they are not as alone, and what a tail raises."""
        whole, left = divmod(rows, sum(SIZES))
        order = list(islice(cycle(range(len(SIZES))), len(SIZES) * whole))
        order += {0: [], 1: [0], 2: [1], 3: [2], 4: [0, 2], 5: [1, 2]}[left]
        self._compare(order, f"{rows} rows together")
        self._tried.add(rows)

    def _sample(self, family: Family, layer_id: int, rows: int) -> Part:
        args, kwargs = family.inputs(rows)
        return Part(self.wrapped.head(layer_id, *args, **kwargs), rows, self.cut.at(rows))

    def _watched(self, part: Part, decisions: Decisions) -> tuple[Structure, Tensors]:
        """A tail's output, of what nothing was seen in which rows might meet."""
        self.wrapped.tail(part.early)  # what is rehearsed and built is not the tail's own
        with decisions:
            output = self.wrapped.tail(part.early)
        structure, tensors = flatten(output)
        decisions.check_result(tensors)
        return structure, tensors

    def _prove(self, others: list[Part]) -> None:
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
            if not all(map(agree, own, self._alone[number])):
                raise CutRefused(f"{what} do not give what they give alone")
        return found

    def _time(self, parts: Sequence[Part]) -> None:
        started = time.perf_counter()
        self._run(parts)
        wait(self.wrapped.device)
        self.seconds.add(sum(part.rows for part in parts), time.perf_counter() - started)

    def _run(self, parts: Sequence[Part]) -> list[Tensors]:
        """The outputs of each part, from one tail."""
        rows = [part.rows for part in parts]
        structure, tensors = flatten(self.wrapped.tail(self.joined([part.early for part in parts], rows)))
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


def _poisoned(part: Part, grows: Sequence[Growth | None]) -> Part:
    """With NaN wherever it can be, but in what belongs to no row."""
    pieces = [
        torch.full_like(piece, torch.nan) if own is not None and piece.dtype.is_floating_point else piece
        for piece, own in zip(part.early.pieces, grows, strict=True)
    ]
    return Part(replace(part.early, pieces=tuple(pieces)), part.rows, part.crossing)


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the last bit, but for zeros' signs; a NaN is as good as another."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding; numbers that are not finite, and integers, exactly."""
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
    """Root mean square."""
    return float(tensor.abs().double().square().mean().sqrt())
