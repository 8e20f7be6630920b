"""`ByteCodec`: a codec that sees bytes and knows nothing of what they stand for."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from shared_hooks.codecs.codec import Codec, Coded, Param
from shared_hooks.codecs.grain import Grain
from shared_hooks.tensors.staging import to_host


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor; one of a GPU is copied here first."""
    return memoryview(to_host(tensor).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ByteCodec(Codec):
    """Lossless. `grows` bounds how far its bytes expand."""

    lossless = True

    grows: ClassVar[int]
    """An encoded byte stands for so many bytes at most."""

    @abstractmethod
    def compress(self, data: memoryview) -> memoryview:
        """``data`` (one byte or more), encoded."""

    @abstractmethod
    def decompress(self, data: memoryview, nbytes: int) -> memoryview:
        """The ``nbytes`` bytes, writable. Raises ValueError, before more than that is allocated."""

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        return Coded(self.compress(bytes_of(tensor)))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if params:
            raise ValueError("it has no parameters")
        if elements * dtype.itemsize > self.grows * max(nbytes, 1):
            raise ValueError(f"{nbytes} bytes cannot stand for so much")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return self.decompress(data, elements * dtype.itemsize)
