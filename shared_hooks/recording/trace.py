"""What one forward did: the facts from which a plan is made.

A trace holds, in order of a running number ``seq``: module calls (a tree), operations at the level of torch functions,
and data events at the level below (which elements of which storage were read, overwritten or written). It refers to no
live tensor.
"""

from __future__ import annotations

import types
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shared_hooks.crossing import CALL, PathDigest
from shared_hooks.forward import LAYOUT, NOTHING, CallKind, forms_key, is_dense
from shared_hooks.modules import ROOT, call_name
from shared_hooks.showing import short
from shared_hooks.tensors import Structure, View

NEVER = 1 << 62


@short
@dataclass(eq=False, slots=True)
class Storage:
    """One allocation, numbered in order of appearance.

    ``created`` and ``tainted`` are the seq at which it was created and first held a value that depends on the inputs;
    -1 for inputs. ``outside``: it existed before the forward and is no input (a parameter, say). ``opaque``: its
    elements cannot be addressed (sparse, nested). ``foreign``: it appeared during the forward, created by no operation.
    ``name``: for a storage from outside that the forward writes, the place where the model keeps it.
    """

    index: int
    elements: int
    dtype: torch.dtype
    device: str
    created: int
    tainted: int = NEVER
    outside: bool = False
    opaque: bool = False
    foreign: bool = False
    base: int = 0
    born_tainted: bool = False
    nbytes: int = 0
    name: str = ""

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@short
@dataclass(eq=False, slots=True)
class Value:
    """One tensor object: a view of a storage. ``made``: the seq at which it appeared.

    ``flags``: c = conjugated, n = negated view, g = autograd recorded its creation. ``hidden``: no torch function
    created it. ``chosen``: a view of memory that depends on no input, but which view it is does.
    """

    index: int
    storage: Storage
    view: View
    dtype: torch.dtype
    flags: str = ""
    made: int = -1
    made_in: ModuleCall | None = None
    hidden: bool = False
    chosen: bool = False

    def hangs(self, seq: int) -> bool:
        """Return whether it depends on the inputs at that time."""
        return self.chosen or self.storage.tainted <= seq

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape


Span = tuple[Storage, View]


@short
@dataclass(eq=False, slots=True)
class DataEvent:
    """Data read, overwritten unread, or written by one operation of the dispatcher; ``passed_out``: its arguments."""

    seq: int
    reads: list[Span]
    overwrites: list[Span]
    writes: list[Storage]
    passed_out: list[Storage] = field(default_factory=list)


@short
@dataclass(eq=False, slots=True)
class Op:
    """One call of a torch function from Python, not inside another one.

    ``hidden``: called from elsewhere; ``reshapes``: it changes the shape of its argument in place (``unsqueeze_``);
    ``unforeseen``: the form of its result depends on data (`is_unforeseen`); ``laid``: its strides do not.
    ``takes_chosen``: an argument is a ``chosen`` `Value`.
    """

    seq: int
    name: str
    args: list[Value]
    kind: CallKind = CallKind.FORM
    structure: Structure | None = None
    results: list[Value] = field(default_factory=list)
    args_tainted: bool = False
    reads_tainted: bool = False
    draws: bool = False
    dynamic: bool = False
    writes: list[Storage] = field(default_factory=list)
    hidden: bool = False
    trouble: str = ""
    end: int = -1
    literals: Any = None
    reshapes: bool = False
    unforeseen: bool = False
    laid: bool = True
    takes_chosen: bool = False
    unasked: list[Callable[[], int]] = field(default_factory=list)

    @property
    def is_unforeseen(self) -> bool:
        """``unforeseen``, computed when it is first needed (how much of a kernel's results is foreseen)."""
        if self.unasked:
            least = min(foreseen() for foreseen in self.unasked)
            self.unforeseen |= least == NOTHING
            self.laid = self.laid and least == LAYOUT
            self.unasked.clear()
        return self.unforeseen

    @property
    def counts(self) -> bool:
        """Whether a tail must know of it: what depends on no input the tail runs itself."""
        return self.args_tainted or self.draws


