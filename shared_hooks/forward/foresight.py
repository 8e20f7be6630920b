"""Whether the form of a kernel's results can be computed on the meta device, for every kernel that a plan sees.

If not (there is no such kernel, it needs data, or it gives another form), the tail's side receives the result's form
(`crossing.Given`) instead. The answer is cached by the kernel, the forms of its tensors and its other arguments, so
that a loop computes it once.

If sizes depend on data, `Allowance` limits the memory that kernels take: the form of each kernel's
result is computed before it runs, once for calls of the same form.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.errors import TooLarge
from shared_hooks.forward.operations import FORM, LAYOUT, NOTHING, arguments_of
from shared_hooks.modules import running

_NUMBERS = frozenset({bool, int, float, str, torch.dtype})

KEPT: Final = 8192
LARGEST: Final = 256
"""The maximum number of parts of a call's key; a list of a million numbers is not cached."""


class KernelForms:
    """The results of torch's own kernels on the meta device, by the form of their arguments, on which alone they
    depend; torch computes them in Python. A bounded LRU cache. Thread-safe.
    """

    def __init__(self, most: int = KEPT) -> None:
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._most = most

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, func: Any, key: Any, work_out: Callable[[], Any]) -> Any:
        """Return the result of ``work_out``, cached by ``func`` and ``key`` (of `call_key`). Errors are not cached, nor
        results of other libraries' kernels.
        """
        if func.namespace != "aten":
            return work_out()
        whole = torch.get_default_dtype(), key
        with self._lock:
            if whole in self._kept:
                self._kept.move_to_end(whole)
                return self._kept[whole]
        found = work_out()
        if _parts(key) <= LARGEST:
            with self._lock:
                self._kept[whole] = found
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
        return found


def _parts(key: Any) -> int:
    if not isinstance(key, tuple):
        return 1 + (len(key) // 32 if isinstance(key, str) else 0)
    return sum(map(_parts, key))


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a tensor. ``shape``: None for a nested one; ``stride``: None for one that is not strided."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    stride: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        if not _plain(tensor):
            return cls(None if tensor.is_nested else tuple(tensor.shape), tensor.dtype, None)
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is one of the arguments: ``number`` in the tensors of `arguments_of`."""

    number: int


@dataclass(frozen=True, slots=True)
class Unforeseen:
    """The meta device has no such kernel, or the result depends on data."""

    why: str


_results: Final = KernelForms()
"""Shared, because a model's cuts and the steps of a generation see the same kernels on the same forms."""


def foreseen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a kernel's result with a `Form` or `Same` in place of every tensor, or `Unforeseen`; computed once for
    calls of the same form.
    """
    tensors = [id(tensor) for tensor in arguments_of(args, kwargs)]
    twice = tuple(map(tensors.index, tensors)) if len(set(tensors)) < len(tensors) else None
    return _results.get(func, (call_key(func, args, kwargs), twice), lambda: _worked_out(func, args, kwargs, tensors))


def bytes_of_results(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the bytes of a kernel's results; None if the meta device cannot tell."""
    forms = _forms_of(foreseen(func, args, kwargs), arguments_of(args, kwargs))
    if forms is None or any(form.shape is None for form in forms):
        return None
    return sum(math.prod(form.shape or ()) * int(form.dtype.itemsize) for form in forms)


def _forms_of(found: Any, tensors: list[torch.Tensor]) -> list[Form] | None:
    """Return the forms of all tensors in results; None if they cannot be foreseen."""
    if isinstance(found, Form):
        return [found]
    if isinstance(found, Same):
        return [Form.of(tensors[found.number])]
    if isinstance(found, Unforeseen):
        return None
    if isinstance(found, (list, tuple)):
        return [form for item in found for form in _forms_of(item, tensors) or ()]
    return []


def _worked_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[int]) -> Any:
    known: dict[int, tuple[Any, Any]] = {}
    try:
        with torch.no_grad():
            there = {"device": torch.device("meta")} if _makes(func) else {}
            result = func(*on_meta(args, known), **{**on_meta(kwargs, known), **there})
    except Exception as error:
        return Unforeseen(f"{error!s:.120}")
    return _formal(result, {id(made): tensors.index(given) for given, (_, made) in known.items()})


@functools.cache
def _makes(func: Any) -> bool:
    """Return whether a kernel has a device argument, and so creates its result there unless that names the
    meta device.
    """
    return any(one.name == "device" for one in func._schema.arguments)


