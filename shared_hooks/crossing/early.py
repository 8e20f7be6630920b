"""What crosses a cut: the frontier's bytes, the Python values read before it, and the description of the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shared_hooks.codecs import Bound, Codec, by_wire
from shared_hooks.codecs.basis import MAX_COEFFICIENTS, Basis, Book, learn
from shared_hooks.crossing.description import Crossing
from shared_hooks.crossing.format import MAX_CROSSING_BYTES, decode
from shared_hooks.crossing.parcel import ALIGN, Parcel
from shared_hooks.errors import BadFrame, SpecError, TooLarge
from shared_hooks.showing import short
from shared_hooks.tensors import Structure, form_of

MAGIC = b"ISTHMUS2"
DEFAULT_MAX_BYTES = 1 << 30
_PREFIX = len(MAGIC) + 4 + 4 + 8 + 8


@short
@dataclass(frozen=True, eq=False)
class EarlyOutput:
    """The result of a head. ``pieces``: one tensor per piece of each slot of ``crossing``, in order.

    They may lie in memory that must not be written (the ``bytes`` they came in). ``values``: structures of the Python
    values that were read from data. ``generators``: states of random number generators, uint8, as many as ``crossing``
    names. ``starts``: the address of each slot's storage on the edge modulo 64, in bytes; empty if all are 0.
    ``disposable``: it is used once, so the tail may write to its memory.
    """

    crossing: Crossing
    pieces: tuple[torch.Tensor, ...]
    values: tuple[Structure, ...]
    generators: tuple[torch.Tensor, ...] = ()
    starts: tuple[int, ...] = ()
    disposable: bool = False

    @property
    def layer_id(self) -> int:
        """The layer after which the model was cut; -1 for "input"."""
        return self.crossing.layer_id

    @property
    def layer_name(self) -> str:
        """The name of that layer or block; for a branch cut all of its names."""
        return self.crossing.name

    @property
    def nbytes(self) -> int:
        """The raw bytes of the frontier."""
        return self.crossing.payload_bytes

    def pack(self, codec: str | Codec | Sequence[Codec] = "raw") -> Parcel:
        """Header and payload, without the cut's description. ``codec``: for all pieces, or one for each of them."""
        if codec == Basis.name:
            codec = [codecs[codec] for codecs in self.crossing.bound]
        elif isinstance(codec, str) and (own := by_wire(codec)) is not None:
            codec = [own.at(self.layer_name, number) for number in range(len(self.pieces))]
        return Parcel.of_tensors(self.meta, self.tensors, codec, self.crossing.grains)

    @property
    def meta(self) -> Any:
        """The part of its header besides the tensors, for JSON."""
        if self.values or self.starts:
            return [self.crossing.digest, self.values, self.starts]
        return self.crossing.digest

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is packed: pieces, and states of generators."""
        return [*self.pieces, *self.generators]

    @classmethod
    def unpack(
        cls,
        crossing: Crossing,
        header: bytes,
        payload: Any,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        disposable: bool = False,
        bound: Bound | None = None,
    ) -> EarlyOutput:
        """Return the reverse of `pack`. A writable ``payload`` is used in place. Raises `BadFrame`, `TooLarge`.

        ``bound``: codecs with what is kept here of earlier frames (`Crossing.bound_to`); then also `ReferenceLost`.
        """
        meta, tensors = Parcel.tensors(header, payload, max_bytes, crossing.bound if bound is None else bound)
        digest, values, starts = meta if isinstance(meta, list) and len(meta) == 3 else (meta, [], [])
        if digest != crossing.digest:
            raise BadFrame("the payload belongs to another cut")
        if not isinstance(values, list) or _forms(values) != [read.form for read in crossing.reads]:
            raise BadFrame("the header brings other Python values than the cut needs")
        expected = [(slot.dtype, piece.shape) for slot in crossing.slots for piece in slot.pieces]
        states = tensors[len(expected) :]
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors[: len(expected)]] != expected:
            raise BadFrame("the payload has other tensors than the cut")
        if len(states) != len(crossing.generators) or any(s.dtype is not torch.uint8 or s.dim() != 1 for s in states):
            raise BadFrame("the payload has other states of generators than the cut")
        _check_starts(crossing, starts)
        pieces = tuple(tensors[: len(expected)])
        return cls(crossing, pieces, tuple(values), tuple(states), tuple(starts), disposable)

    def to_bytes(self, codec: str | Codec | Sequence[Codec] = "raw") -> bytes:
        """Everything in one piece: magic, sizes, checksum, the cut's description, header, zeros, payload."""
        parcel = self.pack(codec)
        crossing = self.crossing.to_bytes()
        sizes = len(crossing).to_bytes(4, "little") + len(parcel.header).to_bytes(4, "little")
        sizes += parcel.nbytes.to_bytes(8, "little")
        front = MAGIC + sizes
        checksum = xxhash.xxh3_64_intdigest(front + crossing).to_bytes(8, "little")
        # dtypes need their own alignment; what kernels want beyond it, the tail sees to
        padding = bytes(-(_PREFIX + len(crossing) + len(parcel.header)) % ALIGN)
        return b"".join((front, checksum, crossing, parcel.header, padding, *parcel.buffers))

    @classmethod
    def from_bytes(cls, data: Any, max_bytes: int = DEFAULT_MAX_BYTES) -> EarlyOutput:
        """Read `to_bytes`.

        ``max_bytes`` bounds the payload and what is allocated for it. Raises `BadFrame`, `TooLarge`.
        """
        crossing, header, payload = parts(data, max_bytes)
        return cls.unpack(decode(crossing, max_bytes), header, payload, max_bytes)


