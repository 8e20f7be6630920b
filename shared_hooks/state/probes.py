"""The state of objects written in C: read, compared by value, and restored if possible."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import functools
import gc
import importlib
import inspect
import io
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from shared_hooks import devices
from shared_hooks.state.reach import MISSING
from shared_hooks.tensors import identical, tensors_in

# The generators of random numbers that a forward draws from implicitly: Python's, NumPy's, torch's.

Interval = tuple[int, int]


def _python_and_numpy() -> dict[str, Any]:
    """Return the states of the generators unknown to torch, comparable."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, key, *rest = numpy.get_state()
        states["numpy"] = (kind, key.tobytes(), *rest)
    return states


class Dice:
    """The states of all generators on construction, to restore after runs that only plan."""

    def __init__(self) -> None:
        self._torch = devices.rng_state()
        self._others = _python_and_numpy()

    @property
    def rolled(self) -> bool:
        """Whether any of them has changed."""
        return not torch.equal(self._torch, devices.rng_state()) or bool(self.others)

    @property
    def others(self) -> list[str]:
        """Those of them that have changed and are not torch's: "python", "numpy"."""
        now = _python_and_numpy()
        if now == self._others:
            return []
        return [name for name, state in self._others.items() if now[name] != state]

    def restore(self) -> None:
        """Restore them."""
        devices.set_rng_state(self._torch)
        random.setstate(self._others["python"])
        if "numpy" in self._others:
            kind, key, *rest = self._others["numpy"]
            numpy = importlib.import_module("numpy")
            numpy.random.set_state((kind, numpy.frombuffer(key, numpy.uint32), *rest))


class DiceWatch:
    """Records between which checks Python's and NumPy's generators were used."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[Interval]] = {}
        self._before = _python_and_numpy()
        self._seq = 0

    def look(self, seq: int) -> None:
        """Compare with the last check."""
        now = _python_and_numpy()
        for name, state in now.items():
            if state != self._before.get(name, state):
                self.drawn.setdefault(name, []).append((self._seq, seq))
        self._before, self._seq = now, seq


# Objects that a model holds.

MAX_BYTES = 1 << 22
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Probe:
    """Reads the state of one object."""

    can_be_undone = True
    only_advances = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def now(self) -> Any:
        """Return a value that compares equal as long as nothing changed."""
        raise NotImplementedError

    def restore(self, kept: Any) -> None:
        """Restore the state, if possible."""


class _Lock(Probe):
    can_be_undone = False

    def now(self) -> Any:
        return self.value.locked() if hasattr(self.value, "locked") else "owner=0 " not in repr(self.value)

    def restore(self, kept: Any) -> None:
        """Release a lock that an interrupted run still holds."""
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
    """Equal to a reference to the same object, because tensors do not compare to a truth value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Variable(Probe):
    """A context variable. Removing a value needs the token of the code that set it, so a variable without a value gets
    its default; planning runs in a context of its own, of which nothing remains.
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
    """Containers of plain bytes: bytearrays, arrays of Python and of C (`ctypes`), memory views."""

    def now(self) -> Any:
        with contextlib.suppress(ValueError):  # a released view
            return memoryview(self.value).tobytes()

    def restore(self, kept: Any) -> None:
        if kept is None:
            return
        if isinstance(self.value, bytearray):
            self.value[:] = kept
        elif isinstance(self.value, array.array):
            self.value[:] = array.array(self.value.typecode, kept)
        else:
            with contextlib.suppress(ValueError, TypeError):  # read-only, and changed by other code
                memoryview(self.value).cast("B")[:] = kept


class _NumpyArray(Probe):
    def now(self) -> Any:
        return self.value.tobytes()

    def restore(self, kept: Any) -> None:
        numpy = sys.modules["numpy"]
        with contextlib.suppress(ValueError):  # read-only, and changed by other code
            self.value[...] = numpy.frombuffer(kept, dtype=self.value.dtype).reshape(self.value.shape)


class _File(Probe):
    """Files, and text and byte streams in memory, which can be read again from their position."""

    def now(self) -> Any:
        with contextlib.suppress(ValueError, OSError):  # closed; or a line of it is being read
            return self._content(), self.value.tell()

    def restore(self, kept: Any) -> None:
        if kept is None or self.value.closed:
            return
        content, position = kept
        if content is not None:
            self.value.seek(0)
            self.value.truncate()
            self.value.write(content)
        self.value.seek(position)

    def _content(self) -> Any:
        return self.value.getvalue() if isinstance(self.value, _IN_MEMORY) else None


class _SimpleQueue(Probe):
    can_be_undone = False

    def now(self) -> Any:
        return self.value.qsize()


class _Generator(Probe):
    """A generator, which cannot be rewound."""

    only_advances = True
    can_be_undone = False

    def now(self) -> Any:
        state = inspect.getgeneratorstate(self.value)
        # between two values it may have advanced at any time: Python does not show what it iterates over
        return state if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED) else object()


class _Iterator(Probe):
    only_advances = True
    can_be_undone = False

    def now(self) -> Any:
        return _position(self.value)


_CALLS = type(iter(int, 1))
"""Its position is its function's."""