def _formal(value: Any, numbers: dict[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        return Same(numbers[id(value)]) if id(value) in numbers else Form.of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_formal(item, numbers) for item in value)
    return value


class Foresight:
    """Caches questions and answers for one recording.

    The meta device is used lazily: it works in Python, and the first use in a process imports what takes over a second.
    """

    def __init__(self) -> None:
        self._questions: dict[Any, tuple[Any, Any, Any]] = {}
        self._answers: dict[Any, list[Form] | None] = {}

    def question(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> Callable[[], int]:
        """Returns a function that says how much of ``results`` the meta device gives: `NOTHING`, `FORM` or `LAYOUT`. It
        keeps no tensors alive.
        """
        key = call_key(func, args, kwargs)
        if key not in self._questions:
            self._questions[key] = func, _forms_in(args, {}), _forms_in(kwargs, {})
        return partial(self._foresees, key, [Form.of(tensor) for tensor in results])

    def _foresees(self, key: Any, forms: list[Form]) -> int:
        if key not in self._answers:
            self._answers[key] = self._answer(*self._questions[key])
        found = self._answers[key]
        if found is None or len(found) != len(forms):
            return NOTHING
        # this device's kernel leaves out a further result without elements (what batch normalisation keeps for
        # gradients), which is never seen
        both = enumerate(zip(forms, found, strict=True))
        pairs = [(one, other) for place, (one, other) in both if not place or one.shape != (0,)]
        if any((one.shape, one.dtype) != (other.shape, other.dtype) for one, other in pairs):
            return NOTHING
        return LAYOUT if all(one == other for one, other in pairs) else FORM

    @staticmethod
    def _answer(func: Any, args: Any, kwargs: Any) -> list[Form] | None:
        if torch.Tag.inplace_view in func.tags:
            return None
        known: dict[int, tuple[Any, Any]] = {}
        try:
            given = on_meta(args, known), on_meta(kwargs, known)
        except TypeError:
            return None
        return _forms_of(foreseen(func, *given), arguments_of(*given))


@dataclass(eq=False, slots=True)
class _Kept:
    """A tensor among kept arguments; ``form``: its shape, stride and dtype, None if the meta device does not
    have it.
    """

    form: tuple[Any, Any, Any] | None


def _forms_in(value: Any, known: dict[int, _Kept]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = _Kept((value.shape, value.stride(), value.dtype) if _plain(value) else None)
        return known[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_forms_in(item, known) for item in value)
    if isinstance(value, dict):
        return {key: _forms_in(item, known) for key, item in value.items()}
    return value


def call_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a key that is equal for all calls of a kernel whose results have the same forms."""
    return func._op, forms_key(args, kwargs)


def forms_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the forms of a call's tensors, and its other arguments."""
    return _key(args), _key(kwargs.items()) if kwargs else None


def on_meta(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """Return the arguments on the meta device; identity is preserved. Raises `TypeError` for what it does not have."""
    if isinstance(value, (torch.Tensor, _Kept)):
        if id(value) not in known:
            form = (value if isinstance(value, _Kept) else _forms_in(value, {})).form
            if form is None:
                raise TypeError("a sparse or quantised tensor")
            shape, stride, dtype = form
            known[id(value)] = value, torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return known[id(value)][1]
    if isinstance(value, (list, tuple)):
        return type(value)(on_meta(item, known) for item in value)
    if isinstance(value, dict):
        return {key: on_meta(item, known) for key, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a key of arguments; different if the results' forms may differ. A single pass, because every kernel needs
    it.
    """
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            try:
                found.append((value.shape, value.stride(), value.dtype))
            except (RuntimeError, NotImplementedError):  # sparse or nested
                found.append(None)
        elif kind in _NUMBERS:
            found.append((kind, value))
        elif isinstance(value, (list, tuple)):
            found.append(_key(value))
        else:
            found.append(repr(value))
    return tuple(found)


# Threads started by a model's code: no mode and no session sees their operations, since those are per thread.


_start = threading.Thread.start


def watch_threads() -> None:
    """Call ``thread_starts()`` of the session when the model starts a thread, and raise what that raises.

    For other threads this costs one lookup of a context variable. (Python's audit events report threads from 3.12 on.)
    """
    if threading.Thread.start is _start:
        threading.Thread.start = _reporting_start  # type: ignore[method-assign]


@functools.wraps(_start)
def _reporting_start(self: threading.Thread) -> None:
    reported = getattr(running.get(), "thread_starts", None)
    if reported is not None:
        reported()
    _start(self)


# Where a forward that takes too long may be interrupted: while the model's own code runs, and nowhere else.
#
# A server that bounds time sets a `Limit` around a request. The engine marks the blocks in which an exception may be
# raised from outside; what it restores after them (modes, settings, Python state, generators) is never interrupted.


class Limit(Protocol):
    """The time limit of one request in one thread."""

    def interruptible(self, seconds: float) -> AbstractContextManager[None]:
        """In this block an exception may be raised: when the time is over, or after ``seconds``."""

    def uninterrupted(self) -> AbstractContextManager[None]:
        """In this block none is raised, even inside an interruptible one."""


_limit: ContextVar[Limit | None] = ContextVar("isthmus_limit", default=None)


class bounded:  # used as a function
    """Apply ``limit`` in the block."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._token = _limit.set(self._limit)

    def __exit__(self, *_: object) -> None:
        _limit.reset(self._token)


def interruptible(seconds: float = float("inf")) -> AbstractContextManager[None]:
    """Return a context around code that may be interrupted at any line."""
    limit = _limit.get()
    return nullcontext() if limit is None else _ended_whole(limit, seconds)


@contextmanager
def _ended_whole(limit: Limit, seconds: float) -> Iterator[None]:
    """Restore torch's thread state after the block: an exception between the last line of a ``with`` and its exit skips
    the exit, and torch functions would stay disabled in this thread.
    """
    state = _functions_state()
    try:
        with limit.interruptible(seconds):
            yield
    finally:
        _restore_functions(state)


_enabling: list[Any] = []
"""What has enabled torch functions again, which would end with these objects; hardly ever any."""


def _functions_state() -> Any:
    """Return whether torch functions are enabled in this thread, as `_restore_functions` takes it."""
    get = getattr(torch._C, "_get_torch_function_state", None)
    return torch._C._is_torch_function_enabled() if get is None else get()


def _restore_functions(state: Any) -> None:
    put = getattr(torch._C, "_set_torch_function_state", None)
    if put is not None:
        put(state)
    elif state and not torch._C._is_torch_function_enabled():  # torch 2.4 can only enable them in a block
        _enabling.append(torch._C._EnableTorchFunction())  # type: ignore[attr-defined, unused-ignore]
        _enabling[-1].__enter__()


def uninterrupted() -> AbstractContextManager[None]:
    """Return a context around code that must not be interrupted."""
    limit = _limit.get()
    return nullcontext() if limit is None else limit.uninterrupted()


REMEMBERED = 4096
"""The number of remembered results at which freed ones are dropped."""


class Allowance(TorchDispatchMode):
    """Raises `TooLarge` before a kernel whose result, with the earlier ones, exceeds ``most`` bytes. A context manager.

    ``alive``: only earlier results whose memory is still in use count. A refusal is final: `failure` keeps it even if
    the model's own code caught the error.
    """

    def __init__(self, most: int, what: str, *, alive: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self._what = what
        self._alive = alive
        self.spent = self.peak = 0
        self.failure: TooLarge | None = None
        self._held: dict[int, tuple[int, list[weakref.ref[torch.Tensor]]]] = {}
        """By storage: its bytes, and the tensors on it."""
        self._noted = 0
        self._prune_at = REMEMBERED

    def counts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the kernel allocates memory for its result."""
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
        """Record the memory of a kernel's results. References have no callbacks, and are to tensors: a storage has a
        Python destructor, in which an interruption would be lost.
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
        """Forget what was freed. ``size``: of the result about to be created."""
        if not self._alive:
            return
        held = {
            key: (nbytes, [one for one in shown if one() is not None]) for key, (nbytes, shown) in self._held.items()
        }
        self._held = {key: one for key, one in held.items() if one[1]}
        self.spent = size + sum(nbytes for nbytes, _ in self._held.values())
        self._noted = sum(len(shown) for _, shown in self._held.values())
        # so that the cost of a kernel does not depend on the number of live storages
        self._prune_at = max(REMEMBERED, 2 * self._noted)

    def _size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        by_value = _BY_VALUE.get(func._schema.name)
        if by_value is not None:
            return by_value(*args, **kwargs)
        size = bytes_of_results(func, args, kwargs)
        if size is None:  # unknown: counted as the size of its arguments
            return sum(tensor.numel() * tensor.itemsize for tensor in arguments_of(args, kwargs))
        return size


@functools.lru_cache(maxsize=1 << 12)
def _takes_memory(func: Any) -> bool:
    """Return whether a kernel's results are in new memory."""
    if func._schema.name in _BY_VALUE:
        return True
    if func.namespace == "c10d":  # collectives of torch.distributed work in the memory of their arguments
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
"""Kernels whose results' sizes depend on their arguments' values."""
