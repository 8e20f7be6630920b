"""A remote tensor: a tensor without data that *propagates*. Shape, strides, dtype and device are right, and an
operation on remote tensors gives remote tensors, whose form is computed on the meta device.

It knows where its value is (its *origin*). After the cut, an operation that needs the value has it computed from what
was sent; if something is missing, `RemoteRead` names it. Nothing is ever computed silently from a remote tensor.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from shared_hooks.errors import PlaceholderRead
from shared_hooks.forward import (
    FORM_ONLY,
    Allowance,
    Dataless,
    Form,
    Same,
    Unforeseen,
    arguments_of,
    dataless_in,
    foreseen,
    swapped,
    uninitialised,
)
from shared_hooks.modules import running
from shared_hooks.tensors import DTYPES, dtype_named


class RemoteRead(PlaceholderRead):
    """A value on the other side is needed. ``need``: which, if it can be sent."""

    def __init__(self, message: str, need: Origin | None = None) -> None:
        super().__init__(message)
        self.need = need


@dataclass(frozen=True)
class Origin:
    """Where a value is: a private input ("input"), the other side's part of a state ("state"), or a tensor in the
    result of a call before the cut ("call": ``count``-th call of the module at ``path``, ``number``-th tensor).
    """

    kind: str
    path: str = ""
    count: int = 0
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "call":
            return f"what {self.path or 'the model'} gives"
        return f'the private input "{self.path}"' if self.kind == "input" else "a tensor of the state"


@dataclass
class Derived:
    """An operation between modules, computed once its value is needed."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any = None
    read: list[tuple[RemoteMemory, int]] = field(default_factory=list)
    """What it reads on the other side, and the number of writes to that before."""
    here: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """What it reads on this side, and the versions."""


@dataclass
class ResultPart:
    """One of the results of such an operation; ``number`` is None if it has only one."""

    of: Derived
    number: int | None


class RemoteMemory:
    """What a remote tensor and its views share. ``writes``: the number of writes to any of them."""

    writes = 0


