"""Sections of a frontier that leave while the head is still running, and while later ones are still encoded.

A skip connection is final long before the cut, and its bytes can be on their way meanwhile. The plan says when nothing
writes there any more; that it was so in this run is found out at the cut, by comparing what is there with a digest of
what has left. Where it was not, or the head took another path, the request that had begun is given up and sent whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from edge_client.transport import Opening, now_ns
from shared_hooks import Crossing, EarlyOutput, Parcel
from shared_hooks.codecs import RAW, Codec
from shared_hooks.crossing import ALIGN, Packing

LEAST: Final = 64 << 10
"""Bytes of a section that is worth messages of its own."""
STATE_BYTES: Final = 64 << 10
"""Most for the state of a random number generator."""
HEADER_BYTES: Final = 60 << 10
"""Most of a header that may follow its payload; one with more values goes first."""
CUTS: Final = 1024
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
            if len(self._in_vain) >= CUTS:
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
