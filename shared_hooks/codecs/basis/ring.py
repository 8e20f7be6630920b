"""`Ring`: the symbols of the last frames of one tensor of one cut, by their numbers."""

from __future__ import annotations

import math

import torch

KEPT = 16
"""Frames; a sender with more of them on their way refers to one that is gone, and sends a key frame."""

BESIDE = 1 << 10
"""Bytes that a frame takes beside its symbols, however few these are."""


class Ring:
    """One thread at a time."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        """``most_bytes``: beyond it the oldest frames go, too; one that is larger by itself is not kept."""
        self._most_bytes = most_bytes
        self._kept: dict[int, torch.Tensor] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def get(self, number: int) -> torch.Tensor | None:
        return self._kept.get(number)

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        """Keeps a frame; those before ``reference``, and the oldest beyond a bound, go."""
        self._kept[number] = symbols
        for old in sorted(self._kept)[:-KEPT]:
            del self._kept[old]
        for old in [old for old in self._kept if old < reference]:
            del self._kept[old]
        while self.nbytes > self._most_bytes:
            del self._kept[min(self._kept)]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes + BESIDE for one in self._kept.values())
