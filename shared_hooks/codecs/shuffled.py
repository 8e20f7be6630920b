"""Bytes in another order before they are compressed: first the first byte of every element, then the second.

Exponents are alike, mantissas are not; so the ones stand together, and the others do not come between them.
"""

from __future__ import annotations

import numpy as np
import torch

from shared_hooks.codecs.byte_codec import ByteCodec, bytes_of
from shared_hooks.codecs.codec import Codec, Coded, Param
from shared_hooks.codecs.grain import Grain


class Shuffled(Codec):
    """``inner``, after shuffling."""

    lossless = True

    def __init__(self, inner: ByteCodec) -> None:
        self._inner = inner
        self.name = f"shuffle-{inner.name}"  # type: ignore[misc]  # of the object: there is one for each inner one

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        flat = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
        planes = np.empty_like(flat).reshape(tensor.itemsize, -1)
        for number, plane in enumerate(planes):
            plane[:] = flat[number :: tensor.itemsize]
        return Coded(self._inner.compress(planes.data.cast("B")))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        self._inner.check(params, dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        planes = np.frombuffer(self._inner.decompress(data, elements * dtype.itemsize), dtype=np.uint8).reshape(
            dtype.itemsize, -1
        )
        flat = np.empty(planes.size, dtype=np.uint8)
        for number, plane in enumerate(planes):
            flat[number :: dtype.itemsize] = plane
        return flat.data
