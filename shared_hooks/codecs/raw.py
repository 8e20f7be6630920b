"""The bytes as they are."""

from __future__ import annotations

import torch

from shared_hooks.codecs.byte_codec import bytes_of
from shared_hooks.codecs.codec import Codec, Coded, Param
from shared_hooks.codecs.grain import Grain


class Raw(Codec):
    """Copies nothing: received tensors are used where they lie, which may be memory that must not be written."""

    name = "raw"
    lossless = True

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        return Coded(bytes_of(tensor))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if params or elements * dtype.itemsize != nbytes:
            raise ValueError(f"{nbytes} bytes are not {elements} elements of {dtype}")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return data
