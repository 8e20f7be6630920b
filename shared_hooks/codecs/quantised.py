"""Quantise floats to 8 to 1 bits.

Each channel of a feature map, or each token of hidden states, has its own step (`steps`); where these have few elements
they share one step. Non-negative tensors (ReLU) use no level for negative values. At few levels large values are
clipped (`best_step`). Outliers are stored apart, as float32. The symbols are packed (`packed`) and, like all else,
compressed where that makes them smaller (`codec.joined`).

NaN, infinities and values far out of range make the whole tensor raw.
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

# Numbers <-> symbols: divided by a step and rounded to integer levels, on the tensor's device.
#
# A number is decoded as ``(symbol - zero) * step``. All of it is sums and products of float32 in a fixed order, so
# every machine decodes the same bits.

_CHUNK = 1 << 18
"""Elements processed at a time on a CPU, so that intermediate values stay in its caches."""
_WHOLE = float(1 << 23)
"""Rounding constant: a float32 from here to twice as much holds only integers, in its lowest bits."""


class Levels(NamedTuple):
    """Quantisation levels: symbols 0 to ``top``, and the symbol of zero."""

    top: int
    zero: float

    @property
    def side(self) -> int:
        """Number of levels above zero."""
        return int(self.top - self.zero)

    @classmethod
    def of(cls, bits: int, signed: bool) -> Levels:
        """Return the levels of ``bits`` bits: from zero upwards if unsigned, else symmetric. A signed bit has
        no zero.
        """
        if not signed:
            return cls((1 << bits) - 1, 0.0)
        return cls(1, 0.5) if bits == 1 else cls((1 << bits) - 2, float((1 << bits - 1) - 1))


def rounded(values: torch.Tensor, steps: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Quantise ``values`` (rank 3, float32, finite) to symbols: flat, uint8, on the same device.

    ``steps``: positive float32, broadcast over ``values``. Values beyond the levels are clipped.
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
    """Dequantise ``symbols`` (rank 3, float32) in place."""
    for part in _parts(symbols):
        numbers = symbols[part]
        if levels.zero:
            numbers.sub_(levels.zero)
        numbers.mul_(_at(steps, part))
    return symbols


def _parts(whole: torch.Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cover ``whole``, along its first dimension larger than one."""
    axis = next((axis for axis, size in enumerate(whole.shape) if size > 1), 0)
    size = whole.shape[axis]
    rows = size if not devices.is_host(whole.device) else max(1, _CHUNK * size // max(1, whole.numel()))
    for start in range(0, size, rows):
        yield (slice(None),) * axis + (slice(start, start + rows),)


def _at(steps: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    return steps[tuple(one if size > 1 else slice(None) for one, size in zip(part, steps.shape, strict=False))]


# Symbols of a few bits, several to a byte: neighbours in one byte, the first in its lowest bits.
#
# A byte coder then sees pairs, fours or eights of symbols: their frequencies contain the dependence between
# neighbours, and a symbol may take less than a bit.

PLACES = {1: 8, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}
"""Bits per symbol, mapped to symbols per byte."""

# symbols lie a byte apart in one integer; each shift moves the upper half of a group beside the lower one
_SHIFTS: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {
    2: (torch.int16, (4,)),
    4: (torch.int32, (6, 12)),
    8: (torch.int64, (7, 14, 28)),
}


def packed_size(count: int, bits: int) -> int:
    """Return the packed size in bytes of ``count`` symbols."""
    return -(-count // PLACES[bits])


def packed(symbols: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack symbols to bytes on the same device. ``symbols``: (count,) uint8, contiguous, all below ``2**bits``."""
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
    """Unpack symbols as (count,) float32 on the CPU. Raises ValueError if one exceeds ``top``."""
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
    """Return (256, places): the symbols in each byte."""
    width = 8 // places
    return (np.arange(256)[:, None] >> width * np.arange(places) & (1 << width) - 1).astype(np.float32)


FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_LEAST = 64
"""Minimum elements of a tensor; smaller ones are sent raw."""
_LEAST_OF_GROUP = 256
"""Minimum elements of a channel with its own step: a byte then costs at most 1/32 bit per element."""
_LEAST_OF_TOKEN = 32
_FEWEST = 16
"""Minimum elements of a group accepted from any encoder."""
_FAR = 10.0
"""Outlier threshold in root mean squares of a group, and the number of passes, each without the outliers of the pass
before: one value a thousand times the rest makes up most of their mean square.
"""
_ROUNDS = 3
_RARE = 256
"""At most one in so many elements is an outlier."""
_MOST_ELEMENTS = 1 << 32
_OF_ALL, _OF_CHANNEL, _OF_TOKEN = range(3)


class _Form(NamedTuple):
    """The parameters: the grouping of steps, the layout (`Grain`), signedness, the largest step's number, and the
    number of outliers stored apart.
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
        """Return the shape of the steps, which broadcasts over `shape`."""
        outer, channels, inner = self.shape(elements)
        return {_OF_ALL: (1, 1, 1), _OF_CHANNEL: (1, channels, 1), _OF_TOKEN: (outer, 1, inner)}[self.whose]

    def pays(self, elements: int) -> bool:
        """Return whether the numbers of groups and outliers are within the limits an encoder would use."""
        outer, channels, inner = self.shape(elements)
        of_group = {_OF_CHANNEL: outer * inner, _OF_TOKEN: channels}.get(self.whose, _FEWEST)
        return of_group >= _FEWEST and self.apart * _RARE <= elements

    def sizes(self, elements: int, bits: int) -> list[int]:
        """Return the sizes in bytes of the sections: steps, positions and values of outliers, symbols."""
        groups = int(np.prod(self.of_steps(elements), dtype=np.int64))
        return [groups, 4 * self.apart, 4 * self.apart, packed_size(elements, bits)]


class _Rounded(NamedTuple):
    """A quantised tensor. ``symbols``: flat. ``top`` and ``below``: the steps (`codec.sized`). ``places``: of
    outliers.
    """

    symbols: torch.Tensor
    top: int
    below: npt.NDArray[np.uint8]
    places: torch.Tensor


class Quantised(Codec):
    """Quantises floats to ``bits`` bits, 1 to 8."""

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
        if not bool(torch.isfinite(largest).all()):  # NaN counts as the largest, too
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
        if not form.pays(elements):  # the overhead of decoding must be a small part of the numbers
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
        if dtype is torch.float16:  # the last level may exceed its range
            most = torch.finfo(dtype).max
            numbers.clamp_(-most, most)
        return numbers.to(dtype)


def _wanted(values: torch.Tensor, largest: torch.Tensor, others: tuple[int, ...], levels: Levels) -> torch.Tensor:
    """Return the ideal step of each group."""
    if levels.side == 0:  # one sign bit: the mean magnitude on either side
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
    """Quantise without outliers. Returns None where no representable steps fit."""
    chosen = codec.chosen(wanted.view(-1))
    if chosen is None:
        return None
    step = torch.from_numpy(codec.sized(*chosen)).view(wanted.shape).to(values.device)
    none = torch.empty(0, dtype=torch.int64, device=values.device)
    return _Rounded(rounded(values, step, levels), *chosen, none)


def _with_some_apart(
    values: torch.Tensor, wanted: torch.Tensor, uneven: torch.Tensor, whose: int, levels: Levels
) -> _Rounded | None:
    """Quantise with outliers stored apart. Returns None where there are too many.

    ``uneven``: the groups that have outliers; their steps are computed without them.
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
    """Return (groups, rows, columns): the elements of some groups, each of which shares a step."""
    if whose == _OF_CHANNEL:
        return values.transpose(0, 1)[groups]
    if whose == _OF_TOKEN:
        return values.transpose(1, 2).reshape(-1, 1, values.shape[1])[groups]
    return values


def _places(
    values: torch.Tensor, whose: int, group: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
    """Return the positions of `_members`' elements in the flat tensor."""
    _, channels, inner = values.shape
    if whose == _OF_CHANNEL:
        return (row * channels + group) * inner + column
    if whose == _OF_TOKEN:
        return (group // inner * channels + column) * inner + group % inner
    return column


def _whose(grain: Grain) -> int:
    """Return the grouping of steps that pays for this layout."""
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
    """Set the outliers. Raises ValueError for positions out of range or repeated, and for values that are not
    numbers.
    """
    if where[-1] >= len(numbers) or (where[1:] <= where[:-1]).any() or not np.isfinite(apart).all():
        raise ValueError("elements that are kept apart are none of these")
    numbers[where] = apart
