"""What is judged, behind one interface: a way to split the forward of a model for the time of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Watched:
    """``sent``: all that crossed the link, both directions, known in the block and after. ``steps``: calls of the model
    that were split, known after the block; without any, equal tokens show nothing.
    """

    sent: list[bytes] = field(default_factory=list)
    steps: int = 0


Engine = Callable[[nn.Module, nn.Module, str], AbstractContextManager[Watched]]
"""Takes the model here, its equal there, and the path of the module after which to cut."""


@contextlib.contextmanager
def split(here: nn.Module, there: nn.Module, cut: str) -> Iterator[Watched]:
    """The project's own: steps go through bytes, in one process."""
    from shared_hooks.generation import DecodingTail, InProcess, SplitForward

    watched = Watched()
    link = InProcess(DecodingTail(there, cut), record=watched.sent)
    with SplitForward(here, cut, link) as forward:
        try:
            yield watched
        finally:
            watched.steps = len(forward.records)


@contextlib.contextmanager
def whole(here: nn.Module, there: nn.Module, cut: str) -> Iterator[Watched]:
    """Splits nothing: the harness by itself. A step is a call of the module at the cut."""
    del there
    watched = Watched()

    def count(*_: object) -> None:
        watched.steps += 1

    hook = here.get_submodule(cut).register_forward_hook(count)
    try:
        yield watched
    finally:
        hook.remove()


ENGINES: dict[str, Engine] = {"split": split, "whole": whole}
