"""Numbers <-> symbols: divided by a step and rounded to whole levels, where the numbers are.

A number is ``(symbol - zero) * step`` once more. All of it is sums and products of float32 in a fixed order, so every
machine decodes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

_CHUNK = 1 << 18
"""Elements that are worked on at a time on a CPU: with what is made of them they stay in its caches."""
_WHOLE = float(1 << 23)
"""A float32 from here to twice as much has whole numbers only, and they stand in its lowest bits."""


class Levels(NamedTuple):
    """Symbols 0 to ``top``, and which of them stands for zero."""

    top: int
    zero: float

    @property
    def side(self) -> int:
        """Levels above zero."""
        return int(self.top - self.zero)

    @classmethod
    def of(cls, bits: int, signed: bool) -> Levels:
        """Without sign all levels are from zero upwards; with it as many on each side. One signed bit has no zero."""
        if not signed:
            return cls((1 << bits) - 1, 0.0)
        return cls(1, 0.5) if bits == 1 else cls((1 << bits) - 2, float((1 << bits - 1) - 1))


def rounded(values: torch.Tensor, steps: torch.Tensor, levels: Levels) -> torch.Tensor:
    """The symbols, flat, uint8, on the device of ``values`` (rank 3, float32, finite).

    ``steps``: float32, more than 0, of a shape that spreads over ``values``. What is beyond the levels gets the last.
    """
    found = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    inverse = 1 / steps
    for part in _parts(values):
        numbers = values[part] * _at(inverse, part)
        if levels.zero:
            numbers.add_(levels.zero)
        found[part] = numbers.clamp_(0, levels.top).add_(_WHOLE).view(torch.int32)
    return found.view(-1)


def restored(symbols: torch.Tensor, steps: torch.Tensor, levels: Levels) -> torch.Tensor:
    """The numbers, in the memory of ``symbols`` (rank 3, float32)."""
    for part in _parts(symbols):
        numbers = symbols[part]
        if levels.zero:
            numbers.sub_(levels.zero)
        numbers.mul_(_at(steps, part))
    return symbols


def _parts(whole: torch.Tensor) -> Iterator[tuple[slice, ...]]:
    """Slices that make up ``whole``, along its first dimension of more than one."""
    axis = next((axis for axis, size in enumerate(whole.shape) if size > 1), 0)
    size = whole.shape[axis]
    rows = size if whole.is_cuda else max(1, _CHUNK * size // max(1, whole.numel()))
    for start in range(0, size, rows):
        yield (slice(None),) * axis + (slice(start, start + rows),)


def _at(steps: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    return steps[tuple(one if size > 1 else slice(None) for one, size in zip(part, steps.shape, strict=False))]
