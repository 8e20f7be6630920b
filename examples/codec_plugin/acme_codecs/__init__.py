"""`TopK`: the eighth of a tensor's elements that is largest, in 16 bits, and where they lie; all others are zero."""

import numpy as np
import torch

from shared_hooks.codecs import Codec, Coded, Grain, Param

SHARE = 8
_FLOATS = (torch.float32, torch.float64)
_ENTRY = 6
"""Bytes of an element that is kept: 4 for where it lies, 2 for its value."""


class TopK(Codec):
    """Any thread may call it: it keeps nothing between calls."""

    name = "acme:topk"
    lossless = False

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        """None for what it is not made for: that is sent raw."""
        if tensor.dtype not in _FLOATS or tensor.numel() < SHARE or not bool(torch.isfinite(tensor).all()):
            return None
        count = tensor.numel() // SHARE
        where = tensor.abs().topk(count).indices.sort().values
        values = tensor[where].clamp(-65504, 65504).to("cpu", torch.float16)
        data = where.cpu().numpy().astype("<u4").tobytes() + values.numpy().tobytes()
        return Coded(memoryview(data))

    def bound(self, dtype: torch.dtype, elements: int) -> int:
        """The most bytes that `encode` makes of so many elements."""
        return _ENTRY * (elements // SHARE)

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        """Strangers announce: this is called before anything is allocated."""
        if params or dtype not in _FLOATS or nbytes != _ENTRY * (elements // SHARE):
            raise ValueError(f"{nbytes} bytes are not an eighth of {elements} elements")

    def decode(self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Writable memory on the CPU, flat. Raises ValueError for anything but an encoding."""
        count = elements // SHARE
        where = np.frombuffer(data[: 4 * count], "<u4").astype(np.int64)
        if count and int(where.max()) >= elements:
            raise ValueError("an element that lies beyond the tensor")
        found = torch.zeros(elements, dtype=dtype)
        values = np.frombuffer(data[4 * count :], "<f2").copy()
        found[torch.from_numpy(where)] = torch.from_numpy(values).to(dtype)
        return found
