"""`Watched`: a codec that tells how long it took for a tensor, and what it made of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shared_hooks.codecs import Codec, Coded, Grain, Param

Note = Callable[[int, int, int], None]
"""(bytes of the tensor, bytes that are left, nanoseconds)."""


class Watched(Codec):
    """``note`` hears of every tensor that is encoded; one that the codec does not take stays as large as it is."""

    def __init__(self, codec: Codec, note: Note) -> None:
        self._codec = codec
        self._note = note
        self.name = codec.name  # type: ignore[misc]
        self.lossless = codec.lossless  # type: ignore[misc]

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        started = time.perf_counter_ns()
        coded = self._codec.encode(tensor, grain)
        took = time.perf_counter_ns() - started
        nbytes = tensor.numel() * tensor.itemsize
        self._note(nbytes, nbytes if coded is None else min(nbytes, len(coded.data)), took)
        return coded

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        self._codec.check(params, dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return self._codec.decode(data, params, dtype, elements)
