"""`Book`: what was learnt of one tensor that crosses a cut. Data only; it comes from strangers, too."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shared_hooks.codecs.codec import Grain
from shared_hooks.errors import BadFrame, SpecError, TooLarge

# The orthonormal discrete cosine transform (DCT-II) of the last two dimensions, as two products of matrices.


BANDS = 8
"""Bands of spatial frequencies: coefficients of one band are of like size."""


@lru_cache(maxsize=32)
def matrix(size: int, device: torch.device) -> torch.Tensor:
    """(size, size), float32, a frequency a row."""
    places = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * (places[None] + 0.5) * places[:, None]) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows.to(device, torch.float32)


def dct(maps: torch.Tensor) -> torch.Tensor:
    """(..., H, W) to coefficients of that shape, the slow ones first."""
    down, across = matrix(maps.shape[-2], maps.device), matrix(maps.shape[-1], maps.device)
    return down @ maps @ across.T


def inverse_dct(coefficients: torch.Tensor) -> torch.Tensor:
    """The reverse of `forward`."""
    device = coefficients.device
    down, across = matrix(coefficients.shape[-2], device), matrix(coefficients.shape[-1], device)
    return down.T @ coefficients @ across


@lru_cache(maxsize=64)
def bands(height: int, width: int) -> torch.Tensor:
    """(height, width): the band of each coefficient, uint8, 0 to `BANDS` - 1."""
    down = torch.arange(height) * BANDS // height
    across = torch.arange(width) * BANDS // width
    return torch.maximum(down[:, None], across[None]).to(torch.uint8)


# `Ring`: the symbols of the last frames of one tensor of one cut, by their numbers.


KEPT = 16
"""Frames; a sender with more of them on their way refers to one that is gone, and sends a key frame."""

BESIDE = 1 << 10
"""Bytes that a frame takes beside its symbols, however few these are."""


class Ring:
    """One thread at a time."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        """``most_bytes``: beyond it the oldest frames go, too; one that is larger by itself is not kept."""
        self._most_bytes = most_bytes
        self._kept: dict[int, torch.Tensor] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def get(self, number: int) -> torch.Tensor | None:
        return self._kept.get(number)

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        """Keeps a frame; those before ``reference``, and the oldest beyond a bound, go."""
        self._kept[number] = symbols
        for old in sorted(self._kept)[:-KEPT]:
            del self._kept[old]
        for old in [old for old in self._kept if old < reference]:
            del self._kept[old]
        while self.nbytes > self._most_bytes:
            del self._kept[min(self._kept)]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes + BESIDE for one in self._kept.values())


GROUPS: Final = 4
MAX_CHANNELS: Final = 1 << 14
MAX_SIDE: Final = 1024
MAX_BOOK_BYTES: Final = 1 << 20
"""Most bytes of `Book.basis`: as text it is a third more, and the description of a cut has a bound."""
MAX_COEFFICIENTS: Final = 1 << 23
"""R * H * W of all the books of one cut: a few bytes of text may name as many, and each takes eight in `places`."""


@dataclass(frozen=True, eq=False)
class Book:
    """A tensor less ``mean``, times ``basis``, of a feature map the cosine transform of that, over ``step``: symbols.

    ``mean`` (C,) float32; ``basis`` (C, R) float16, orthonormal columns, the one with most energy first; ``groups``
    (R, `BANDS`) uint8: which components are of like size, 0 the largest; ``height`` and ``width`` of a feature
    map in memory, 1 and 1 for tokens. ``rounding``: what is added before rounding down (0.5 = to the nearest).
    ``is_positive``: no value was below zero. ``most``: mean square that may remain outside of the basis: an input
    beyond it is unlike those it was learnt from, and is not coded by it.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    groups: torch.Tensor
    height: int
    width: int
    step: float
    rounding: float
    is_positive: bool
    most: float

    @property
    def channels(self) -> int:
        return int(self.basis.shape[0])

    @property
    def rank(self) -> int:
        """Components that are sent."""
        return int(self.basis.shape[1])

    @property
    def block(self) -> int:
        """Elements of one token, or of one feature map with all its channels."""
        return self.channels * self.height * self.width

    @property
    def coefficients(self) -> int:
        """Numbers that stand for one block."""
        return self.rank * self.height * self.width

    def suits(self, grain: Grain) -> bool:
        """Whether a tensor of this grain is of the kind it was learnt from; any number of tokens or maps is."""
        sides = (grain.inner // grain.width, grain.width) if grain.is_map else (1, 1)
        return grain.channels == self.channels and sides == (self.height, self.width)

    @cached_property
    def places(self) -> tuple[torch.Tensor, ...]:
        """The numbers of each group's coefficients among the R * H * W of one block."""
        each = bands(self.height, self.width)
        group = self.groups[:, each.long()].reshape(-1)
        return tuple(torch.nonzero(group == number).reshape(-1) for number in range(GROUPS))

    def to_json(self) -> dict[str, Any]:
        """For the description of a cut, or a file."""
        return {
            "mean": _text(self.mean),
            "basis": _text(self.basis),
            "groups": _text(self.groups),
            "size": [self.channels, self.rank, self.height, self.width],
            "step": self.step,
            "rounding": self.rounding,
            "positive": self.is_positive,
            "most": self.most,
        }

    @classmethod
    def from_json(cls, data: Any) -> Book:
        """The reverse of `to_json`. Raises BadFrame, and TooLarge before anything large is made."""
        try:
            channels, rank, height, width = data["size"]
            if any(type(one) is not int or one < 1 for one in data["size"]) or rank > channels:
                raise BadFrame("malformed basis: its size")
            sides = max(height, width) > MAX_SIDE or rank * height * width > MAX_COEFFICIENTS
            if sides or channels > MAX_CHANNELS or 2 * channels * rank > MAX_BOOK_BYTES:
                raise TooLarge(f"a basis of {rank} components of {channels} channels on {height} x {width}")
            step, rounding, most = (float(data[name]) for name in ("step", "rounding", "most"))
            if not (0 < step < math.inf and 0 <= rounding <= 1 and 0 <= most < math.inf):
                raise BadFrame("malformed basis: its step")
            mean = _array(data["mean"], np.float32, (channels,))
            basis = _array(data["basis"], np.float16, (channels, rank))
            groups = _array(data["groups"], np.uint8, (rank, BANDS))
            if type(data["positive"]) is not bool:
                raise BadFrame("malformed basis: its sign")
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise BadFrame(f"malformed basis: {error!s:.100}") from error
        if not bool(torch.isfinite(mean).all()) or not bool(torch.isfinite(basis).all()) or int(groups.max()) >= GROUPS:
            raise BadFrame("malformed basis: numbers that are none")
        return cls(mean, basis, groups, height, width, step, rounding, data["positive"], most)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _array(text: Any, dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if not isinstance(text, str) or len(text) != 4 * -(-count // 3):
        raise BadFrame("malformed basis: it has another size than it says")
    data = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return torch.from_numpy(data.reshape(shape).copy())


# From tensors that crossed a cut during a calibration to a `Book`.
#
# The basis is that of principal components (Karhunen-Loeve): the uncorrelated directions of the channels, those with
# the most energy first; those whose symbols would all be zero are left out. One step for all of them gives the least
# squared error for the bytes (reverse water-filling, Cover and Thomas, "Elements of Information Theory", section
# 10.3.3).


_BOUNDS = (1.0, 0.3, 0.05)
"""Mean magnitudes of symbols between the groups."""
_LEFT_OUT = 0.125
"""Standard deviation, in steps, below which a component is not sent: some six hundredths of a step's own error."""
_UNLIKE = 16.0
"""Times what remained outside of the basis during the calibration, at the most, a new input is still like those."""


def learn(tensors: Sequence[torch.Tensor], grain: Grain, step: float) -> Book:
    """``tensors``: flat, of one cut, each of another input and of ``grain`` (its number of tokens or maps may differ).

    ``step``: the width of a quantiser's cell in standard deviations of all elements; 0.25 keeps hidden states within
    a part in a thousand, 1 to 2 do for feature maps of classifiers. Raises SpecError for what cannot be learnt.
    """
    height, width = (grain.inner // grain.width, grain.width) if grain.is_map else (1, 1)
    blocks = [one.detach().float().cpu().reshape(-1, grain.channels, height * width) for one in tensors]
    _check(grain, height, width, blocks, step)
    mean, covariance, square = _moments(blocks)
    spread = float((square - mean.square()).mean().clamp_min(0).sqrt())
    if not spread > 0:
        raise SpecError("a basis is learnt from values that differ: all of these are the same")
    energies, vectors = torch.linalg.eigh(covariance)
    energies, vectors = energies.flip(0).clamp_min(0), vectors.flip(1)
    cell = step * spread
    rank = int((energies.sqrt() > _LEFT_OUT * cell).sum())
    rank = max(1, min(rank, MAX_BOOK_BYTES // (2 * grain.channels), MAX_COEFFICIENTS // (height * width)))
    is_positive = all(float(one.min()) >= 0 for one in blocks)
    basis = vectors[:, :rank].to(torch.float16)
    most = _UNLIKE * float(energies[rank:].sum()) / grain.channels + cell * cell
    rounding = 0.4 if grain.is_map else 0.5
    book = Book(
        mean.float(), basis, torch.zeros((rank, BANDS), dtype=torch.uint8), height, width,
        cell, rounding, is_positive, most,
    )  # fmt: skip
    return _grouped(book, blocks)


def _check(grain: Grain, height: int, width: int, blocks: list[torch.Tensor], step: float) -> None:
    if not 0 < step < float("inf"):
        raise SpecError(f"step={step}: a number above zero")
    if grain.channels > MAX_CHANNELS or max(height, width) > MAX_SIDE or 2 * grain.channels > MAX_BOOK_BYTES:
        raise SpecError(f"a basis of {grain.channels} channels on {height} x {width} is too large to travel")
    if grain.is_map and grain.inner == 1 and grain.channels > 1:
        raise SpecError("a basis is learnt from maps whose channels lie apart in memory: not channels-last")
    if sum(len(one) for one in blocks) * height * width < 2:
        raise SpecError("a basis is learnt from several tensors, or several tokens")
    if not all(bool(torch.isfinite(one).all()) for one in blocks):
        raise SpecError("a basis is learnt from finite numbers")


def _moments(blocks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and covariance of the channels, and the mean of their squares, float64."""
    channels = blocks[0].shape[1]
    total, products, count = torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, channels).double(), 0
    for one in blocks:
        rows = one.transpose(1, 2).reshape(-1, channels).double()
        total += rows.sum(0)
        products += rows.T @ rows
        count += len(rows)
    mean = total / count
    return mean, products / count - mean[:, None] * mean, products.diagonal() / count


def _grouped(book: Book, blocks: list[torch.Tensor]) -> Book:
    """With its components and frequencies in groups, by the mean magnitude of their symbols."""
    shape = (book.rank, book.height, book.width)
    total, count = torch.zeros(shape, dtype=torch.float64), 0
    for one in blocks:
        parts = book.basis.float().T @ (one - book.mean[:, None])
        parts = parts.reshape(-1, *shape)
        parts = dct(parts) if book.height * book.width > 1 else parts
        total += (parts.abs() / book.step + book.rounding).floor().double().sum(0)
        count += len(parts)
    each = bands(book.height, book.width).reshape(-1).long()
    sizes = torch.zeros(book.rank, BANDS, dtype=torch.float64).index_add(1, each, total.reshape(book.rank, -1))
    sizes /= count * torch.bincount(each, minlength=BANDS).clamp_min(1)
    groups = torch.stack([sizes < bound for bound in _BOUNDS]).sum(0).to(torch.uint8)
    return replace(book, groups=groups)


# Small integers, most of them zero, as bytes: folded (0, -1, 1, -2 ...), without the zeros at the end, deflated.
#
# Of deflate's strategies the shorter of two is taken: Huffman codes alone, or with runs. They cost a tenth of its
# search for repetitions, and find as much. Deflate is in every Python on every machine (a range coder comes nearer to
# the entropy, but those in the package index have none for Linux on ARM); its decoder needs not know the strategy.


LARGEST = 32_767

Numbers = npt.NDArray[np.int32]


def pack(numbers: Numbers, wide: bool) -> bytes:
    """Numbers of up to 127, ``wide``: up to `LARGEST`. Nothing at all where all are zero."""
    folded = (numbers << 1) ^ (numbers >> 31)
    planes = [folded & 255, folded >> 8] if wide else [folded]
    data = b"".join(plane.astype(np.uint8).tobytes() for plane in planes).rstrip(b"\0")
    return min((_deflated(data, how) for how in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)), key=len) if data else b""


def unpack(data: memoryview, count: int, wide: bool) -> Numbers:
    """``count`` numbers. Raises ValueError for more of them, before more is allocated."""
    nbytes = 2 * count if wide else count
    folded = np.zeros(nbytes, dtype=np.uint8)
    if len(data):
        found = _inflated(data, nbytes)
        folded[: len(found)] = np.frombuffer(found, dtype=np.uint8)
    wider = folded.astype(np.int32)
    if wide:
        wider = wider[:count] | wider[count:] << 8
    return (wider >> 1) ^ -(wider & 1)


def _inflated(data: memoryview, most: int) -> bytes:
    decoder = zlib.decompressobj(-15)
    try:
        found = decoder.decompress(data, max(1, most))
        if not decoder.eof:  # it may still owe its end mark
            found += decoder.decompress(decoder.unconsumed_tail, 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) > most or not decoder.eof or decoder.unused_data:
        raise ValueError("it holds more numbers than there are places")
    return found


def _deflated(data: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(data) + coder.flush()