def _position(value: Any, depth: int = 6) -> Any:
    """Return where an iterator is, with those that it reads from, comparable.

    If Python does not show that (most of itertools from 3.14 on), it may have advanced at any time: unequal to all.
    """
    if type(value) is tuple:
        return tuple([_position(one, depth) for one in value])
    if not isinstance(value, Iterator):
        return repr(value)
    if depth and type(value) is not _CALLS:
        with contextlib.suppress(Exception):
            return _position(value.__reduce__(), depth - 1)
    shown = repr(value)
    return object() if " object at 0x" in shown or type(value) is _CALLS else shown


_IN_MEMORY = (io.StringIO, io.BytesIO)
_OF_BYTES = (bytearray, array.array, memoryview)


def _is_of_c(value: Any) -> bool:
    ctypes = sys.modules.get("ctypes")
    return ctypes is not None and isinstance(value, (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData))


def _size_of(value: Any) -> int:
    with contextlib.suppress(ValueError):  # a released view
        return memoryview(value).nbytes
    return 0


def _is_read_again(value: Any) -> bool:
    return isinstance(value, io.IOBase) and not value.closed and value.readable() and value.seekable()


def _is_at_its_end(iterator: Any) -> bool:
    """Return whether an iterator over a list or the like is exhausted; reading it would make it drop the list."""
    with contextlib.suppress(Exception):
        _, content, *position = iterator.__reduce__()
        return content in (([],), ((),), ("",)) or bool(position and position[0] >= len(content[0]))
    return False


def probe_of(value: Any) -> Probe | None:
    """Return the probe for an object, or None."""
    kind = type(value)
    if isinstance(value, _LOCKS):
        return _Lock(value)
    if isinstance(value, random.Random):
        return _Random(value)
    if isinstance(value, torch.Generator):
        return _TorchGenerator(value)
    if isinstance(value, contextvars.ContextVar):
        return _Variable(value)
    if isinstance(value, types.GeneratorType):
        return None if value.gi_frame is None else _Generator(value)
    if isinstance(value, _OF_BYTES) or _is_of_c(value):
        return _Bytes(value) if isinstance(value, bytearray) or _size_of(value) <= MAX_BYTES else None
    if _is_read_again(value):
        return _File(value)
    if isinstance(value, queue.SimpleQueue):
        return _SimpleQueue(value)
    if kind.__module__ in ("builtins", "itertools") and isinstance(value, Iterator):
        return None if kind.__module__ == "builtins" and _is_at_its_end(value) else _Iterator(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            return _NumpyGenerator(value)
        if kind is numpy.ndarray and value.nbytes <= MAX_BYTES and value.dtype != object:
            return _NumpyArray(value)
    return None


# The caches of `functools.lru_cache` for functions that a model's code may run: results, or state in disguise. A
# result that the function would return now, too, is no state: a process that lacks it computes it again. One that
# differs is: it was written to since, was drawn, or was computed from state that has changed.

_Cached = functools._lru_cache_wrapper
_Slot = types.MemberDescriptorType
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device)
_DEPTH = 6