@short
@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a hooked module. ``items``: the operations and calls inside, in order."""

    path: str
    number: int
    module_type: str
    opaque: bool
    parent: ModuleCall | None
    enter: int
    exit: int = NEVER
    items: list[Op | ModuleCall] = field(default_factory=list)
    args: list[Value] = field(default_factory=list)
    structure: Structure | None = None
    results: list[Value] = field(default_factory=list)
    has_child: bool = False
    layer_id: int | None = None
    output_bytes: int = 0
    args_tainted: bool = False
    name: str = field(init=False)
    """The module path, with ``#n`` from the second call on."""

    def __post_init__(self) -> None:
        self.name = call_name(self.path, self.number)


class Places(NamedTuple):
    """Calls after which a cut is possible: layers by id, then blocks. ``numbers``: by name; a block that ends where its
    last layer does has that layer's.
    """

    calls: list[ModuleCall]
    numbers: dict[str, int]


@dataclass(frozen=True)
class Refusal:
    """No cut is allowed at a position from ``first`` to ``last`` (seqs), because of ``reason``."""

    first: int
    last: int
    reason: str


@short
@dataclass(eq=False)
class Trace:
    """The record of one forward.

    ``input_structure``: of (args, kwargs); ``end``: the last seq; ``dynamic``: where Python read data; ``foreign``: the
    last seq at which a tensor appeared that no operation created (the model's own threads, extensions), -1 if none;
    ``draws``: where random numbers were drawn; ``unsteady``: why no two runs agree; ``refusals``: where cuts are
    refused; ``trains``: whether any module was in training mode.

    ``dice``: which generators were used, and when: intervals (first seq, last seq] by name: ``python``, ``numpy``,
    torch's by device (``cpu``, ``cuda:0``), and ``given`` for `torch.Generator` objects that the model passes.

    ``output_bytes``: of the tensors in the output. ``writes_kept``: it always writes in place to tensors that outlive
    the forward, with known effect. ``weights``: the storages of the parameters, in the order of ``model.parameters()``.
    """

    root: ModuleCall
    layers: list[ModuleCall]
    events: list[DataEvent]
    ops: list[Op]
    input_structure: Structure
    inputs: list[Value]
    outputs: list[Value]
    end: int
    dynamic: list[int]
    foreign: int
    draws: list[int]
    unsteady: str = ""
    trains: bool = False
    refusals: tuple[Refusal, ...] = ()
    dice: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    writes_kept: bool = False
    output_bytes: int = 0
    weights: list[Storage] = field(default_factory=list)

    @property
    def has_no_cut(self) -> bool:
        """Whether no cut is possible at any position."""
        return bool(self.unsteady) or any(one.first == 0 and one.last == NEVER for one in self.refusals)

    @cached_property
    def calls(self) -> list[ModuleCall]:
        """Every call, inner ones first."""
        return calls_in(self.root)

    @cached_property
    def ordinals(self) -> dict[Op, int]:
        """The number of every operation."""
        return {op: number for number, op in enumerate(self.ops)}

    @cached_property
    def results_on(self) -> dict[Storage, list[tuple[ModuleCall, int, Value]]]:
        """The results of calls on each storage, with their number in the result; in the order of `calls`."""
        found: dict[Storage, list[tuple[ModuleCall, int, Value]]] = {}
        for call in self.calls:
            for leaf, value in enumerate(call.results):
                found.setdefault(value.storage, []).append((call, leaf, value))
        return found

    @cached_property
    def first_on(self) -> dict[Storage, tuple[Op, int, Value]]:
        """The first operation with a result on each storage, and the number of that result."""
        found: dict[Storage, tuple[Op, int, Value]] = {}
        for op in self.ops:
            for leaf, value in enumerate(op.results):
                found.setdefault(value.storage, (op, leaf, value))
        return found

    @cached_property
    def unseen(self) -> list[Op]:
        """The kernels that belong to no torch function of the model's Python, in order."""
        return [item for _, _, item in self.placed if isinstance(item, Op) and item.hidden]

    @cached_property
    def unseen_on(self) -> dict[Storage, tuple[int, int, Value]]:
        """The first of them with a result on each storage: its number among them, that of the result, the result."""
        found: dict[Storage, tuple[int, int, Value]] = {}
        for number, op in enumerate(self.unseen):
            for leaf, value in enumerate(op.results):
                found.setdefault(value.storage, (number, leaf, value))
        return found

    @cached_property
    def last_writes(self) -> dict[Storage, int]:
        """The seq at which each storage is written in place for the last time."""
        found: dict[Storage, int] = {}
        for event in self.events:
            for storage in event.writes:
                found[storage] = max(found.get(storage, -1), event.seq)
        return found

    @cached_property
    def placed(self) -> list[tuple[ModuleCall, int, Op | ModuleCall]]:
        """Every operation and call in order, with the call that makes it and its number among that call's counted
        operations (for others and for calls: how many of them came before).
        """
        found: list[tuple[ModuleCall, int, Op | ModuleCall]] = []
        waiting: list[tuple[ModuleCall, int, int]] = [(self.root, 0, 0)]
        while waiting:
            call, position, ops = waiting.pop()
            while position < len(call.items):
                item = call.items[position]
                found.append((call, ops, item))
                position += 1
                if isinstance(item, ModuleCall):
                    waiting += [(call, position, ops), (item, 0, 0)]
                    break
                ops += item.counts
        return found

    @cached_property
    def writes_inputs(self) -> bool:
        """Whether the model writes to the memory of its inputs."""
        inputs = {value.storage for value in self.inputs}
        return any(storage in inputs for event in self.events for storage in event.writes)

    def path_items(self, position: int = NEVER) -> Iterator[tuple[Any, ...]]:
        """Yield the items of the path's digest: ``(CALL, path, number)`` and ``(name, ((shape, dtype), ...))``, up to a
        seq.
        """
        for start, item in self._timed_items():
            if start >= position:
                return
            yield item

    def _timed_items(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        for _, _, item in self.placed:
            if isinstance(item, ModuleCall):
                yield item.enter, (CALL, item.path, item.number)
            elif item.counts and not item.hidden:
                results = item.results if item.kind is CallKind.TENSOR else []
                yield item.seq, (item.name, tuple((tuple(value.shape), str(value.dtype)) for value in results))

    @cached_property
    def path_digests(self) -> dict[int, str]:
        """The digest of the path (`path_digest`) at the end of every call, by its exit."""
        digest = PathDigest()
        found: dict[int, str] = {}
        ends = sorted((call.exit for call in self.calls), reverse=True)
        for start, item in self._timed_items():
            while ends and ends[-1] < start:
                found[ends.pop()] = digest.hexadecimal()
            digest.item(item)
        for end in ends:
            found[end] = digest.hexadecimal()
        return found

    @cached_property
    def places(self) -> Places:
        """Where a cut is possible: after each layer, and after each block with something running behind its
        last place.
        """
        seqs = [event.seq for event in self.events]
        for op in (*self.ops, *self.unseen):
            seqs += (op.seq, op.end)
        seqs.sort()
        calls = list(self.layers)
        numbers = {call.name: number for number, call in enumerate(calls)}
        ends = sorted((call.exit, number) for number, call in enumerate(calls))
        blocks = (one for one in self.calls if one.has_child and one.path != ROOT)
        for block in sorted(blocks, key=lambda one: one.exit):
            at = bisect_left(ends, (block.exit, -1))
            last, number = ends[at - 1]
            if bisect_left(seqs, block.exit) == bisect_right(seqs, last):
                numbers[block.name] = number  # nothing runs between: one place, with two names
            else:
                numbers[block.name] = len(calls)
                ends.insert(at, (block.exit, len(calls)))
                calls.append(block)
        return Places(calls, numbers)

    def signature_of(self, value: Value) -> list[Any]:
        """Shape and dtype, for digests and messages."""
        return [list(value.shape), str(value.dtype).removeprefix("torch.")]


def calls_in(call: ModuleCall) -> list[ModuleCall]:
    """Return every call inside, inner ones first. Not recursive, because modules may be nested deeper than Python's
    stack.
    """
    found: list[ModuleCall] = []
    waiting = [call]
    while waiting:
        outer = waiting.pop()
        found.append(outer)
        waiting += [item for item in outer.items if isinstance(item, ModuleCall)]
    return found[:0:-1]


# Calls of torch's functions that a recording need not trace: their effects are known.
#
# Some only make views, which read nothing and write nothing, or copy to one. Others it has traced before: what a
# function written in C++ does below, kernel by kernel, depends on the forms of its arguments, unless one of its
# kernels is irregular (`Facts.regular`). A loop calls the same few functions on the same forms over and over: from
# the second time on such a call runs untraced, and is recorded as the first one was. Only calls that write to nothing
# but memory of their own are treated so. Their results are checked; a recording in which anything differs is not
# used.


WORTH = 3
"""The number of kernels from which remembering a call is less work than observing it."""
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
class MadeValue:
    """One result: its `form`, and of its storage the time of creation and the number, relative to the call's own."""

    form: tuple[Any, ...]
    created: int
    number: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a call does at the level of kernels. ``reads``: the number of an argument, and a view relative to its start.

    ``ticks`` and ``storages``: how many of them an observed call has counted.
    """

    reads: tuple[tuple[int, View], ...]
    made: tuple[MadeValue, ...]
    reads_tainted: bool
    unasked: tuple[Any, ...]
    ticks: int
    storages: int

    def event(self, seq: int, arguments: list[Value]) -> DataEvent:
        """Return what the call reads, as one event."""
        reads: list[Span] = []
        for number, (shape, stride, offset) in self.reads:
            value = arguments[number]
            reads.append((value.storage, View(shape, stride, offset + value.view.offset)))
        return DataEvent(seq, reads, [], [], [value.storage for value in arguments])

    def gives(self, results: list[torch.Tensor]) -> bool:
        """Return whether these results have the same form as before."""
        return len(results) == len(self.made) and all(
            form(tensor) == made.form for tensor, made in zip(results, self.made, strict=True)
        )


def run_unseen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call without observing its kernels."""
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def only_views(name: str, func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
    """Return whether a call can only give views of its one tensor, which the meta device foresees."""
    if name not in _VIEWS or len(tensors) != 1 or not is_dense(tensors[0]) or args[0] is not tensors[0]:
        return False
    return isinstance(func, _IN_C) and (name != "__getitem__" or _by_numbers(args[1]))


def only_assigns(name: str, func: Any, args: tuple[Any, ...], op: Op) -> bool:
    """Return whether a call copies one tensor to a view of another, created in this forward."""
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
    """The observed calls of one recording; ``into_all``: observe every call.

    ``depth``: of the stack of dispatch modes, including this package's.
    """

    def __init__(self, *, into_all: bool) -> None:
        self._known: dict[Any, dict[Any, Repeat]] = {}
        self.into_all = into_all
        self.depth = 0
        self.wrong = False
        """Whether a call gave something else than before."""

    @property
    def may_be_unseen(self) -> bool:
        """Whether calls may run unobserved: not if the model itself observes kernels."""
        return not self.into_all and torch._C._len_torch_dispatch_stack() == self.depth

    def find(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], op: Op
    ) -> Repeat | None:
        """Return what this call will do, if it is known."""
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
        events: list[DataEvent],
        results: list[torch.Tensor],
        own: range,
    ) -> None:
        """Record an observed call: ``events``: all that it did, ``own``: the numbers of the storages that it
        created.
        """
        if len(events) < WORTH or not isinstance(func, _IN_C) or len(results) != len(op.results):
            return
        key = self._key(args, kwargs, tensors, op)
        reads = _reads(events, op.args, own)
        numbers = {value.storage.index for value in op.results if _is_plain(value)}
        if key is None or reads is None or len(numbers) < len(results) or not numbers <= set(own):
            return
        made = tuple(
            MadeValue(form(tensor), value.storage.created - op.seq, value.storage.index - own.start)
            for tensor, value in zip(results, op.results, strict=True)
        )
        self._known.setdefault(func, {})[key] = Repeat(
            reads, made, op.reads_tainted, tuple(op.unasked), op.end - op.seq, len(own)
        )

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], op: Op) -> Any:
        """Everything that may decide what a call does at the level of kernels; None if something else may."""
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
    """Return what is known of a result without its elements."""
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
    """Return whether a value's storage can be addressed, in elements of its own type."""
    return not value.storage.opaque and not value.flags and value.dtype is value.storage.dtype


def _reads(events: list[DataEvent], arguments: list[Value], own: range) -> tuple[tuple[int, View], ...] | None:
    """Return what a call reads of its arguments; None if it uses anything else but memory of its own."""
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
