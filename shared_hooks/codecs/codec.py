"""`Codec`: what turns a tensor into fewer bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import torch

from shared_hooks.codecs.grain import Grain

Param = int | float | str
MAX_PARAMS: Final = 16
MAX_TEXT: Final = 64


class Coded(NamedTuple):
    """A tensor as bytes. ``params``: what `Codec.decode` needs to know beside dtype and number; JSON has them."""

    data: memoryview
    params: tuple[Param, ...] = ()


class Codec(ABC):
    """Without state: one object serves every thread.

    What is decoded comes from strangers. `check` sees what is announced, before anything is allocated; `decode` makes
    no more than the elements that are announced, and a small multiple of that while it works.
    """

    name: ClassVar[str]
    """On the wire and on the command line. Another version of a codec's bytes is another codec: "int8" and "int8/2"."""

    lossless: ClassVar[bool]
    """Whether `decode` gives back the very bits."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        """``tensor`` (flat and contiguous, one element or more, any dtype, on any device), encoded.

        None where it cannot be (another dtype, a value that would be lost): the caller sends it raw, as it does with
        what has not become smaller.
        """

    @abstractmethod
    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        """Raises ValueError where ``nbytes`` encoded bytes with ``params`` cannot stand for such a tensor."""

    @abstractmethod
    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        """The flat tensor on the CPU (or its bytes) that `encode` took: writable memory of its own.

        ``params``, ``dtype``, ``elements`` and the size of ``data`` have passed `check`. Raises ValueError for anything
        but an encoding of such a tensor.
        """


Bound = Sequence[Mapping[str, Codec]]
"""For each tensor, by name, codecs with what they need beside the bytes; others are those of the list."""