def function_of(cached: _Cached[Any]) -> str:
    """Return the name of its function; a partial one has none."""
    return str(getattr(cached, "__qualname__", "a function"))


def results_in(cached: _Cached[Any]) -> list[tuple[Any, Any]]:
    """(key, result) pairs, which only the garbage collector reveals."""
    held = gc.get_referents(cached)
    if cached.cache_parameters()["maxsize"] is None:
        return next((list(one.items()) for one in held if type(one) is dict), [])
    links = [at for at, one in enumerate(held) if isinstance(one, type) and one.__name__ == "_lru_list_elem"]
    return [(held[at - 2], held[at - 1]) for at in links[: cached.cache_info().currsize]]


def _arguments(key: Any, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call that a key was made of, from positional arguments, a mark, keywords with their values,
    and types.
    """
    if type(key) is not tuple:
        return (key,), {}
    mark = next((at for at, one in enumerate(key) if type(one) is object), None)
    if mark is None:
        return key[: len(key) // 2] if typed else key, {}
    end = (2 * len(key) + 1 - mark) // 3 if typed else len(key)  # types: one of each value
    named = key[mark + 1 : end]
    return key[:mark], dict(zip(named[::2], named[1::2], strict=True))


_verified: weakref.WeakKeyDictionary[_Cached[Any], dict[int, tuple[Any, list[int]]]] = weakref.WeakKeyDictionary()
"""By identity: compared results that only a write to a tensor can change, and their tensors' versions."""


def counts(cached: _Cached[Any]) -> tuple[int, int]:
    """(how often it ran, how many results it keeps)."""
    info = cached.cache_info()
    return info.misses, info.currsize


def is_repeatable(cached: _Cached[Any]) -> bool:
    """Return whether the function would return now what it has cached. It is called where a result may have changed."""
    typed, before, known = cached.cache_parameters()["typed"], _verified.get(cached, {}), dict[int, Any]()
    for key, result in results_in(cached):
        versions = [one._version for one in tensors_in(result) if not one.is_inference()]
        if before.get(id(result), (MISSING, MISSING))[1] != versions and not _gives(cached, key, typed, result):
            return False
        if _is_fixed(result):
            known[id(result)] = result, versions
    _verified[cached] = known
    return True


def _gives(cached: _Cached[Any], key: Any, typed: bool, result: Any) -> bool:
    args, kwargs = _arguments(key, typed)
    dice = Dice()
    try:
        return _same_result(result, cached.__wrapped__(*args, **kwargs))
    except Exception:
        return False
    finally:
        dice.restore()


def _is_fixed(value: Any) -> bool:
    """Return whether only a write to its tensors can change it."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_fixed, value))
    return isinstance(value, _PLAIN) or (type(value) is torch.Tensor and not value.is_inference())


def _same_result(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Return whether two results are the same for code that reads them; incomparable ones of one class are."""
    if one is other:
        return True
    if type(one) is not type(other) or not depth:
        return False
    if isinstance(one, torch.Tensor):
        return identical(one, other)
    if isinstance(one, _PLAIN):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(_same_result(a, b, depth - 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same_result(one[key], other[key], depth - 1) for key in one)
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        parts = [(each.__code__, *map(_held, each.__closure__ or ()), each.__defaults__) for each in (one, other)]
        return parts[0][0] is parts[1][0] and _same_result(parts[0][1:], parts[1][1:], depth - 1)
    if isinstance(one, functools.partial):
        return _same_result((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), depth - 1)
    if (probe := probe_of(one)) is not None:
        return bool(probe.now() == probe_of(other).now())  # type: ignore[union-attr]
    return _same_result(_attributes(one), _attributes(other), depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    own = getattr(value, "__dict__", None)
    found = dict(own) if type(own) is dict else {}
    slots = [one for kind in type(value).__mro__ for one in vars(kind).values() if type(one) is _Slot]
    for slot in slots:
        with contextlib.suppress(AttributeError):
            found[slot.__name__] = slot.__get__(value)
    return found


def _held(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):
        return cell.cell_contents
    return MISSING
