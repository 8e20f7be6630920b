"""A bound on the memory that kernels take where sizes depend on what nobody could foresee.

Each kernel's result is worked out on the meta device before the kernel runs, once for calls of the same form.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.errors import TooLarge
from shared_hooks.forward.foresight import bytes_of_results
from shared_hooks.forward.operations import arguments_of
from shared_hooks.modules import running

# Threads that a model's code starts: no mode and no session sees what they do, since those are a thread's own.


_start = threading.Thread.start


def watch_threads() -> None:
    """From now on ``thread_starts()`` of a session is called where the model starts a thread in it; what that raises,
    the model's `start` raises. For others' threads it is one look at a context variable. (Python's auditing events
    tell of threads from 3.12 on.)
    """
    if threading.Thread.start is _start:
        threading.Thread.start = _told  # type: ignore[method-assign]


@functools.wraps(_start)
def _told(self: threading.Thread) -> None:
    reported = getattr(running.get(), "thread_starts", None)
    if reported is not None:
        reported()
    _start(self)


# Where a forward that takes too long may be ended: while the model's own code runs, and nowhere else.
#
# Who bounds time (a server) sets a `Limit` around a request. The engine says in which blocks an exception may come
# from outside; what it puts back after them (modes, settings, Python state, generators) is never cut short.


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


REMEMBERED = 4096
"""Results that are remembered before those that are gone are dropped."""


class Allowance(TorchDispatchMode):
    """Raises `TooLarge` before a kernel whose result is beyond ``most`` bytes together with the earlier ones.

    ``alive``: only with those of them whose memory is still in use, else with all. A kernel that was refused is refused
    for good: `failure` says so, also where the model's own code caught the error. Use as a context manager.
    """

    def __init__(self, most: int, what: str, *, alive: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self._what = what
        self._alive = alive
        self.spent = self.peak = 0
        self.failure: TooLarge | None = None
        self._held: dict[int, tuple[int, list[weakref.ref[torch.Tensor]]]] = {}
        """By storage: its bytes, and the tensors that show it."""
        self._noted = 0
        self._prune_at = REMEMBERED

    def counts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the kernel takes memory for its result."""
        return _takes_memory(func)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.counts(func, args, kwargs):
            found = func(*args, **kwargs)
            if self._held:
                self._note(found, is_new=False)
            return found
        size = self._size(func, args, kwargs)
        self.spent += size
        self.peak = max(self.peak, self.spent)
        if self.spent > self._most:
            self._prune(size)
            if self.spent > self._most or self.failure is not None:
                self.failure = self.failure or TooLarge(f"{self._what} more than {self._most >> 20} MiB")
                raise TooLarge(str(self.failure))
        found = func(*args, **kwargs)
        if self._alive:
            self._note(found, is_new=True)
        return found

    def _note(self, found: Any, *, is_new: bool) -> None:
        """Whose memory a kernel's results are. References have no callback, and are to tensors: a storage's own has a
        destructor in Python, in which an interruption would be lost.
        """
        for tensor in arguments_of((found,), {}):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if is_new:
                    self._held[key] = storage.nbytes(), [weakref.ref(tensor)]
                elif key in self._held:
                    self._held[key][1].append(weakref.ref(tensor))
                self._noted += 1
        if self._noted > self._prune_at:
            self._prune(0)

    def _prune(self, size: int) -> None:
        """Forgets what is gone. ``size``: of the result that is about to be made."""
        if not self._alive:
            return
        held = {
            key: (nbytes, [one for one in shown if one() is not None]) for key, (nbytes, shown) in self._held.items()
        }
        self._held = {key: one for key, one in held.items() if one[1]}
        self.spent = size + sum(nbytes for nbytes, _ in self._held.values())
        self._noted = sum(len(shown) for _, shown in self._held.values())
        self._prune_at = max(REMEMBERED, 2 * self._noted)  # so that a kernel costs the same, however many are alive

    def _size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        by_value = _BY_VALUE.get(func._schema.name)
        if by_value is not None:
            return by_value(*args, **kwargs)
        size = bytes_of_results(func, args, kwargs)
        if size is None:  # unknown: as much as its arguments take
            return sum(tensor.numel() * tensor.itemsize for tensor in arguments_of(args, kwargs))
        return size


@functools.lru_cache(maxsize=1 << 12)
def _takes_memory(func: Any) -> bool:
    """Whether a kernel gives tensors in memory that was not there."""
    if func._schema.name in _BY_VALUE:
        return True
    if func.namespace == "c10d":  # collectives of torch.distributed, in the memory of their arguments
        return False
    return any(one.alias_info is None and "Tensor" in str(one.type) for one in func._schema.returns)


def _resized(tensor: torch.Tensor, size: Any, **_: Any) -> int:
    nbytes = tensor.itemsize
    for one in size:
        nbytes *= int(one)
    return max(0, nbytes - tensor.untyped_storage().nbytes())


def _counted(tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> int:
    return 8 * max(int(minlength), int(tensor.max()) + 1 if tensor.numel() else 0)


def _repeated(repeats: torch.Tensor, output_size: int | None = None, **_: Any) -> int:
    return 8 * int(repeats.sum())


_BY_VALUE: dict[str, Callable[..., int]] = {
    "aten::resize_": _resized,
    "aten::bincount": _counted,
    "aten::repeat_interleave": _repeated,
}
"""Kernels whose results are as large as their arguments' values say."""
