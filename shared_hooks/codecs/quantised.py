"""Floats rounded to a few levels: int8 to int1.

Each channel of a feature map, or each token of hidden states, has a step of its own (`steps`); where these have few
elements one step serves all. What is never negative (ReLU) spends no level on the other side. Few levels clip
(`clipping`). What lies far outside is kept apart, as float32. The symbols are packed (`packing`) and,
like all else, compressed where that makes them smaller (`sections`).

NaN, infinities and what is far too large or small make the whole tensor raw.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared_hooks import devices
from shared_hooks.codecs import codec
from shared_hooks.codecs.codec import Codec, Coded, Grain, Param, joined, least, parted
from shared_hooks.tensors.staging import to_host

# Numbers <-> symbols: divided by a step and rounded to whole levels, where the numbers are.
#
# A number is ``(symbol - zero) * step`` once more. All of it is sums and products of float32 in a fixed order, so every
# machine decodes the same bits.

_CHUNK = 1 << 18
"""Elements that are worked on at a time on a CPU: with what is made of them they stay in its caches."""
_WHOLE = float(1 << 23)
"""A float32 from here to twice as much has whole numbers only, and they stand in its lowest bits."""


class Levels(NamedTuple):
    """Symbols 0 to ``top``, and which of them stands for zero."""

    top: int
    zero: float

    @property
    def side(self) -> int:
        """Levels above zero."""
        return int(self.top - self.zero)

    @classmethod
    def of(cls, bits: int, signed: bool) -> Levels:
        """Without sign all levels are from zero upwards; with it as many on each side. One signed bit has no zero."""
        if not signed:
            return cls((1 << bits) - 1, 0.0)
        return cls(1, 0.5) if bits == 1 else cls((1 << bits) - 2, float((1 << bits - 1) - 1))


def rounded(values: torch.Tensor, steps: torch.Tensor, levels: Levels) -> torch.Tensor:
    """The symbols, flat, uint8, on the device of ``values`` (rank 3, float32, finite).

    ``steps``: float32, more than 0, of a shape that spreads over ``values``. What is beyond the levels gets the last.
    """
    found = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    inverse = 1 / steps
    for part in _parts(values):
        numbers = values[part] * _at(inverse, part)
        if levels.zero:
            numbers.add_(levels.zero)
        found[part] = numbers.clamp_(0, levels.top).add_(_WHOLE).view(torch.int32)
    return found.view(-1)


def restored(symbols: torch.Tensor, steps: torch.Tensor, levels: Levels) -> torch.Tensor:
    """The numbers, in the memory of ``symbols`` (rank 3, float32)."""
    for part in _parts(symbols):
        numbers = symbols[part]
        if levels.zero:
            numbers.sub_(levels.zero)
        numbers.mul_(_at(steps, part))
    return symbols


def _parts(whole: torch.Tensor) -> Iterator[tuple[slice, ...]]:
    """Slices that make up ``whole``, along its first dimension of more than one."""
    axis = next((axis for axis, size in enumerate(whole.shape) if size > 1), 0)
    size = whole.shape[axis]
    rows = size if not devices.is_host(whole.device) else max(1, _CHUNK * size // max(1, whole.numel()))
    for start in range(0, size, rows):
        yield (slice(None),) * axis + (slice(start, start + rows),)


def _at(steps: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    return steps[tuple(one if size > 1 else slice(None) for one, size in zip(part, steps.shape, strict=False))]


# Symbols of a few bits, several to a byte: neighbours in one byte, the first in its lowest bits.
#
# A coder of bytes then sees pairs, fours or eights of symbols: their frequencies tell it what lies beside what, and a
# symbol may take less than a bit.

PLACES = {1: 8, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}
"""Bits of a symbol -> symbols to a byte: as many as begin at whole powers of two."""

# symbols lie a byte apart in one integer; each shift brings the upper half of what is together beside the lower one
_SHIFTS: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {
    2: (torch.int16, (4,)),
    4: (torch.int32, (6, 12)),
    8: (torch.int64, (7, 14, 28)),
}


def packed_size(count: int, bits: int) -> int:
    """Bytes of ``count`` symbols."""
    return -(-count // PLACES[bits])


def packed(symbols: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes, on the same device. ``symbols``: (count,) uint8, contiguous, all below ``2**bits``."""
    places = PLACES[bits]
    if places == 1:
        return symbols
    if missing := -len(symbols) % places:
        symbols = torch.nn.functional.pad(symbols, (0, missing))
    if symbols.storage_offset() % places:
        symbols = symbols.clone()
    integer, shifts = _SHIFTS[places]
    together = symbols.view(integer)
    for shift in shifts:
        together = together | together >> shift
    return together.to(torch.uint8)  # the lowest byte


