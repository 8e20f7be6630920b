"""Sends sections of what crosses while the head is still running, and while later ones are still encoded.

A skip connection is final long before the cut, and its bytes can be sent meanwhile. The plan says when nothing writes
there any more; whether that held in this run is checked at the cut, by a digest of what was sent. If it did not, or the
head took another path, the request that had begun is given up and sent as a whole.
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

# `SentFrames`: the frames that this side has sent with the codec "frames".
#
# A frame refers to the last one that was answered: the other side surely has that. A server that no longer keeps it
# reports so, and the frame is sent again, whole. Where that happens repeatedly (several worker processes, little
# memory), twice as many frames are sent without reference each time.


CUTS = 64
"""The number of cuts whose frames are remembered; a new size of inputs is a new cut."""
MOST_ALONE = 64


@dataclass(frozen=True, slots=True)
class PackedFrame:
    """A packed frame: its number, and the digest of its cut."""

    number: int
    cut: str


class SentFrames:
    """What was sent of a client's frames. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._rings: OrderedDict[str, list[Ring]] = OrderedDict()
        self._answered: dict[str, int] = {}
        self._alone = 0
        """The number of next frames that are sent without references."""
        self._pause = 0

    def codecs(self, early: EarlyOutput) -> tuple[list[Codec], PackedFrame]:
        """Return the codecs for the next frame, and its identity for `answered` and `lost`."""
        crossing = early.crossing
        with self._lock:
            rings = self._rings.setdefault(crossing.digest, [Ring() for _ in crossing.grains])
            self._rings.move_to_end(crossing.digest)
            if len(self._rings) > CUTS:
                gone, _ = self._rings.popitem(last=False)
                self._answered.pop(gone, None)
            frame = PackedFrame(next(self._numbers), crossing.digest)
            latest = KEY if self._alone else self._answered.get(crossing.digest, KEY)
            self._alone = max(0, self._alone - 1)
        bound = crossing.bound_to(lambda piece: _Piece(self, rings[piece], frame.number, latest))
        return [codecs[Frames.name] for codecs in bound], frame

    def answered(self, frame: PackedFrame) -> None:
        """Record that the other side has the frame."""
        with self._lock:
            if frame.cut in self._rings:
                self._answered[frame.cut] = max(frame.number, self._answered.get(frame.cut, KEY))
            self._pause //= 2

    def lost(self, frame: PackedFrame) -> None:
        """Record that the other side lacks what the frame refers to."""
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
    """The `References` of one piece of one frame."""

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
"""The least bytes of a section that is sent separately."""
STATE_BYTES: Final = 64 << 10
"""Most bytes of a random number generator's state."""
HEADER_BYTES: Final = 60 << 10
"""Most bytes of a header that may follow its payload; one with more values is sent first."""
AHEAD_CUTS: Final = 1024
Way = tuple[Crossing, Sequence[Codec]]
"""A cut with its books, and a codec for every piece."""


class Ahead:
    """Sends early what one head has ready; a `shared_hooks.head.CrossingListener`.

    ``way``: how a cut's values are packed, None if that is unknown in advance. ``begin`` announces a request at this
    cut, of at most so many bytes; returns None if it would not leave before the others. ``in_vain``: digests of cuts at
    which that failed before, and is not tried again.
    """

    def __init__(
        self,
        way: Callable[[Crossing], Way | None],
        begin: Callable[[Crossing, int], Opening | None],
        in_vain: set[str],
    ) -> None:
        self.took_ns = 0
        """Included in the head's time."""
        self.has_left = False
        """Whether anything was announced: then the server knows the request's id."""
        self._in_vain = in_vain
        self._way = way
        self._begin = begin
        self._planned: Crossing | None = None
        self._crossing: Crossing | None = None  # its crossing, with its codebooks
        self._codecs: Sequence[Codec] = ()
        self._first: list[int] = []
        self._packing = Packing()
        self._opening: Opening | None = None

    @property
    def opening(self) -> Opening | None:
        """What must be closed with the request; None if it is sent as a whole."""
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
        """Return the frontier, whose sections have been sent or are sent one by one; None if it is sent as a whole."""
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
        """Give up what was begun."""
        opening, self._opening, self._crossing = self._opening, None, None
        self._packing = Packing()
        if opening is not None:
            opening.give_up()

    def _was_in_vain(self) -> None:
        """Record that this cut's sections cannot be sent early: its head does not follow the plan, or is read again."""
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
