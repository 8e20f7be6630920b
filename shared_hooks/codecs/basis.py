"""Code one tensor of one cut in a basis calibrated on a user's inputs: few components carry most of it.

`Book` is the calibration; it is data only, travels in the description of the cut, and is untrusted. `Basis` turns a
tensor into symbols and bytes; `Frames` sends their difference to an earlier frame.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from shared_hooks.codecs.codec import Codec, Coded, Grain, Param
from shared_hooks.errors import BadFrame, ReferenceLost, SpecError, TooLarge
from shared_hooks.tensors.staging import to_host

# The orthonormal discrete cosine transform (DCT-II) of the last two dimensions, as two products of matrices.


BANDS = 8
"""Number of bands of spatial frequencies; coefficients of one band have similar magnitudes."""


@lru_cache(maxsize=32)
def matrix(size: int, device: torch.device) -> torch.Tensor:
    """Return the matrix of the discrete cosine transform, (size, size), float32, one frequency per row."""
    places = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * (places[None] + 0.5) * places[:, None]) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows.to(device, torch.float32)


def dct(maps: torch.Tensor) -> torch.Tensor:
    """Transform (..., H, W) to DCT coefficients of that shape, low frequencies first."""
    down, across = matrix(maps.shape[-2], maps.device), matrix(maps.shape[-1], maps.device)
    return down @ maps @ across.T


def inverse_dct(coefficients: torch.Tensor) -> torch.Tensor:
    """Invert `dct`."""
    device = coefficients.device
    down, across = matrix(coefficients.shape[-2], device), matrix(coefficients.shape[-1], device)
    return down.T @ coefficients @ across


@lru_cache(maxsize=64)
def bands(height: int, width: int) -> torch.Tensor:
    """Return the band of each coefficient, (height, width), uint8, 0 to `BANDS` - 1."""
    down = torch.arange(height) * BANDS // height
    across = torch.arange(width) * BANDS // width
    return torch.maximum(down[:, None], across[None]).to(torch.uint8)


# `Ring`: the symbols of the last frames of one tensor of one cut, by their numbers.


KEPT = 16
"""Frames kept. A sender with more of them in flight refers to a dropped one, and then sends a key frame."""

BESIDE = 1 << 10
"""Overhead in bytes of a frame beside its symbols."""


class Ring:
    """Bounded store of recent frames. Not thread-safe."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        """``most_bytes``: beyond it the oldest frames are dropped, too; a single larger frame is not kept."""
        self._most_bytes = most_bytes
        self._kept: dict[int, torch.Tensor] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def get(self, number: int) -> torch.Tensor | None:
        return self._kept.get(number)

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        """Keep a frame. Drops those before ``reference``, and the oldest beyond a bound."""
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
"""Maximum size in bytes of `Book.basis`: as text it is a third larger, and the description of a cut is bounded."""
MAX_COEFFICIENTS: Final = 1 << 23
"""Maximum R * H * W of all books of one cut: a few bytes of text can announce as many, each eight bytes in `places`."""


@dataclass(frozen=True, eq=False)
class Book:
    """A calibrated basis. Symbols are a tensor less ``mean``, times ``basis``, transformed (DCT) for a feature map,
    over ``step``.

    ``mean`` (C,) float32; ``basis`` (C, R) float16, orthonormal columns, highest energy first; ``groups`` (R, `BANDS`)
    uint8: components of similar magnitude, 0 the largest; ``height`` and ``width`` of a feature map in memory, 1 and 1
    for tokens. ``rounding``: added before rounding down (0.5 = to the nearest). ``is_positive``: no value was below
    zero. ``most``: maximum mean square outside of the basis; an input beyond it is unlike the calibration and is not
    coded.
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
        """Number of components sent."""
        return int(self.basis.shape[1])

    @property
    def block(self) -> int:
        """Elements of one token, or of one feature map with all its channels."""
        return self.channels * self.height * self.width

    @property
    def coefficients(self) -> int:
        """Coefficients of one block."""
        return self.rank * self.height * self.width

    def suits(self, grain: Grain) -> bool:
        """Return whether a tensor of this layout matches the calibration. The number of tokens or maps is free."""
        sides = (grain.inner // grain.width, grain.width) if grain.is_map else (1, 1)
        return grain.channels == self.channels and sides == (self.height, self.width)

    @cached_property
    def places(self) -> tuple[torch.Tensor, ...]:
        """Return the indices of each group's coefficients among the R * H * W of one block."""
        each = bands(self.height, self.width)
        group = self.groups[:, each.long()].reshape(-1)
        return tuple(torch.nonzero(group == number).reshape(-1) for number in range(GROUPS))

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the description of a cut, or a file."""
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
        """Read `to_json`. Raises BadFrame, and TooLarge before anything large is allocated."""
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
        raise BadFrame("malformed basis: its size differs from its header")
    data = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return torch.from_numpy(data.reshape(shape).copy())


# From tensors that crossed a cut during a calibration to a `Book`.
#
# The basis is that of principal components (Karhunen-Loeve): the uncorrelated directions of the channels, those with
# the most energy first; those whose symbols would all be zero are left out. One step for all of them gives the least
# squared error for the bytes (reverse water-filling, Cover and Thomas, "Elements of Information Theory", section
# 10.3.3).


_BOUNDS = (1.0, 0.3, 0.05)
"""Boundaries between groups, in mean magnitude of symbols."""
_LEFT_OUT = 0.125
"""Standard deviation in steps below which a component is not sent: about 6 % of a step's own error."""
_UNLIKE = 16.0
"""Factor over the calibration's largest remainder outside of the basis up to which an input counts as similar."""


def learn(tensors: Sequence[torch.Tensor], grain: Grain, step: float) -> Book:
    """Calibrate a basis. ``tensors``: flat, of one cut, one per input, all of layout ``grain`` except for their length.

    ``step``: the quantiser's cell width in standard deviations of all elements; 0.25 keeps hidden states within a part
    in a thousand, 1 to 2 are enough for feature maps of classifiers. Raises SpecError if the tensors cannot be
    calibrated.
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
    """Return mean and covariance of the channels, and their mean square, float64."""
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
    """Return the book with components and frequencies grouped by the mean magnitude of their symbols."""
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


# Small integers, most of them zero, as bytes: folded (0, -1, 1, -2 ...), without trailing zeros, deflated.
#
# Of deflate's strategies the shorter of two is taken: Huffman codes alone, or with runs. They cost a tenth of its
# search for repetitions, and compress as well. Deflate is in every Python on every machine (a range coder comes
# nearer to the entropy, but those in the package index have none for Linux on ARM); its decoder does not depend on
# the strategy.


LARGEST = 32_767

Numbers = npt.NDArray[np.int32]


def pack(numbers: Numbers, wide: bool) -> bytes:
    """Pack numbers of up to 127, or up to `LARGEST` if ``wide``. All zeros pack to no bytes."""
    folded = (numbers << 1) ^ (numbers >> 31)
    planes = [folded & 255, folded >> 8] if wide else [folded]
    data = b"".join(plane.astype(np.uint8).tobytes() for plane in planes).rstrip(b"\0")
    return min((_deflated(data, how) for how in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)), key=len) if data else b""


def unpack(data: memoryview, count: int, wide: bool) -> Numbers:
    """Unpack ``count`` numbers. Raises ValueError for more, before allocating them."""
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
        if not decoder.eof:  # its end mark may still be missing
            found += decoder.decompress(decoder.unconsumed_tail, 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) > most or not decoder.eof or decoder.unused_data:
        raise ValueError("it holds more numbers than there are places")
    return found


def _deflated(data: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(data) + coder.flush()


# `Basis`: a tensor as its coefficients in the basis of a `Book`.


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NARROW = 127
_SMALL = 1 << 14
"""Number of symbols from which a Huffman table per group always pays."""
_STREAM = 4
"""Bytes of a stream's size in a header."""
MAX_WORK = 1 << 35
"""Maximum multiplications for one tensor, some seconds. All-zero symbols need no bytes, so their size is no bound."""
NO_BOOK = "the description of the cut has no basis for it"


class Basis(Codec):
    """Codes tensors by ``book``. Without a book it neither encodes nor decodes.

    Parameters: whether numbers take two bytes, and the size of each stream: one per group of the book, or a single
    interleaved one for small tensors, as every stream has its own Huffman table.
    """

    name = "basis"
    lossless = False

    def __init__(self, book: Book | None = None) -> None:
        self.book = book

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        """Encode a tensor. Returns None where the book does not fit: other sizes, NaN, infinities, unlike the
        calibration.
        """
        book = self.book
        if book is None or not self.takes(tensor, grain):
            return None
        found = symbols(book, tensor)
        return None if found is None else packed(book, found)

    def takes(self, tensor: torch.Tensor, grain: Grain) -> bool:
        """Return whether the book fits the tensor's layout and the work is within bounds."""
        book = self.book
        if book is None or tensor.dtype not in _FLOATS or not book.suits(grain):
            return False
        return _work(book, tensor.numel()) <= MAX_WORK

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        book = self.book
        if book is None:
            raise ValueError(NO_BOOK)
        if dtype not in _FLOATS or elements % book.block:
            raise ValueError(f"its basis is for blocks of {book.block} floats")
        if (work := _work(book, elements)) > MAX_WORK:
            raise ValueError(f"{work} multiplications to decode it; at most {MAX_WORK} are made")
        if len(params) not in (2, 1 + GROUPS) or any(type(one) is not int or one < 0 for one in params):
            raise ValueError("its parameters are sizes")
        wide, *sizes = params
        if wide not in (0, 1) or sum(map(int, sizes)) != nbytes:
            raise ValueError("its streams have another size")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        book = self.book
        if book is None:
            raise ValueError(NO_BOOK)
        return restored(book, unpacked(book, data, params, elements)).to(dtype)


def _work(book: Book, elements: int) -> int:
    return elements * (book.rank + book.height + book.width)


def symbols(book: Book, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a flat tensor as integers, int32 (blocks, R * H * W), on its device, or None where the book does
    not fit.
    """
    is_map = book.height * book.width > 1
    basis, mean = book.basis.to(tensor.device, torch.float32), book.mean.to(tensor.device)
    blocks = tensor.to(torch.float32).reshape(-1, book.channels, book.height * book.width)
    if is_map:
        centred = blocks - mean[:, None]
        parts = basis.T @ centred
    else:  # one product for all tokens, not one for each
        centred = blocks.reshape(-1, book.channels) - mean
        parts = centred @ basis
    outside = (centred.square().sum() - parts.square().sum()) / tensor.numel()
    if not bool(outside <= book.most):  # false for NaN, too
        return None
    if is_map:
        parts = dct(parts.reshape(len(blocks), book.rank, book.height, book.width))
    found = (parts.abs() / book.step + book.rounding).floor_()
    if not bool(found.max() <= LARGEST):
        return None
    return (found * parts.sign()).to(torch.int32).reshape(len(blocks), -1)


def packed(book: Book, numbers: torch.Tensor) -> Coded:
    """Pack integers, (blocks, R * H * W), to bytes."""
    wide = bool(numbers.abs().max() > _NARROW)
    numbers = to_host(numbers)
    groups = [numbers[:, places].T.reshape(-1).numpy() for places in book.places]
    streams = [pack(group, wide) for group in groups]
    if numbers.numel() <= _SMALL:
        together = pack(np.concatenate(groups), wide)
        if len(together) < sum(map(len, streams)) + _STREAM * (GROUPS - 1):
            streams = [together]
    return Coded(memoryview(b"".join(streams)), (int(wide), *map(len, streams)))


def unpacked(book: Book, data: memoryview, params: tuple[Param, ...], elements: int) -> torch.Tensor:
    """Unpack bytes of `packed`. Raises ValueError."""
    wide, *sizes = map(int, params)
    blocks, bounds = elements // book.block, np.cumsum([0, *sizes])
    counts = [blocks * len(places) for places in book.places]
    pieces = [data[start:stop] for start, stop in pairwise(bounds)]
    many = [sum(counts)] if len(pieces) == 1 else counts
    streams = [unpack(piece, count, bool(wide)) for piece, count in zip(pieces, many, strict=True)]
    groups = np.split(streams[0], np.cumsum(counts)[:-1]) if len(pieces) == 1 else streams
    found = torch.empty((blocks, book.rank * book.height * book.width), dtype=torch.int32)
    for group, places in zip(groups, book.places, strict=True):
        found[:, places] = torch.from_numpy(group).reshape(len(places), blocks).T
    return found


def restored(book: Book, numbers: torch.Tensor) -> torch.Tensor:
    """Return the flat float32 tensor that the integers encode."""
    parts = numbers.to(torch.float32).mul_(book.step)
    basis, mean = book.basis.to(numbers.device, torch.float32), book.mean.to(numbers.device)
    if book.height * book.width > 1:
        parts = inverse_dct(parts.reshape(len(numbers), book.rank, book.height, book.width))
        blocks = basis @ parts.reshape(len(numbers), book.rank, -1) + mean[:, None]
    else:
        blocks = torch.addmm(mean, parts, basis.T)
    return (blocks.relu_() if book.is_positive else blocks).reshape(-1)


# `Frames`: of successive frames, the changes since one that the other side has.
#
# Symbols are subtracted, not values: both sides have the very same integers, so a frame that is sent as a difference
# is decoded to the same bits as one that is sent alone, and no error accumulates. Each frame has a number and names
# the one it refers to, 0 for none (a *key frame*). A sender refers only to frames that were answered, so what is lost
# in transit, or was evicted at the other side (`ReferenceLost`), costs one key frame.


KEY = 0
"""Number of no frame: a key frame refers to it."""


class References(Protocol):
    """Symbols of earlier frames of one tensor of one cut, int16 (blocks, R * H * W)."""

    @property
    def number(self) -> int:
        """Return the number of the frame being made (on the sender)."""

    def get(self, number: int) -> torch.Tensor | None:
        """Return the symbols of that frame, or None if it was dropped."""

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        """Keep a frame's symbols. Frames before ``reference`` are no longer referred to."""

    def latest(self) -> int:
        """Return the frame that a sender may refer to, `KEY` if there is none."""


class Frames(Codec):
    """As `Basis`, coding the difference to an earlier frame in ``references``. Parameters: the frame's number, the
    number of the frame it refers to, and those of `Basis`.
    """

    name = "frames"
    lossless = False

    def __init__(self, book: Book | None = None, references: References | None = None) -> None:
        self.book, self.references = book, references
        self._basis = Basis(book)

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        book, kept = self.book, self.references
        if book is None or kept is None or not self._basis.takes(tensor, grain):
            return None
        found = symbols(book, tensor)
        if found is None:
            return None
        found = found.cpu()
        coded, reference = packed(book, found), KEY
        before = kept.get(latest) if (latest := kept.latest()) != KEY else None
        if before is not None and before.shape == found.shape:
            change = found - before
            if int(change.abs().max()) <= LARGEST:
                other = packed(book, change)
                if len(other.data) < len(coded.data):
                    coded, reference = other, latest
        kept.put(kept.number, found.to(torch.int16), reference)
        return Coded(coded.data, (kept.number, reference, *coded.params))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if self.book is None:
            raise ValueError(NO_BOOK)
        if len(params) not in (4, 3 + GROUPS) or any(type(one) is not int or one < 0 for one in params[:2]):
            raise ValueError("its parameters are numbers of frames, and sizes")
        self._basis.check(params[2:], dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        """Decode a frame. Raises ReferenceLost if the frame that it refers to was dropped."""
        book, kept = self.book, self.references
        if book is None or kept is None:
            raise ValueError(NO_BOOK if book is None else "frames are not kept here")
        number, reference = int(params[0]), int(params[1])
        found = unpacked(book, data, params[2:], elements)
        if reference != KEY:
            before = kept.get(reference)
            if before is None or before.shape != found.shape:
                raise ReferenceLost(f"frame {number} refers to frame {reference}, which is not kept here (any more)")
            found += before
        kept.put(number, found.clamp_(-LARGEST, LARGEST).to(torch.int16), reference)
        return restored(book, found).to(dtype)