def unpacked(data: npt.NDArray[np.uint8], count: int, bits: int, top: int) -> torch.Tensor:
    """(count,) float32 on the CPU: the symbols. Raises ValueError where one is beyond ``top``."""
    places = PLACES[bits]
    if places == 1:
        if data.max(initial=0) > top:
            raise ValueError("a symbol beyond its range")
        return torch.from_numpy(data.astype(np.float32))
    symbols = _symbols(places)
    if not np.all(symbols <= top, axis=1).take(data).all():
        raise ValueError("a symbol beyond its range")
    found = np.empty((len(data), places), dtype=np.float32)
    np.take(symbols, data, axis=0, out=found, mode="clip")  # any byte has a row: nothing is clipped
    return torch.from_numpy(found.reshape(-1)[:count])


@cache
def _symbols(places: int) -> npt.NDArray[np.float32]:
    """(256, places): what is in each byte."""
    width = 8 // places
    return (np.arange(256)[:, None] >> width * np.arange(places) & (1 << width) - 1).astype(np.float32)


FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_LEAST = 64
"""Elements; fewer are sent raw."""
_LEAST_OF_GROUP = 256
"""Elements of a channel with a step of its own: a byte is a thirty-second of a bit for each."""
_LEAST_OF_TOKEN = 32
_FEWEST = 16
"""Elements of a group that is read, whoever wrote it."""
_FAR = 10.0
"""Root mean squares of a group, beyond which an element is kept apart; and how often it is found, each time without
those that lie beyond: one that is a thousand times as large as the rest is most of their mean square.
"""
_ROUNDS = 3
_RARE = 256
"""At most one in so many elements is kept apart."""
_MOST_ELEMENTS = 1 << 32
_OF_ALL, _OF_CHANNEL, _OF_TOKEN = range(3)


class _Form(NamedTuple):
    """The parameters: whose the steps are, how elements lie (`Grain`), whether there is a sign, the largest step's
    number, and how many elements are kept apart.
    """

    whose: int
    channels: int
    inner: int
    signed: int
    top: int
    apart: int

    def shape(self, elements: int) -> tuple[int, int, int]:
        return elements // (self.channels * self.inner), self.channels, self.inner

    def of_steps(self, elements: int) -> tuple[int, int, int]:
        """The shape of the steps, which spreads over `shape`."""
        outer, channels, inner = self.shape(elements)
        return {_OF_ALL: (1, 1, 1), _OF_CHANNEL: (1, channels, 1), _OF_TOKEN: (outer, 1, inner)}[self.whose]

    def pays(self, elements: int) -> bool:
        """Whether no more groups have a step of their own, and no more elements are kept apart, than makes sense."""
        outer, channels, inner = self.shape(elements)
        of_group = {_OF_CHANNEL: outer * inner, _OF_TOKEN: channels}.get(self.whose, _FEWEST)
        return of_group >= _FEWEST and self.apart * _RARE <= elements

    def sizes(self, elements: int, bits: int) -> list[int]:
        """Bytes of the sections: steps, places and numbers of what is kept apart, symbols."""
        groups = int(np.prod(self.of_steps(elements), dtype=np.int64))
        return [groups, 4 * self.apart, 4 * self.apart, packed_size(elements, bits)]


