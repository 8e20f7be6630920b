"""`SentFrames`: what this side knows of the frames that it has sent with the codec "frames".

A frame refers to the last one that was answered: that one is surely known at the other side. A server that does not
keep it any more says so, and the frame is sent again, whole. Where that happens again and again (several worker
processes, little memory), twice as many frames each time go without reference.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from shared_hooks import EarlyOutput
from shared_hooks.codecs import Codec
from shared_hooks.codecs.basis import KEY, Frames, Ring

CUTS = 64
"""Descriptions of cuts whose frames are remembered; a new size of inputs is a new one."""
MOST_ALONE = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """One that was packed: its number, and the digest of its cut."""

    number: int
    cut: str


class SentFrames:
    """Any thread may call."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._rings: OrderedDict[str, list[Ring]] = OrderedDict()
        self._answered: dict[str, int] = {}
        self._alone = 0
        """Frames still to go without reference."""
        self._pause = 0

    def codecs(self, early: EarlyOutput) -> tuple[list[Codec], Frame]:
        """To pack the next frame with, and the name by which `answered` and `lost` know it."""
        crossing = early.crossing
        with self._lock:
            rings = self._rings.setdefault(crossing.digest, [Ring() for _ in crossing.grains])
            self._rings.move_to_end(crossing.digest)
            if len(self._rings) > CUTS:
                gone, _ = self._rings.popitem(last=False)
                self._answered.pop(gone, None)
            frame = Frame(next(self._numbers), crossing.digest)
            latest = KEY if self._alone else self._answered.get(crossing.digest, KEY)
            self._alone = max(0, self._alone - 1)
        bound = crossing.bound_to(lambda piece: _Piece(self, rings[piece], frame.number, latest))
        return [codecs[Frames.name] for codecs in bound], frame

    def answered(self, frame: Frame) -> None:
        """The other side has it."""
        with self._lock:
            if frame.cut in self._rings:
                self._answered[frame.cut] = max(frame.number, self._answered.get(frame.cut, KEY))
            self._pause //= 2

    def lost(self, frame: Frame) -> None:
        """The other side does not have what it refers to."""
        with self._lock:
            self._answered.pop(frame.cut, None)
            self._alone = self._pause
            self._pause = min(MOST_ALONE, 2 * self._pause + 1)

    def get(self, ring: Ring, number: int) -> torch.Tensor | None:
        with self._lock:
            return ring.get(number)

    def put(self, ring: Ring, number: int, symbols: torch.Tensor, reference: int) -> None:
        with self._lock:
            ring.put(number, symbols, reference)


@dataclass(frozen=True, slots=True)
class _Piece:
    """`References` of one piece of one frame."""

    frames: SentFrames
    ring: Ring
    number: int
    last: int

    def get(self, number: int) -> torch.Tensor | None:
        return self.frames.get(self.ring, number)

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        self.frames.put(self.ring, number, symbols, reference)

    def latest(self) -> int:
        return self.last
