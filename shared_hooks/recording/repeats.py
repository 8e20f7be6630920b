"""Calls of torch's functions that a recording need not look into: it knows what they do below.

Some only make views, which read nothing and write nothing, or copy to one. Others it has looked into before: what a
function written in C++ does below, kernel by kernel, hangs on the forms of its arguments, unless one of its kernels
says otherwise (`Facts.regular`). A loop calls the same few functions on the same forms over and over: from the second
time on such a call runs as it is, and is noted by what it did the first time. Only calls that write to nothing but
memory of their own are noted so. What comes out is looked at; a recording in which anything differs is not used.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.forward import forms_key, is_dense
from shared_hooks.recording.trace import Event, Op, Span, Value
from shared_hooks.tensors import View

WORTH = 3
"""Kernels from which on noting a call is less work than looking at it."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IN_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


_VIEWS = frozenset(
    """
    __getitem__ view transpose permute unsqueeze squeeze select narrow expand t unbind chunk swapaxes swapdims movedim
    moveaxis T.__get__ mT.__get__
    """.split()
)
_INDICES = frozenset({int, slice, type(None), type(...)})
_SLICED_BY = frozenset({int, type(None)})


@dataclass(frozen=True, slots=True)
class Made:
    """One result: its `form`, and of its storage when it came to be and its number, counted from the call's own."""

    form: tuple[Any, ...]
    created: int
    number: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a call does below. ``reads``: the number of an argument, and a view that counts from where it begins.

    ``ticks`` and ``storages``: how many of them a look at the call has counted.
    """

    reads: tuple[tuple[int, View], ...]
    made: tuple[Made, ...]
    reads_tainted: bool
    unasked: tuple[Any, ...]
    ticks: int
    storages: int

    def event(self, seq: int, arguments: list[Value]) -> Event:
        """What the call reads, as one event."""
        reads: list[Span] = []
        for number, (shape, stride, offset) in self.reads:
            value = arguments[number]
            reads.append((value.storage, View(shape, stride, offset + value.view.offset)))
        return Event(seq, reads, [], [], [value.storage for value in arguments])

    def gives(self, results: list[torch.Tensor]) -> bool:
        """Whether these are results as they were before."""
        return len(results) == len(self.made) and all(
            form(tensor) == made.form for tensor, made in zip(results, self.made, strict=True)
        )


def run_unseen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call, with nobody looking at its kernels."""
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def only_views(name: str, func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
    """Whether a call can give nothing but views of its one tensor, which the meta device foresees."""
    if name not in _VIEWS or len(tensors) != 1 or not is_dense(tensors[0]) or args[0] is not tensors[0]:
        return False
    return isinstance(func, _IN_C) and (name != "__getitem__" or _by_numbers(args[1]))


def only_assigns(name: str, func: Any, args: tuple[Any, ...], op: Op) -> bool:
    """Whether a call copies one tensor to a view of another, which this forward has made."""
    if name != "__setitem__" or len(op.args) != 2 or not isinstance(func, _IN_C) or not _by_numbers(args[1]):
        return False
    target, source = op.args[0].storage, op.args[1].storage
    dense = is_dense(args[0]) and is_dense(args[2]) and not target.opaque and not source.opaque
    return dense and target.created >= 0 and not target.outside and not target.foreign


def _by_numbers(index: Any) -> bool:
    for part in index if type(index) is tuple else (index,):
        kind = type(part)
        if kind not in _INDICES:
            return False
        if kind is slice and not {type(part.start), type(part.stop), type(part.step)} <= _SLICED_BY:
            return False
    return True


class Repeats:
    """The calls of one recording that were looked into; ``into_all``: it looks into every call.

    ``depth``: of the stack of dispatch modes, ours included.
    """

    def __init__(self, *, into_all: bool) -> None:
        self._known: dict[Any, dict[Any, Repeat]] = {}
        self.into_all = into_all
        self.depth = 0
        self.wrong = False
        """Whether a call did not give what it gave before."""

    @property
    def may_be_unseen(self) -> bool:
        """Not where the model looks at kernels itself."""
        return not self.into_all and torch._C._len_torch_dispatch_stack() == self.depth

    def find(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], op: Op
    ) -> Repeat | None:
        """What this call will do, if it is known."""
        known = self._known.get(func)
        if known is None:
            return None
        key = self._key(args, kwargs, tensors, op)
        return None if key is None else known.get(key)

    def learn(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        op: Op,
        events: list[Event],
        results: list[torch.Tensor],
        own: range,
    ) -> None:
        """A call was looked into: ``events`` are all that it did, ``own`` the numbers of the storages that it made."""
        if len(events) < WORTH or not isinstance(func, _IN_C) or len(results) != len(op.results):
            return
        key = self._key(args, kwargs, tensors, op)
        reads = _reads(events, op.args, own)
        numbers = {value.storage.index for value in op.results if _is_plain(value)}
        if key is None or reads is None or len(numbers) < len(results) or not numbers <= set(own):
            return
        made = tuple(
            Made(form(tensor), value.storage.created - op.seq, value.storage.index - own.start)
            for tensor, value in zip(results, op.results, strict=True)
        )
        self._known.setdefault(func, {})[key] = Repeat(
            reads, made, op.reads_tainted, tuple(op.unasked), op.end - op.seq, len(own)
        )

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], op: Op) -> Any:
        """All that may decide on what a call does below; None where something else may."""
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        stands = []
        for tensor, value in zip(tensors, op.args, strict=True):
            if type(tensor) not in _PLAIN or not _is_plain(value):
                return None
            stands.append((value.storage.device, value.storage.tainted <= op.seq))
        if len({value.storage for value in op.args}) < len(stands):
            return None
        return forms_key(args, kwargs), tuple(stands), torch.is_inference_mode_enabled()


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What can be said of a result without looking at its elements."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return ()
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.untyped_storage().nbytes(),
        tensor.is_conj() or tensor.is_neg() or tensor.requires_grad,
    )


def _is_plain(value: Value) -> bool:
    """Whether a value's storage can be addressed, and in elements of its own type."""
    return not value.storage.opaque and not value.flags and value.dtype is value.storage.dtype


def _reads(events: list[Event], arguments: list[Value], own: range) -> tuple[tuple[int, View], ...] | None:
    """What of its arguments a call reads; None if it touches anything else but memory of its own."""
    numbers = {value.storage: number for number, value in enumerate(arguments)}
    found: dict[tuple[int, View], None] = {}
    for event in events:
        if any(storage.index not in own for storage in event.writes):
            return None
        for storage, view in event.reads:
            number = numbers.get(storage)
            if number is not None:
                start = arguments[number].view.offset
                found[number, View(view.shape, view.stride, view.offset - start)] = None
            elif storage.index not in own:
                return None
    return tuple(found)