class _Rounded(NamedTuple):
    """``symbols``: flat. ``top`` and ``below`` name the steps (`codec.sized`). ``places``: of what is kept apart."""

    symbols: torch.Tensor
    top: int
    below: npt.NDArray[np.uint8]
    places: torch.Tensor


class Quantised(Codec):
    """``bits``: 1 to 8."""

    lossless = False

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"int{bits}"  # type: ignore[misc]  # of the object: there is one for each number of bits

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        elements = tensor.numel()
        if tensor.dtype not in FLOATS or not _LEAST <= elements < _MOST_ELEMENTS:
            return None
        whose = _whose(grain)
        outer, channels, inner = (1, 1, elements) if whose == _OF_ALL else grain[:3]
        values = tensor.to(torch.float32).view(outer, channels, inner)
        others = {_OF_ALL: (0, 1, 2), _OF_CHANNEL: (0, 2), _OF_TOKEN: (1,)}[whose]
        low, largest = values.amin(others, keepdim=True), values.amax(others, keepdim=True)
        largest = torch.maximum(largest, -low)
        if not bool(torch.isfinite(largest).all()):  # NaN is the largest, too
            return None
        levels = Levels.of(self.bits, bool((low < 0).any()))
        wanted, limit = _wanted(values, largest, others, levels), _FAR * _root_mean_square(values, others)
        found = (
            _with_some_apart(values, wanted, largest > limit, whose, levels) if bool((largest > limit).any()) else None
        )
        found = found or _rounded(values, wanted, levels)
        if found is None:
            return None
        form = _Form(whose, channels, inner, int(levels.zero > 0), found.top, len(found.places))
        apart = values.view(-1)[found.places].cpu().numpy().astype("<f4", copy=False).view(np.uint8)
        where = found.places.cpu().numpy().astype("<u4").view(np.uint8)
        symbols = to_host(packed(found.symbols, self.bits)).numpy()
        return Coded(joined((found.below, where, apart, symbols)), tuple(form))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        form = _form(params)
        if dtype not in FLOATS or not 0 < elements < _MOST_ELEMENTS:
            raise ValueError(f"{elements} elements of {dtype} are never coded so")
        if elements % (form.channels * form.inner):
            raise ValueError(f"{elements} elements are not made of {form.channels} times {form.inner}")
        if not form.pays(elements):  # what decoding takes beside the numbers is a small part of them
            raise ValueError("so many steps, or elements that are kept apart, are never sent")
        if nbytes < least(sum(form.sizes(elements, self.bits))):
            raise ValueError(f"{nbytes} bytes cannot stand for so much")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        form = _form(params)
        levels = Levels.of(self.bits, bool(form.signed))
        below, where, apart, symbols = parted(data, form.sizes(elements, self.bits))
        step = torch.from_numpy(codec.sized(form.top, below)).view(form.of_steps(elements))
        numbers = unpacked(symbols, elements, self.bits, levels.top)
        restored(numbers.view(form.shape(elements)), step, levels)
        if form.apart:
            _put(numbers.numpy(), where.view("<u4"), apart.view("<f4"))
        if dtype is torch.float16:  # the last level may lie beyond what it can hold
            most = torch.finfo(dtype).max
            numbers.clamp_(-most, most)
        return numbers.to(dtype)


def _wanted(values: torch.Tensor, largest: torch.Tensor, others: tuple[int, ...], levels: Levels) -> torch.Tensor:
    """The step that each group should have."""
    if levels.side == 0:  # one signed bit: the mean magnitude on either side
        return 2 * values.abs().mean(others, keepdim=True)
    if levels.side not in codec.STEPS:
        return largest / levels.side
    count = torch.full_like(largest, values.numel() / largest.numel())
    squares = _root_mean_square(values, others) ** 2 * count
    if not levels.zero:  # zeros are no part of the distribution
        count = values.sign().sum(others, keepdim=True).clamp_(min=1)
    magnitudes = (values.abs() if levels.zero else values).sum(others, keepdim=True)
    return codec.best_step(magnitudes / count, squares / count, largest, levels.side)


