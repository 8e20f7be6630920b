"""`Grain`: how the elements of a flat tensor hang together, for codecs that treat channels or tokens alike."""

from __future__ import annotations

from typing import NamedTuple

from shared_hooks.tensors import View

_MAP_RANK = 4
"""(N, C, H, W) and beyond are feature maps; below, the last dimension holds a token's features."""


class Grain(NamedTuple):
    """In the order of memory: ``outer`` times ``channels`` times ``inner`` elements. ``is_map``: of a feature map,
    whose lines hold ``width`` of the inner ones.

    (N, C, H, W) is (N, C, H * W), in channels-last memory (N * H * W, C, 1); hidden states (N, T, D) are (N * T, D, 1).
    """

    outer: int
    channels: int
    inner: int
    is_map: bool
    width: int = 1

    @property
    def elements(self) -> int:
        return self.outer * self.channels * self.inner

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...]) -> Grain:
        """The grain of a tensor whose elements fill one run of memory, in whatever order of dimensions."""
        count = View(shape, stride, 0).numel
        is_map = len(shape) >= _MAP_RANK
        axis = 1 if is_map else len(shape) - 1
        if axis < 0 or count == 0 or shape[axis] <= 1:
            return cls(1, max(1, count), 1, is_map) if is_map else cls(count, 1, 1, is_map)
        channels, inner = shape[axis], stride[axis]
        if count % (channels * inner):  # not a run after all
            return cls(1, count, 1, is_map)
        width = shape[-1] if is_map and stride[-1] == 1 and inner % shape[-1] == 0 else 1
        return cls(count // (channels * inner), channels, inner, is_map, width)
