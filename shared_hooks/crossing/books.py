"""From heads of one cut, run on a user's inputs, the books by which the codecs "basis" and "frames" send its pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared_hooks.codecs.basis import MAX_COEFFICIENTS, Book, learn
from shared_hooks.crossing.early import EarlyOutput
from shared_hooks.errors import SpecError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def books_of(heads: Sequence[EarlyOutput], step: float) -> tuple[Book | None, ...]:
    """One for each piece; None for a piece that holds no floats, is too large (with those before it), or never changes.

    ``heads``: of one cut; lengths and batches may differ. ``step``: as in `learn`. Raises SpecError for heads of
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