def _root_mean_square(values: torch.Tensor, others: tuple[int, ...]) -> torch.Tensor:
    norm = torch.linalg.vector_norm(values, dim=others, keepdim=True)
    found: torch.Tensor = norm * (norm.numel() / values.numel()) ** 0.5
    return found


def _rounded(values: torch.Tensor, wanted: torch.Tensor, levels: Levels) -> _Rounded | None:
    """With nothing kept apart. None where there are no such steps."""
    chosen = codec.chosen(wanted.view(-1))
    if chosen is None:
        return None
    step = torch.from_numpy(codec.sized(*chosen)).view(wanted.shape).to(values.device)
    none = torch.empty(0, dtype=torch.int64, device=values.device)
    return _Rounded(rounded(values, step, levels), *chosen, none)


def _with_some_apart(
    values: torch.Tensor, wanted: torch.Tensor, uneven: torch.Tensor, whose: int, levels: Levels
) -> _Rounded | None:
    """With what lies far from the rest of its group kept apart. None where that is too much.

    ``uneven``: in which groups something lies far from all the others, by which alone it is now measured.
    """
    groups = uneven.view(-1).nonzero().view(-1)
    members = _members(values, whose, groups)
    near = members
    for _ in range(_ROUNDS):
        limit = _FAR * _root_mean_square(near, (1, 2))
        near = torch.where(members.abs() <= limit, members, 0.0)
    number, row, column = (members.abs() > limit).nonzero(as_tuple=True)
    if len(number) * _RARE > values.numel():
        return None
    better = _wanted(near, near.abs().amax((1, 2), keepdim=True), (1, 2), levels)
    wanted = wanted.view(-1).index_copy(0, groups, torch.minimum(better, 2 * limit).view(-1)).view(wanted.shape)
    found = _rounded(values, wanted, levels)
    places = _places(values, whose, groups[number], row, column)
    return None if found is None else found._replace(places=places.sort().values)


def _members(values: torch.Tensor, whose: int, groups: torch.Tensor) -> torch.Tensor:
    """(groups, rows, columns): the elements that share a step with each other, of some groups."""
    if whose == _OF_CHANNEL:
        return values.transpose(0, 1)[groups]
    if whose == _OF_TOKEN:
        return values.transpose(1, 2).reshape(-1, 1, values.shape[1])[groups]
    return values


def _places(
    values: torch.Tensor, whose: int, group: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
    """Where the elements of `_members` lie in the flat tensor."""
    _, channels, inner = values.shape
    if whose == _OF_CHANNEL:
        return (row * channels + group) * inner + column
    if whose == _OF_TOKEN:
        return (group // inner * channels + column) * inner + group % inner
    return column


def _whose(grain: Grain) -> int:
    """Whose steps pay."""
    if grain.is_map:
        return _OF_CHANNEL if grain.outer * grain.inner >= _LEAST_OF_GROUP else _OF_ALL
    return _OF_TOKEN if grain.channels >= _LEAST_OF_TOKEN else _OF_ALL


def _form(params: tuple[Param, ...]) -> _Form:
    if len(params) != len(_Form._fields) or not all(type(one) is int for one in params):
        raise ValueError(f"its parameters are {', '.join(_Form._fields)}")
    form = _Form(*params)  # type: ignore[arg-type]  # looked at just now
    if not 0 <= form.whose <= _OF_TOKEN or form.channels < 1 or form.inner < 1 or form.apart < 0:
        raise ValueError("no such form")
    if form.signed not in (0, 1) or not codec.SMALLEST <= form.top <= codec.LARGEST:
        raise ValueError("no such steps")
    return form


def _put(numbers: npt.NDArray[np.float32], where: npt.NDArray[np.uint32], apart: npt.NDArray[np.float32]) -> None:
    """Set what was kept apart. Raises ValueError for places beyond the end or named twice, and for no numbers."""
    if where[-1] >= len(numbers) or (where[1:] <= where[:-1]).any() or not np.isfinite(apart).all():
        raise ValueError("elements that are kept apart are none of these")
    numbers[where] = apart
