"""State that objects written in C keep out of sight: asked for, compared by value, put back where that can be done."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import sys
import threading
import types
from typing import Any

import torch

MAX_BYTES = 1 << 22
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Probe:
    """Asks one object. ``inside``: objects that it holds."""

    inside: tuple[Any, ...] = ()
    can_be_undone = True
    only_goes_on = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def now(self) -> Any:
        """What compares equal as long as nothing changed."""
        raise NotImplementedError

    def restore(self, kept: Any) -> None:
        """Put it back, if that can be done."""


class _Lock(Probe):
    can_be_undone = False

    def now(self) -> Any:
        return self.value.locked() if hasattr(self.value, "locked") else "owner=0 " not in repr(self.value)

    def restore(self, kept: Any) -> None:
        """A run that ended half way holds it still."""
        if not kept:
            with contextlib.suppress(RuntimeError):  # another thread's
                self.value.release()


class _Random(Probe):
    def now(self) -> Any:
        return self.value.getstate()

    def restore(self, kept: Any) -> None:
        self.value.setstate(kept)


class _TorchGenerator(Probe):
    def now(self) -> Any:
        return bytes(self.value.get_state().numpy())

    def restore(self, kept: Any) -> None:
        self.value.set_state(torch.frombuffer(bytearray(kept), dtype=torch.uint8))


class _NumpyGenerator(Probe):
    def now(self) -> Any:
        return repr(self._bits.state)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._bits = getattr(value, "bit_generator", None) or value._bit_generator
        self._state = self._bits.state

    def restore(self, kept: Any) -> None:
        self._bits.state = self._state


class _Held:
    """Equal to what holds the same object: tensors do not compare to a yes or no."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Variable(Probe):
    """A context variable. Taking a value away again wants the token of whoever set it, so one that had none gets its
    default; planning takes place in a context of its own, of which nothing stays.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.can_be_undone = bool(self.now())

    def now(self) -> Any:
        try:
            return [_Held(self.value.get())]
        except LookupError:  # it has neither a value nor a default
            return []

    def restore(self, kept: Any) -> None:
        if kept:
            self.value.set(kept[0].value)


class _Bytes(Probe):
    """Bytearrays and NumPy arrays, by their bytes."""

    def now(self) -> Any:
        return bytes(self.value) if isinstance(self.value, bytearray) else self.value.tobytes()

    def restore(self, kept: Any) -> None:
        if isinstance(self.value, bytearray):
            self.value[:] = kept
        else:
            numpy = sys.modules["numpy"]
            with contextlib.suppress(ValueError):  # read-only, and changed by somebody else
                self.value[...] = numpy.frombuffer(kept, dtype=self.value.dtype).reshape(self.value.shape)


class _Cache(Probe):
    """`functools.lru_cache`: what was computed once may stay, but the function is looked into."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.inside = (value.__wrapped__,)

    def now(self) -> Any:
        return None


class _Generator(Probe):
    """Something that runs in steps, and cannot be wound back."""

    only_goes_on = True
    can_be_undone = False

    def now(self) -> Any:
        frame = getattr(self.value, "gi_frame", None)
        return None if frame is None else frame.f_lasti


class _Iterator(Probe):
    only_goes_on = True
    can_be_undone = False

    def now(self) -> Any:
        with contextlib.suppress(Exception):
            return repr(self.value.__reduce__())
        return repr(self.value)


def probe_of(value: Any) -> Probe | None:
    """How to ask this object, or None if there is nothing to ask."""
    kind = type(value)
    if isinstance(value, _LOCKS):
        return _Lock(value)
    if isinstance(value, random.Random):
        return _Random(value)
    if isinstance(value, torch.Generator):
        return _TorchGenerator(value)
    if isinstance(value, contextvars.ContextVar):
        return _Variable(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return _Cache(value)
    if isinstance(value, types.GeneratorType):
        return _Generator(value)
    if isinstance(value, bytearray):
        return _Bytes(value)
    if kind.__module__ == "itertools" or kind.__name__.endswith("_iterator"):
        return _Iterator(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            return _NumpyGenerator(value)
        if kind is numpy.ndarray and value.nbytes <= MAX_BYTES and value.dtype != object:
            return _Bytes(value)
    return None
