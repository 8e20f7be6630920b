"""`Frames`: of frames that follow each other, what has changed since one that the other side has.

Symbols are subtracted, not values: both sides have the very same integers, so a frame that is sent as a difference is
decoded to the same bits as one that is sent alone, and no error adds up. Each frame has a number and says which one it
refers to, 0 for none (a *key frame*). A sender refers only to frames that were answered, so what is lost on the way, or
was forgotten at the other side (`ReferenceLost`), costs one key frame.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shared_hooks.codecs.basis.book import GROUPS, Book
from shared_hooks.codecs.basis.codec import NO_BOOK, Basis, packed, restored, symbols, unpacked
from shared_hooks.codecs.basis.symbols import LARGEST
from shared_hooks.codecs.codec import Codec, Coded, Param
from shared_hooks.codecs.grain import Grain
from shared_hooks.errors import ReferenceLost

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
