"""Values that Python reads from data before the cut: recorded by the head, and returned to the tail's replay.

Only the code between modules is watched: what a module of the prefix reads stays inside it. An entry is ``[where, name,
value]``, or ``[where, name, shape, dtype]`` for a tensor whose shape depends on data (the result of a mask).
"""

from __future__ import annotations

import sys
from collections.abc import Container
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shared_hooks.errors import MALFORMED, BadFrame
from shared_hooks.forward import arguments_of, is_form, name_of
from shared_hooks.generation.inputs import check_sizes
from shared_hooks.generation.remote_tensor import Derived, RemoteRead, RemoteTensor, ResultPart
from shared_hooks.tensors import dtype_name, dtype_named

Entry = list[Any]

_SHAPED_BY_DATA = frozenset(
    "__getitem__ nonzero masked_select unique unique_consecutive where argwhere repeat_interleave bincount".split()
)
_NEW = frozenset(f"{how}{what}" for what in ("empty", "zeros", "ones", "full") for how in ("", "new_")) | frozenset(
    f"{what}_like" for what in ("empty", "zeros", "ones", "full")
)
"""Functions and methods whose results share no memory."""
Line = tuple[CodeType, int]
_PLAIN = (bool, int, float, complex)


class TailDiverged(Exception):
    """The tail does not do the same as the head before the cut."""


class Watch(TorchFunctionMode):
    """Records what Python reads in the code around the cut while the head runs.

    ``frames``: the calls in progress, the last of which is the one whose code runs; None inside what is not watched.
    """

    def __init__(self, frames: list[str | None]) -> None:
        super().__init__()
        self._frames = frames
        self.entries: list[Entry] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = type(result)
        if kind is torch.Tensor:
            if _picks(func, args, kwargs or {}):
                self.entries.append([self._frames[-1], func.__name__, list(result.shape), dtype_name(result.dtype)])
        elif kind in _PLAIN or (kind is list and not arguments_of((result,), {})):
            name = name_of(func)
            if not is_form(name) and arguments_of(args, kwargs or {}):
                self.entries.append([self._frames[-1], name, result])
        return result


class BankReplay(TorchFunctionMode):
    """Answers reads of remote tensors from the bank while the tail replays the prefix; other reads must agree with it.

    No local tensor gets the memory of a remote one: there is none, and the process would crash.
    """

    def __init__(
        self, frames: list[str | None], entries: list[Entry], here: torch.device, written: Container[Line] = ()
    ) -> None:
        """``written``: lines of the code around the cut that create tensors into which remote ones are written: these
        are remote from the beginning.
        """
        super().__init__()
        self._frames = frames
        self._entries = entries
        self._here = here
        self._written = written
        self.made: dict[int, Line] = {}
        """By storage, where a new tensor was created in the code around the cut."""
        self._taken = 0
        self._on = self._answers = False
        self.answered = False
        """Whether the bank was needed."""

    def on(self, answers: bool) -> None:
        """Start. ``answers``: whether the head has recorded anything."""
        self._on, self._answers = True, answers
        self.__enter__()  # type: ignore[no-untyped-call]

    def off(self) -> None:
        """Stop. Idempotent."""
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Called at the cut. Raises `TailDiverged` if the head read more."""
        if self._taken != len(self._entries):
            raise TailDiverged("the head read more values than this side comes to")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NEW and self._frames[-1] is not None and (not kwargs or kwargs.get("out") is None):
            return self._new(sys._getframe(1), func, args, kwargs or {})
        if name == "__set__" and type(args[0]) is not RemoteTensor and type(args[1]) is RemoteTensor:
            raise RemoteRead(
                "a tensor that is here is given the memory of one that is on the other side"
            )  # or it crashes
        if not self._answers or self._frames[-1] is None:
            return func(*args, **(kwargs or {}))
        try:
            result = func(*args, **(kwargs or {}))
        except (RemoteRead, RuntimeError, TypeError) as error:
            if not isinstance(error, RemoteRead) and not any(
                type(one) is RemoteTensor for one in arguments_of(args, kwargs or {})
            ):
                raise
            entry = self._next(func.__name__ if _picks(func, args, kwargs or {}) else name_of(func))
            self.answered = True
            if len(entry) == 3:
                return entry[2]
            shape = tuple(entry[2])
            stride = tuple(torch.empty(shape, device="meta").stride())
            check_sizes(shape, stride)
            return RemoteTensor(shape, stride, dtype_named(entry[3]), self._here)
        kind = type(result)
        if kind is torch.Tensor:
            if _picks(func, args, kwargs or {}):
                self._next(func.__name__)
        elif kind in _PLAIN or (kind is list and not arguments_of((result,), {})):
            name = name_of(func)
            if not is_form(name) and arguments_of(args, kwargs or {}) and self._next(name)[2] != result:
                raise TailDiverged(f"{name}() gives {result!s:.40} here, and another value on the edge")
        return result

    def _new(self, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found, line = func(*args, **kwargs), (frame.f_code, frame.f_lineno)
        if type(found) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(found):
            return found
        if line in self._written:
            origin = ResultPart(Derived(partial(func, *args, **kwargs), (), {}), None)
            return RemoteTensor(found.shape, found.stride(), found.dtype, found.device, origin)
        self.made[found.untyped_storage()._cdata] = line
        return found

    def _next(self, name: str) -> Entry:
        if self._taken >= len(self._entries):
            raise RemoteRead(f"{name}() reads what the head does not read there")
        entry = self._entries[self._taken]
        try:
            where, what, _ = entry[0], entry[1], entry[2]
        except MALFORMED as error:
            raise BadFrame("malformed bank of values") from error
        if (where, what) != (self._frames[-1], name):
            raise TailDiverged(f"{name}() in {self._frames[-1]!r} where the head has {what!s:.40}() in {where!s:.80}")
        self._taken += 1
        return entry


def _picks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the shape of a function's result depends on data."""
    name = getattr(func, "__name__", "")
    if name not in _SHAPED_BY_DATA:
        return False
    if name == "repeat_interleave":  # a number of repeats is not data
        return not isinstance(args[1] if len(args) > 1 else kwargs.get("repeats"), int)
    if name != "__getitem__":
        return name != "where" or len(args) == 1
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in index)
