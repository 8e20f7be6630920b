"""`Basis`: a tensor as the few numbers that a `Book` says it is made of."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from shared_hooks.codecs.basis.book import GROUPS, LARGEST, Book, dct, inverse_dct, pack, unpack
from shared_hooks.codecs.codec import Codec, Coded, Grain, Param
from shared_hooks.errors import ReferenceLost
from shared_hooks.tensors.staging import to_host

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NARROW = 127
_SMALL = 1 << 14
"""Symbols; beyond as many, what each group's own Huffman code saves is always more than it takes."""
_STREAM = 4
"""Bytes that the size of a stream takes in a header."""
MAX_WORK = 1 << 35
"""Multiplications for one tensor: some seconds. No bytes need come for them, where all symbols are zero."""
NO_BOOK = "the description of the cut has no basis for it"


class Basis(Codec):
    """By ``book``; without one nothing is encoded, and nothing decoded.

    Parameters: whether numbers take two bytes, and the size of each stream: one for each of the book's groups, or one
    for all of them in turn, which small tensors take, as every stream brings its own Huffman code.
    """

    name = "basis"
    lossless = False

    def __init__(self, book: Book | None = None) -> None:
        self.book = book

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        """None for what the book does not suit: other sizes, NaN, infinities, what is unlike the calibration."""
        book = self.book
        if book is None or not self.takes(tensor, grain):
            return None
        found = symbols(book, tensor)
        return None if found is None else packed(book, found)

    def takes(self, tensor: torch.Tensor, grain: Grain) -> bool:
        """Whether the book is of such tensors, and they are not too much work."""
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
    """A flat tensor as integers, int32 (blocks, R * H * W), on its own device; None where the book does not suit it."""
    is_map = book.height * book.width > 1
    basis, mean = book.basis.to(tensor.device, torch.float32), book.mean.to(tensor.device)
    blocks = tensor.to(torch.float32).reshape(-1, book.channels, book.height * book.width)
    if is_map:
        centred = blocks - mean[:, None]
        parts = basis.T @ centred
    else:  # one product of all tokens, not one of each
        centred = blocks.reshape(-1, book.channels) - mean
        parts = centred @ basis
    outside = (centred.square().sum() - parts.square().sum()) / tensor.numel()
    if not bool(outside <= book.most):  # nor for NaN
        return None
    if is_map:
        parts = dct(parts.reshape(len(blocks), book.rank, book.height, book.width))
    found = (parts.abs() / book.step + book.rounding).floor_()
    if not bool(found.max() <= LARGEST):
        return None
    return (found * parts.sign()).to(torch.int32).reshape(len(blocks), -1)


def packed(book: Book, numbers: torch.Tensor) -> Coded:
    """Integers, (blocks, R * H * W), as bytes."""
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
    """The reverse of `packed`. Raises ValueError."""
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
    """The flat tensor that integers stand for, float32."""
    parts = numbers.to(torch.float32).mul_(book.step)
    basis, mean = book.basis.to(numbers.device, torch.float32), book.mean.to(numbers.device)
    if book.height * book.width > 1:
        parts = inverse_dct(parts.reshape(len(numbers), book.rank, book.height, book.width))
        blocks = basis @ parts.reshape(len(numbers), book.rank, -1) + mean[:, None]
    else:
        blocks = torch.addmm(mean, parts, basis.T)
    return (blocks.relu_() if book.is_positive else blocks).reshape(-1)


# `Frames`: of frames that follow each other, what has changed since one that the other side has.
#
# Symbols are subtracted, not values: both sides have the very same integers, so a frame that is sent as a difference
# is decoded to the same bits as one that is sent alone, and no error adds up. Each frame has a number and says which
# one it refers to, 0 for none (a *key frame*). A sender refers only to frames that were answered, so what is lost on
# the way, or was forgotten at the other side (`ReferenceLost`), costs one key frame.


KEY = 0
"""Stands for no frame."""


class References(Protocol):
    """Symbols of earlier frames of one tensor of one cut, int16 (blocks, R * H * W)."""

    @property
    def number(self) -> int:
        """A sender's: of the frame that is made now."""

    def get(self, number: int) -> torch.Tensor | None:
        """The symbols of that frame, if it is still here."""

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        """Keeps a frame's. Those before ``reference`` are not referred to any more."""

    def latest(self) -> int:
        """A sender's: the frame that it may refer to, `KEY` where there is none."""


class Frames(Codec):
    """As `Basis`, by ``book``; ``references`` are this side's. Parameters: the frame's number, that of the frame it
    refers to, and those of `Basis`.
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
        """Raises ReferenceLost where the frame that it refers to is not here."""
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
