"""Codecs that need a book, with one of maps like `MAP`; frames refer to nothing."""

from __future__ import annotations

import torch

from shared_hooks.codecs import CODECS, RAW, Codec, Grain
from shared_hooks.codecs.basis import KEY, Basis, Frames, Ring, learn

DICE = torch.Generator().manual_seed(2)
MAP = torch.randn(1, 16, 16, 16, generator=DICE).relu()
MAP[0, 3, 0, :2] = 90.0  # kept apart by some
GRAIN = Grain.of(tuple(MAP.shape), tuple(MAP.stride()))
BOOK = learn([MAP.reshape(-1), torch.randn(MAP.shape, generator=DICE).relu().reshape(-1)], GRAIN, 0.5)


class Nothing(Ring):
    """`References` of a side that was sent nothing."""

    number = 1

    def latest(self) -> int:
        return KEY


BOUND: list[Codec] = [Basis(BOOK), Frames(BOOK, Nothing())]
ALL = [codec for codec in CODECS.values() if codec is not RAW and codec.name not in ("basis", "frames")] + BOUND