class RemoteTensor(Dataless):
    """See the module. Immutable: a write to one makes its value unknown."""

    origin: Origin | ResultPart | None
    memory: RemoteMemory
    writes = 0
    """The number of writes to its memory when it was created."""

    @staticmethod
    def __new__(
        cls,
        shape: Any,
        stride: Any,
        dtype: torch.dtype,
        device: torch.device,
        origin: Origin | ResultPart | None = None,
    ) -> RemoteTensor:
        made: RemoteTensor = Dataless.__new__(cls, shape, stride, dtype, device)
        made.origin = origin
        made.memory = RemoteMemory()
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {_place(self)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        return self

    def read_by(self, method: Any) -> Any:
        if getattr(running.get(), "resumed", False):
            return method(value_of(self, f"{method.__name__}()"))
        return super().read_by(method)

    def refuse(self, what: str) -> NoReturn:
        raise RemoteRead(f"{what} reads {_place(self)}, which is on the other side", _need(self))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in FORM_ONLY:
            return func(*swapped(args, uninitialised), **swapped(kwargs, uninitialised))
        written = list(_written(func, args, kwargs))
        supply: Any = running.get()
        if getattr(supply, "resumed", False):
            if any(isinstance(value, RemoteTensor) for value in written):
                raise RemoteRead(f"{name} writes, after the cut, to a value from before it")
            what = name.removeprefix("aten::") + "()"
            found = func(
                *swapped(args, lambda one: value_of(one, what)), **swapped(kwargs, lambda one: value_of(one, what))
            )
            if any(result.alias_info is not None for result in func._schema.returns):
                views = found if isinstance(found, (list, tuple)) else (found,)
                supply.views += [(view, view._version) for view in views]
            return found
        return _propagated(func, args, kwargs, written)


def _propagated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
    name, first = func._schema.name, next(dataless_in((args, kwargs)))
    here = [value for value in written if not isinstance(value, RemoteTensor)]
    if here:
        learn: Callable[[torch.Tensor], None] = getattr(running.get(), "learn_written", _nothing)
        learn(here[0])
        raise RemoteRead(f"{name} writes {_place(first)}, which is on the other side, into a tensor that is here")
    drawn = random.getstate() if func.namespace == "c10d" else None
    found = foreseen(func, args, kwargs)
    if drawn is not None:  # torch draws random numbers for collectives without data
        random.setstate(drawn)
    if isinstance(found, Unforeseen):
        raise RemoteRead(f"{name} reads {_place(first)}, which is on the other side: {found.why}", _need(first))
    for value in written:
        value.origin = None  # type: ignore[attr-defined]
        value.memory.writes += 1  # type: ignore[attr-defined]
    device = kwargs.get("device") or first.device
    derived = None
    if not written:
        read = [(one.memory, one.memory.writes) for one in dataless_in((args, kwargs))]
        real = [(one, _version(one)) for one in arguments_of(args, kwargs) if type(one) is not RemoteTensor]
        derived = Derived(func, args, kwargs, read=read, here=real)
    made = _wrapped(found, torch.device(device), arguments_of(args, kwargs), derived)
    if not written and any(result.alias_info is not None for result in func._schema.returns):
        for view in dataless_in((made,)):
            view.memory, view.writes = first.memory, first.memory.writes
    return made


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _nothing(_: torch.Tensor) -> None:
    """Does nothing: the default without a running tail."""


def value_of(remote: RemoteTensor, what: str = "the result") -> torch.Tensor:
    """Return the value of a remote tensor, sent or computed. Raises `RemoteRead`, which names what is missing."""
    origin = remote.origin
    if isinstance(origin, ResultPart):
        of = origin.of
        if remote.memory.writes != remote.writes:
            raise RemoteRead(f"{what} reads a value from before the cut that was written to since it was made")
        if of.made is None:
            if any(memory.writes != writes for memory, writes in of.read) or any(
                _version(one) != version for one, version in of.here
            ):
                raise RemoteRead(f"{what} reads a value from before the cut that was made of another, written to since")
            of.made = of.func(
                *swapped(of.args, lambda one: value_of(one, what)),
                **swapped(of.kwargs, lambda one: value_of(one, what)),
            )
        made = of.made if origin.number is None else of.made[origin.number]
        assert isinstance(made, torch.Tensor)
        return made
    sent: dict[Any, torch.Tensor] = getattr(running.get(), "sent", {})
    value = sent.get(origin) if origin is not None else None
    if value is None:
        remote.refuse(what)
    return value


def kept_here(remote: RemoteTensor) -> torch.Tensor:
    """Return a copy of a remote value that code behind the cut keeps in a state: in the next step its origin names
    another value.

    Raises `RemoteRead`.
    """
    return value_of(remote, "a state that code behind the cut writes to").clone()


def _place(remote: RemoteTensor) -> str:
    """Return the origin of a remote tensor's value, for messages."""
    while isinstance(remote.origin, ResultPart):
        of = remote.origin.of
        remote = next(dataless_in((of.args, of.kwargs)))
    return str(remote.origin or "a value that was changed in place before the cut")


def _need(remote: RemoteTensor) -> Origin | None:
    return remote.origin if isinstance(remote.origin, Origin) and remote.origin.kind == "call" else None


_STATE = Origin("state")
_make: Any = torch.Tensor._make_wrapper_subclass
_never_pointed_to: Any = torch._C._set_throw_on_mutable_data_ptr


def shadow(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: torch.device) -> RemoteTensor:
    """Return a tensor of a state on the other side. Each place has its own, so that one found elsewhere was moved."""
    named = DTYPES.get(dtype) or dtype_named(dtype)
    made: RemoteTensor = _make(RemoteTensor, shape, strides=stride, dtype=named, device=device)
    _never_pointed_to(made)
    made.origin, made.memory = _STATE, RemoteMemory()
    return made


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    if not func._schema.is_mutable:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                yield value


def _wrapped(
    value: Any, device: torch.device, given: list[torch.Tensor], derived: Derived | None, number: int | None = None
) -> Any:
    if isinstance(value, Same):
        return given[value.number]
    if isinstance(value, Form):
        origin = None if derived is None else ResultPart(derived, number)
        return RemoteTensor(value.shape, value.stride, value.dtype, device, origin)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(item, device, given, derived, n) for n, item in enumerate(value))
    return value


