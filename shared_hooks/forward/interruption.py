"""Where a forward that takes too long may be ended: while the model's own code runs, and nowhere else.

Who bounds time (a server) sets a `Limit` around a request. The engine says in which blocks an exception may come from
outside; what it puts back after them (modes, settings, Python state, generators) is never cut short.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

import torch


class Limit(Protocol):
    """The time of one request in one thread."""

    def interruptible(self, seconds: float) -> AbstractContextManager[None]:
        """In this block an exception may come: when the time is over, or after ``seconds``."""

    def uninterrupted(self) -> AbstractContextManager[None]:
        """In this block none may, though it lies in an interruptible one."""


_limit: ContextVar[Limit | None] = ContextVar("isthmus_limit", default=None)


class bounded:  # used as a function
    """``limit`` holds for the block."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._token = _limit.set(self._limit)

    def __exit__(self, *_: object) -> None:
        _limit.reset(self._token)


def interruptible(seconds: float = float("inf")) -> AbstractContextManager[None]:
    """Round what may be ended at any line."""
    limit = _limit.get()
    return nullcontext() if limit is None else _ended_whole(limit, seconds)


@contextmanager
def _ended_whole(limit: Limit, seconds: float) -> Iterator[None]:
    """An exception that comes between the last line of a ``with`` and its end keeps that from its end: torch functions
    would stay switched off in this thread, for all that run in it later.
    """
    state = torch._C._get_torch_function_state()  # type: ignore[attr-defined, unused-ignore]
    try:
        with limit.interruptible(seconds):
            yield
    finally:
        torch._C._set_torch_function_state(state)  # type: ignore[attr-defined, unused-ignore]


def uninterrupted() -> AbstractContextManager[None]:
    """Round what must be done wholly in the middle of that."""
    limit = _limit.get()
    return nullcontext() if limit is None else limit.uninterrupted()
