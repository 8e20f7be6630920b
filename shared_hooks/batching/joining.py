"""Several frontiers of one cut made into the frontier of their batch, and the batch's output taken apart again.

Pure functions: what they are given says which dimension of which tensor is the batch, and nothing is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared_hooks.batching.growth import Growth
from shared_hooks.crossing import Crossing, EarlyOutput, Slot
from shared_hooks.errors import InputMismatch


@dataclass(frozen=True, slots=True)
class Part:
    """``rows`` of a batch: their frontier, and their cut as the batch's plans describe it."""

    early: EarlyOutput
    rows: int
    crossing: Crossing


def joined(parts: Sequence[Part], crossing: Crossing, pieces: Sequence[Growth | None]) -> EarlyOutput:
    """The frontier of all rows, in the order of ``parts``, in memory of its own, so that a tail may work in it.

    ``crossing``: the cut for so many rows; ``pieces``: how each of its pieces grows. A piece that does not grow must be
    the same in all parts, bit for bit. Raises InputMismatch where it is not.
    """
    several = [_pieces(part) for part in parts]
    rows = [part.rows for part in parts]
    shapes = [piece.shape for slot in crossing.slots for piece in slot.pieces]
    made = []
    for number, (grows, shape) in enumerate(zip(pieces, shapes, strict=True)):
        own = [one[number] for one in several]
        if grows is None:
            if not all(_same(own[0], other) for other in own[1:]):
                raise InputMismatch(
                    f"piece {number} of the frontier belongs to no row, and is not the same in all parts"
                )
            made.append(own[0].clone())
            continue
        rowed = [piece.reshape(grows.at(count)) for piece, count in zip(own, rows, strict=True)]
        made.append(torch.cat(rowed, grows.axis).reshape(shape))
    return EarlyOutput(crossing, tuple(made), (), disposable=True)


def apart(tensors: Sequence[torch.Tensor], rows: Sequence[int], grows: Sequence[Growth]) -> list[list[torch.Tensor]]:
    """The tensors of a batch's output for each of its parts, which have so many ``rows``. Parts may share memory."""
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for tensor, one in zip(tensors, grows, strict=True):
        for own, part in zip(found, tensor.split([one.each * count for count in rows], one.axis), strict=True):
            own.append(part)
    return found


def _pieces(part: Part) -> list[torch.Tensor]:
    """The part's pieces as the batch's plans cut them: of a storage that came whole, what is read of it."""
    found: list[torch.Tensor] = []
    pieces = iter(part.early.pieces)
    for sent, wanted in zip(part.early.crossing.slots, part.crossing.slots, strict=True):
        own = [next(pieces) for _ in sent.pieces]
        if sent.pieces == wanted.pieces:
            found += own
        else:
            assert is_whole(sent), "parts are of a known cut, or whole storages"
            whole = own[0].reshape(-1)
            found += [
                whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset)
                for view in wanted.pieces
            ]
    return found


def is_whole(slot: Slot) -> bool:
    """Whether all of its storage crosses, as it lies there."""
    return len(slot.pieces) == 1 and slot.pieces[0].shape == (slot.elements,) and slot.pieces[0].offset == 0


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.reshape(-1), other.reshape(-1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