# How much memory one step may take. Sizes come from the edge, and a mask of hostile lengths, squared, would fill all
# memory.
#
# Every kernel's result is foreseen on the meta device before it runs. That costs time, so it is done once for similar
# steps: of the same structure, every single size and number of the same order of magnitude (`magnitude`). Where sizes
# are less than twice as large, their results are less than `GROWTH` times as large; a step that would not fit then is
# checked each time.


STEP_BYTES = 4 << 30
GROWTH = 16
"""The growth of a product of four sizes if each is doubled: rows, heads, and two lengths."""
MAX_SEEN = 4096


class StepAllowance(Allowance):
    """A memory limit for a step in which placeholders count as empty, except for what is created in their form."""

    def __init__(self, most: int) -> None:
        super().__init__(most, "with inputs and a state of these sizes a step takes", alive=True)

    def counts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        is_remote = any(type(tensor) is RemoteTensor for tensor in arguments_of(args, kwargs))
        return (not is_remote or func._schema.name in FORM_ONLY) and super().counts(func, args, kwargs)


class SeenSteps:
    """The steps of one tail that were measured, and took little enough for all similar ones. Thread-safe."""

    def __init__(self) -> None:
        # digests: what they are made of may be as long as a header
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, key: Any) -> bool:
        digest = _digest(key)
        with self._lock:
            found = digest in self._known
            if found:
                self._known.move_to_end(digest)
            return found

    def add(self, key: Any) -> None:
        digest = _digest(key)
        with self._lock:
            self._known[digest] = None
            while len(self._known) > MAX_SEEN:
                self._known.popitem(last=False)


class Extents:
    """The memory limit of one step, which is measured unless a similar one was. ``most``: in bytes."""

    def __init__(self, most: int, seen: SeenSteps) -> None:
        self._most = most
        self._seen = seen
        self._keys: list[Any] = []
        self._allowance: StepAllowance | None = None

    def begin(self) -> None:
        """Called when a forward begins."""
        self._keys, self._allowance = [], None

    def around(self, *reported: Any) -> AbstractContextManager[Any]:
        """Return a context for the rest of the forward, of which the edge has reported this: it is measured if that is
        new.
        """
        key = (*(self._keys[-1] if self._keys else ()), *reported)
        self._keys.append(key)
        if self._allowance is not None or self._seen.has(key):
            return nullcontext()
        self._allowance = StepAllowance(self._most)
        return self._allowance

    def passed(self) -> None:
        """Record that the step was made."""
        if self._allowance is not None and self._allowance.peak * GROWTH <= self._most:
            for key in self._keys:
                self._seen.add(key)


def _digest(key: Any) -> bytes:
    """Return a digest of tuples of numbers, text and sets of such. Equal keys may have several if a set is ordered
    differently.
    """
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def magnitude(value: Any) -> tuple[Any, ...]:
    """Return a key that is equal for values of one structure whose numbers have the same sign and are less than twice
    as large: the leaves in one row, and where each list or dictionary begins.
    """
    found: list[Any] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind is int:
            found.append(one.bit_length() if one >= 0 else -one.bit_length())
        elif kind is list or kind is tuple or kind is torch.Size:
            found.append(("list", len(one)))
            waiting += one
        elif kind is bool:
            found.append(str(one))
        elif kind is float:
            exponent = math.frexp(one)[1] if math.isfinite(one) else str(one)
            found.append(("f", math.copysign(1.0, one), exponent))
        elif isinstance(one, dict):
            found.append(("dict", *one))
            waiting += one.values()
        else:
            found.append(one)
    return tuple(found)


def weight(value: Any) -> int:
    """Return the approximate bytes of memory of a value from JSON."""
    found, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found += 50 + len(one)
        elif isinstance(one, (list, tuple)):
            found += 56 + 8 * len(one)
            waiting += one
        elif isinstance(one, dict):
            found += 64 + 100 * len(one)
            waiting += [*one, *one.values()]
        else:
            found += 32
    return found
