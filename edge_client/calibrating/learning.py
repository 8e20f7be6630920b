"""Books for the codec "basis": learnt at every cut from inputs that are set apart, in several steps; one is kept.

Of the steps, from the finest on, each is judged by its own upper bound, until one loses more than is allowed; the one
before it is taken. Tests in a fixed order need no correction for their number: the bound of what is taken holds as if
it had been the only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from edge_client.calibrating.tally import Tally
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.codecs.basis import Book
from shared_hooks.crossing import books_of
from shared_hooks.errors import IsthmusError
from shared_hooks.tensors import copied

STEPS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Standard deviations of a cut's values to a quantiser's cell."""
LEAST: Final = 8
"""Inputs to learn from."""
MOST: Final = 200
SHARE: Final = 4
"""One input of so many is learnt from."""

Call = tuple[Any, Any]
Books = tuple[Book | None, ...]


def set_apart(count: int, wanted: int | None) -> list[int]:
    """The numbers of inputs to learn from, spread over all of them; none where they would be too few.

    ``wanted``: less than ``count``; None: one of `SHARE`.
    """
    learnt = min(MOST, count // SHARE) if wanted is None else wanted
    if learnt < LEAST and wanted is None:
        return []
    return sorted({number * count // learnt for number in range(learnt)}) if learnt > 0 else []


def learn(wrapped: WrappedModel, cut: str, calls: Sequence[Call]) -> dict[float, Books]:
    """By step, the books of a cut; empty where nothing can be learnt. Raises what the model raises."""
    heads: list[EarlyOutput] = []
    for args, kwargs in calls:
        args, kwargs = copied(args, kwargs)
        try:
            heads.append(wrapped.head(cut, *args, **kwargs))
        except IsthmusError:  # this input takes a path without that cut
            continue
    pieces = len(heads[0].pieces) if heads else 0
    heads = [head for head in heads if len(head.pieces) == pieces]
    if len(heads) < 2:
        return {}
    found = {step: books_of(heads, step) for step in STEPS}
    return {step: books for step, books in found.items() if any(book is not None for book in books)}


def coarsest(tallies: Sequence[Tally], max_loss: float) -> Tally | None:
    """The coarsest step of one codec at one cut that loses no more than is allowed; the finest step comes first."""
    chosen = None
    for tally in tallies:
        if chosen is not None and (tally.stopped or tally.bounds()[1] > max_loss):
            break
        chosen = tally
    return chosen
