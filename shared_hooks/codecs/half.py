"""Floats rounded to 16 bits: half the bytes of float32, a quarter of float64."""

from __future__ import annotations

import torch

from shared_hooks.codecs.byte_codec import bytes_of
from shared_hooks.codecs.codec import Codec, Coded, Param
from shared_hooks.codecs.grain import Grain

_WIDER = (torch.float32, torch.float64)


class Half(Codec):
    """To the nearest value of ``dtype``, ties to even. A finite value beyond the largest one makes it None: raw."""

    lossless = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]  # of the object: there are two
        self._dtype = dtype

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        if tensor.dtype not in _WIDER:
            return None
        found = tensor.to(self._dtype)
        # the largest is NaN where any is
        if not torch.isfinite(found.abs().amax()) and not torch.equal(found.isinf(), tensor.isinf()):
            return None
        return Coded(bytes_of(found))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if params or dtype not in _WIDER or nbytes != 2 * elements:
            raise ValueError(f"{nbytes} bytes are not {elements} elements of {self._dtype} for {dtype}")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return torch.frombuffer(bytearray(data), dtype=self._dtype).to(dtype)
