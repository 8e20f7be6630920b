"""The states of random number generators that cross a cut: what the tail draws must be what the whole model would.

Torch's own generator of the CPU arrives as it is at the cut, and the server's is put back when the tail is done. It is
one for the whole process, so tails that draw run one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shared_hooks.errors import BadFrame

_lock = threading.RLock()


def now(names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """The states of these generators, uint8."""
    return tuple(torch.get_rng_state() for name in names if name == "torch")


def kept(names: Sequence[str]) -> Any:
    """A context in which generators may be set: afterwards they are as they were."""
    return _kept() if "torch" in names else nullcontext()


@contextmanager
def _kept() -> Iterator[None]:
    with _lock:
        before = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(before)


def advance(names: Sequence[str], states: Sequence[torch.Tensor]) -> None:
    """Set the generators that a request brings states for. Raises `BadFrame` for what is none."""
    for name, state in zip(names, states, strict=True):
        if name == "torch":
            try:
                torch.set_rng_state(state.clone())
            except (RuntimeError, TypeError) as error:
                raise BadFrame("not the state of a random number generator") from error
