"""Sections of a frontier that leave while the head is still running, and while later ones are still encoded.

A skip connection is final long before the cut, and its bytes can be on their way meanwhile. The plan says when nothing
writes there any more; that it was so in this run is found out at the cut, by comparing what is there with a digest of
what has left. Where it was not, or the head took another path, the request that had begun is given up and sent whole.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from edge_client.transport import Opening, now_ns
from shared_hooks import Crossing, EarlyOutput, Parcel
from shared_hooks.codecs import RAW, Codec
from shared_hooks.codecs.basis import KEY, Frames, Ring
from shared_hooks.crossing import ALIGN, Packing

# `SentFrames`: what this side knows of the frames that it has sent with the codec "frames".
#
# A frame refers to the last one that was answered: that one is surely known at the other side. A server that does not
# keep it any more says so, and the frame is sent again, whole. Where that happens again and again (several worker
# processes, little memory), twice as many frames each time go without reference.


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


LEAST: Final = 64 << 10
"""Bytes of a section that is worth messages of its own."""
STATE_BYTES: Final = 64 << 10
"""Most for the state of a random number generator."""
HEADER_BYTES: Final = 60 << 10
"""Most of a header that may follow its payload; one with more values goes first."""
AHEAD_CUTS: Final = 1024
Way = tuple[Crossing, Sequence[Codec]]
"""A cut with its books, and a codec for every piece."""


class Ahead:
    """Sends what one head has ready early; a `shared_hooks.head.Listener`.

    ``way``: how what crosses is packed, None where that is not known before it is there. ``begin`` announces a request
    at this cut, of so many bytes at most; None where it would not leave before the others. ``in_vain``: digests of
    cuts at which that came to nothing before, and is not tried again.
    """

    def __init__(
        self,
        way: Callable[[Crossing], Way | None],
        begin: Callable[[Crossing, int], Opening | None],
        in_vain: set[str],
    ) -> None:
        self.took_ns = 0
        """Within the head's time."""
        self.has_left = False
        """Whether anything was announced: then the server knows the request's id."""
        self._in_vain = in_vain
        self._way = way
        self._begin = begin
        self._planned: Crossing | None = None
        self._crossing: Crossing | None = None  # that, with its books
        self._codecs: Sequence[Codec] = ()
        self._first: list[int] = []
        self._packing = Packing()
        self._opening: Opening | None = None

    @property
    def opening(self) -> Opening | None:
        """What is to be closed with the request; None where it goes whole."""
        return self._opening

    def begins(self, crossing: Crossing) -> bool:
        self._was_in_vain()  # that one has left its path
        tried = self.has_left or crossing.digest in self._in_vain
        way = None if tried or crossing.layer_id < 0 else self._way(crossing)
        if way is None:
            return False
        self._planned, (self._crossing, self._codecs) = crossing, way
        self._first = [0]
        for slot in crossing.slots:
            self._first.append(self._first[-1] + len(slot.pieces))
        return True

    def final(self, slot: int, pieces: tuple[torch.Tensor, ...]) -> None:
        if sum(piece.numel() * piece.itemsize for piece in pieces) < LEAST or not self._open():
            return
        began = now_ns()
        for number, piece in enumerate(pieces, self._first[slot]):
            self._packing.hold(number, piece)
            self._add(number, piece)
        self.took_ns += now_ns() - began

    def parcel(self, early: EarlyOutput, codecs: Sequence[Codec]) -> Parcel | None:
        """The frontier, whose sections have left, or leave one by one; None where it goes whole."""
        if self._crossing is None or early.crossing is not self._crossing:
            self._was_in_vain()
            return None
        tensors, packing = early.tensors, self._packing
        large = [one for one in early.pieces if one.numel() * one.itemsize >= LEAST]
        if self._opening is None and (len(large) < 2 or all(codec is RAW for codec in codecs) or not self._open()):
            return None
        names = [codec.name for codec in codecs]
        for number, tensor in enumerate(tensors):
            if number in packing and names[number] != self._codecs[number].name:
                self.give_up()
                return None
            if number in packing and not packing.holds(number, tensor):
                self._was_in_vain()
                return None
        self._codecs = codecs
        for number, tensor in enumerate(tensors):
            if number not in packing:
                self._add(number, tensor)
        parcel = Parcel.packed(packing, early.meta, tensors)
        if len(parcel.header) > HEADER_BYTES:
            self._was_in_vain()
            return None
        return parcel

    def give_up(self) -> None:
        """What was begun comes to nothing."""
        opening, self._opening, self._crossing = self._opening, None, None
        self._packing = Packing()
        if opening is not None:
            opening.give_up()

    def _was_in_vain(self) -> None:
        """This cut's sections cannot leave early: its head is not what the plan says, or what is read is not."""
        if self._planned is not None and self._opening is not None:
            if len(self._in_vain) >= AHEAD_CUTS:
                self._in_vain.clear()
            self._in_vain.add(self._planned.digest)
        self.give_up()

    def _open(self) -> bool:
        if self._opening is None and not self.has_left and self._crossing is not None:
            crossing = self._crossing
            states = len(crossing.generators)
            most = crossing.payload_bytes + states * STATE_BYTES + 2 * ALIGN * (self._first[-1] + states)
            self._opening = self._begin(crossing, most)
            self.has_left = self._opening is not None
        return self._opening is not None

    def _add(self, number: int, tensor: torch.Tensor) -> None:
        assert self._crossing is not None and self._opening is not None
        grains = self._crossing.grains
        codec = self._codecs[number] if number < len(self._codecs) else RAW
        self._opening.add(self._packing.add(number, tensor, codec, grains[number] if number < len(grains) else None))
