"""Lossy codecs of the tests: int8 or 2-bit steps of the largest value, whatever the shipped codecs are."""

from __future__ import annotations

import torch

from shared_hooks.codecs import Codec, Coded, Grain, Param


class Rounded(Codec):
    """A byte an element."""

    lossless = False

    def __init__(self, name: str, steps: int) -> None:
        self.name = name  # type: ignore[misc]
        self._steps = steps

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        if tensor.dtype is not torch.float32:
            return None
        most = float(tensor.abs().max()) or 1.0
        whole = (tensor / most * self._steps).round().to(torch.int8)
        return Coded(memoryview(whole.view(torch.uint8).numpy()), (most,))  # type: ignore[arg-type]

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if len(params) != 1 or dtype is not torch.float32 or elements != nbytes:
            raise ValueError("no such encoding")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return torch.frombuffer(bytearray(data), dtype=torch.int8).float() * (float(params[0]) / self._steps)


FINE = Rounded("test-fine", 127)
COARSE = Rounded("test-coarse", 1)