def parts(data: Any, max_bytes: int = DEFAULT_MAX_BYTES) -> tuple[bytes, bytes, memoryview]:
    """Return the cut's description, header and payload of `EarlyOutput.to_bytes`. Raises `BadFrame`, `TooLarge`."""
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX or view[: len(MAGIC)] != MAGIC:
        raise BadFrame("not the bytes of an EarlyOutput, or truncated before the sizes")
    crossing_size = int.from_bytes(view[8:12], "little")
    header_size = int.from_bytes(view[12:16], "little")
    payload_size = int.from_bytes(view[16:24], "little")
    if payload_size > max_bytes or crossing_size > MAX_CROSSING_BYTES:
        raise TooLarge(f"{max(payload_size, crossing_size)} bytes are announced; at most {max_bytes} are taken")
    start = _PREFIX + crossing_size + header_size
    padding = -start % ALIGN
    if len(view) != start + padding + payload_size or any(view[start : start + padding]):
        raise BadFrame(f"truncated or extended: {len(view)} bytes are not what the sizes at the front add up to")
    crossing_data = bytes(view[_PREFIX : _PREFIX + crossing_size])
    if view[24:_PREFIX] != xxhash.xxh3_64_intdigest(bytes(view[:24]) + crossing_data).to_bytes(8, "little"):
        raise BadFrame("altered: the checksum of the cut's description is wrong")
    header = bytes(view[_PREFIX + crossing_size : start])
    return crossing_data, header, view[start + padding :].toreadonly()


def _forms(values: list[Any]) -> list[Any]:
    try:
        return [form_of(value) for value in values]
    except RecursionError:
        raise BadFrame("the header brings values that are nested too deeply") from None


def _check_starts(crossing: Crossing, starts: Any) -> None:
    if starts == []:
        return
    if not isinstance(starts, list) or len(starts) != len(crossing.slots):
        raise BadFrame("the header gives the starts of other slots than the cut has")
    for start, slot in zip(starts, crossing.slots, strict=True):
        if type(start) is not int or not 0 <= start < ALIGN or start % slot.dtype.itemsize:
            raise BadFrame(f"a slot of {slot.dtype} cannot begin at an address of {start!r:.20} modulo {ALIGN}")


# From heads of one cut, run on a user's inputs, the books by which the codecs "basis" and "frames" send its pieces.


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def books_of(heads: Sequence[EarlyOutput], step: float) -> tuple[Book | None, ...]:
    """Return a book for each piece; None for one that holds no floats, is too large (with those before it), or never
    changes.

    ``heads``: at one cut; lengths and batches may differ. ``step``: as in `learn`. Raises SpecError for heads of
    different cuts, and for none.
    """
    if not heads:
        raise SpecError("a basis is learnt from heads of a cut, and there are none")
    names, pieces = {head.layer_name for head in heads}, {len(head.pieces) for head in heads}
    if len(names) > 1 or len(pieces) > 1:
        raise SpecError(f"a basis is learnt from heads of one cut, and these are of {', '.join(sorted(names))}")
    found: list[Book | None] = []
    left = MAX_COEFFICIENTS
    for number in range(pieces.pop()):
        book = _book(heads, number, step)
        found.append(book if book is None or book.coefficients <= left else None)
        left -= 0 if found[-1] is None else found[-1].coefficients
    return tuple(found)


def _book(heads: Sequence[EarlyOutput], number: int, step: float) -> Book | None:
    grain = heads[0].crossing.grains[number]
    alike = [head.crossing.grains[number][1:] == grain[1:] for head in heads]
    if heads[0].pieces[number].dtype not in _FLOATS or not all(alike) or grain.elements == 0:
        return None
    try:
        return learn([head.pieces[number] for head in heads], grain, step)
    except SpecError as error:
        if "step=" in str(error):
            raise
        return None
