"""What the torch function calls of a recorded run did: the level at which operations are numbered."""

from __future__ import annotations

import types
from typing import Any

import torch

from shared_hooks.forward import (
    COPIES_BYTES,
    FORM_OF_OTHERS,
    HEADS,
    CallKind,
    arguments_of,
    is_dense,
    is_escape,
    is_form,
    is_made_from_numbers,
    is_mapped,
    kind_of,
    literals_of,
    name_of,
)
from shared_hooks.recording.kernels import KernelLog
from shared_hooks.recording.ledger import PassedOut
from shared_hooks.recording.trace import (
    NEVER,
    DataEvent,
    Op,
    Repeat,
    Repeats,
    Storage,
    Value,
    only_assigns,
    only_views,
    run_unseen,
)
from shared_hooks.state import DiceWatch
from shared_hooks.tensors import UnknownHolder, View, flatten, tensors_in

_OF_OBJECTS = frozenset({"_version.__get__", "_base.__get__"})
"""Attributes that concern a tensor's history, not its content."""


class OperationLog(KernelLog):
    """A log that also keeps the operations, with their results, and what only data tells about them.

    ``closely``: check memory that code outside torch may have written to. ``into_all``: as for `Repeats`.
    """

    def __init__(self, existing: list[torch.Tensor], *, closely: bool = False, into_all: bool = False) -> None:
        super().__init__(existing)
        self.muted = False
        self.passed_out = PassedOut()
        self.closely = closely
        self.dice_watch = DiceWatch()
        self.ops: list[Op] = []
        self.repeats = Repeats(into_all=into_all)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one call of a torch function; the function mode is off meanwhile."""
        name = name_of(func)
        tensors = arguments_of(args, kwargs)
        if is_mapped(tensors):
            return func(*args, **kwargs)
        arguments = [self.value_of(tensor) for tensor in tensors]
        if name in HEADS and len(args) == 1 and not kwargs and is_dense(args[0]):
            return func(*args)
        if name in _OF_OBJECTS and any(not value.storage.outside for value in arguments):
            # neither after a cut nor before it, where tensors have no history
            self.refuse(f"the model asks for {name.partition('.')[0]}, which does not cross")
        only_form = is_form(name)
        op = Op(self.tick(), name, arguments)
        if not only_form:
            op.literals = literals_of((args, kwargs))
        for value in arguments:
            op.args_tainted |= value.hangs(op.seq)
            op.takes_chosen |= value.chosen
        first_event, own = len(self.events), self.numbered
        before = (self.storage_of(tensors[0]), _placed(tensors[0])) if name == "data.__set__" else None
        self._look()
        self.fresh.clear()
        unseen = self.repeats.may_be_unseen and not (only_form or op.takes_chosen)
        viewing = unseen and only_views(name, func, args, tensors)
        assigning = unseen and only_assigns(name, func, args, op)
        again = unseen and not (viewing or assigning or self.closely or self.passed_out.known)
        repeat = self.repeats.find(func, args, kwargs, tensors, op) if again else None
        self.regular = True
        self.op = op
        try:
            if viewing or assigning or repeat is not None:
                result = run_unseen(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
        except Exception:
            if op.args_tainted:
                self.refuse(f"{name}() raises an error before it, which the model catches", op.seq)
            raise
        finally:
            self.op = None
        if self.passed_out.known:
            self.muted = True
            self.passed_out.settle()
            self.muted = False
        if name in COPIES_BYTES:
            self.events.append(DataEvent(self.tick(), [self.span(tensor) for tensor in tensors], [], []))
            op.reads_tainted |= op.args_tainted
        stays = before == (self.storage_of(tensors[0]), _placed(tensors[0])) if before is not None else False
        if before is not None and not stays:
            self.moved(tensors[0], before[0], op.args_tainted)
        if viewing:
            self._viewed(arguments[0].storage, arguments_of((result,), {}))
        elif assigning:
            self._assigned(op, *args)
        elif repeat is not None:
            self._repeated(op, repeat, arguments_of((result,), {}))
        elif not isinstance(func, types.FunctionType):
            self._read_unseen(op, tensors, first_event)
        op.kind = kind_of(name, bool(tensors), result)
        op.end = self.seq
        if op.kind is CallKind.FORM:
            return result
        if only_form:
            op.literals = literals_of((args, kwargs))
        if op.kind is CallKind.VALUE:
            self._value_read(op, tensors, result, first_event)
        elif op.kind is CallKind.TENSOR:
            from_numbers = is_made_from_numbers(name, args)
            if from_numbers or name in COPIES_BYTES:
                for storage in self.fresh:
                    if storage.outside and not storage.foreign:
                        storage.outside, storage.created = False, op.seq
            if from_numbers and self.dynamic and not tensors and not op.draws:
                self._may_hold_data(op)
            for storage in self.fresh:
                # made and filled within one function: it never held anything else, and raw pointers leave no events
                if not storage.outside and (op.reads_tainted or storage.tainted < NEVER):
                    storage.tainted, storage.born_tainted = min(storage.tainted, op.seq), True
            made = range(own, self.numbered)
            results = self._results(op, tensors, result)
            if again and repeat is None and self.regular and _is_in_events(op):
                self.repeats.learn(func, args, kwargs, tensors, op, self.events[first_event:], results, made)
        elif name.endswith(".__set__") and not stays:  # `Module.to` assigns each parameter to itself
            op.trouble = f"it assigns {name.removesuffix('.__set__')} of a tensor"
        self.ops.append(op)
        self.stack[-1].items.append(op)
        return result

    def _look(self) -> None:
        if self.closely:
            self.dice_watch.look(self.seq)
        if self.passed_out.known:
            muted, self.muted = self.muted, True
            self.passed_out.look()
            self.muted = muted

    def _pass_out(self, op: Op, tensors: list[torch.Tensor]) -> None:
        """Code outside torch gets access to the memory: constants are watched, the rest counts as written."""
        self.muted = True
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if storage.outside and not storage.foreign:
                self.passed_out.add(storage, tensor)
            elif storage.tainted <= op.seq:
                self.events.append(DataEvent(self.tick(), [], [], [storage]))
        self.muted = False

    def _viewed(self, storage: Storage, results: list[torch.Tensor]) -> None:
        """Called after a call that only creates views."""
        known = self.storages
        self.repeats.wrong |= any(known.get(tensor.untyped_storage()._cdata) is not storage for tensor in results)

    def _assigned(self, op: Op, tensor: torch.Tensor, index: Any, value: torch.Tensor) -> None:
        """Called after a call that only copies ``value`` to a view of ``tensor``."""
        target, source = (argument.storage for argument in op.args)
        view = run_unseen(torch.Tensor.__getitem__, (tensor, index), {})
        reads, overwrites = [self.span(value)], [(target, self.view(view, target))] * self.is_exact(view, target)
        self.events.append(DataEvent(self.tick(), reads, overwrites, [target], [target, source]))
        op.writes.append(target)
        if source.tainted <= op.seq:
            op.reads_tainted = True
            target.tainted = min(target.tainted, self.seq)

    def _repeated(self, op: Op, repeat: Repeat, results: list[torch.Tensor]) -> None:
        """Called after a call whose kernels are known: numbering continues as if it had been observed."""
        first = self.numbered
        if not repeat.gives(results) or any(tensor.untyped_storage()._cdata in self.storages for tensor in results):
            self.repeats.wrong = True
            return
        self.seq = op.seq + repeat.ticks
        self.events.append(repeat.event(self.seq, op.args))
        for tensor, made in zip(results, repeat.made, strict=True):
            self.numbered = first + made.number
            self.storage_of(tensor, op.seq + made.created)
        self.numbered = first + repeat.storages
        op.reads_tainted = repeat.reads_tainted
        op.unasked += repeat.unasked

    def _may_hold_data(self, op: Op) -> None:
        """Mark what Python creates from its own numbers after it has read data, as it may be made of data.

        So it is sent, and what follows from it is not computed twice: such as a decoder's token.
        """
        for storage in self.fresh:
            if not storage.outside and storage.created >= op.seq:
                storage.tainted, storage.born_tainted, op.draws = op.seq, True, True
                op.unforeseen = True  # elsewhere the numbers might contain data

    def _read_unseen(self, op: Op, tensors: list[torch.Tensor], first_event: int) -> None:
        """Arguments that no kernel received are read by raw pointer, unless the function is known to need only their
        form.

        For functions written in C++ only: those in Python consist of calls that are observed.
        """
        if len(self.events) == first_event or op.name in FORM_OF_OTHERS:
            return
        seen = {storage for event in self.events[first_event:] for storage in event.passed_out}
        reads = [self.span(tensor) for tensor in tensors if self.storage_of(tensor) not in seen]
        if reads:
            self.events.append(DataEvent(self.tick(), reads, [], []))
            if any(storage.tainted <= op.seq for storage, _ in reads):
                op.reads_tainted = op.unforeseen = True
                self.note_dynamic(op)  # such a value decides on something: where to split, how long a result is

    def _results(self, op: Op, tensors: list[torch.Tensor], result: Any) -> list[torch.Tensor]:
        known = {id(tensor): value for tensor, value in zip(tensors, op.args, strict=True)}
        try:
            op.structure, results = flatten(result, plain=True)
        except UnknownHolder as error:
            op.trouble = str(error)
            results = list(tensors_in(result))
        for tensor in results:
            value = known.get(id(tensor)) or self.value_of(tensor)
            if id(tensor) in known and not value.storage.opaque and value.view != View.of(tensor, value.storage.base):
                value = self._reshaped(op, tensor)
            op.results.append(value)
        self.note_chosen(op)
        return results

    def _reshaped(self, op: Op, tensor: torch.Tensor) -> Value:
        """The same object with another shape is another value from here on."""
        op.reshapes = True
        del self.value_by_id[id(tensor)]
        return self.value_of(tensor)

    def _value_read(self, op: Op, tensors: list[torch.Tensor], result: Any, first_event: int) -> None:
        if not any(event.reads for event in self.events[first_event:]):
            # tolist() and numpy() read without the dispatcher
            self.muted = True
            self.events.append(DataEvent(self.tick(), [self.span(tensor) for tensor in tensors], [], []))
            self.muted = False
        op.reads_tainted = op.takes_chosen or any(
            storage.tainted <= op.seq for event in self.events[first_event:] for storage, _ in event.reads
        )
        try:
            op.structure = flatten(result, plain=True)[0]
        except UnknownHolder:
            op.trouble = f"{op.name}() gives a {type(result).__name__}"
        if is_escape(op.name):
            op.trouble = f"{op.name}() hands the bytes to code outside torch"
            self._pass_out(op, tensors)
        if op.reads_tainted:
            self.escaped |= is_escape(op.name)
            self.note_dynamic(op)


def _is_in_events(op: Op) -> bool:
    """Return whether everything that an operation did is in its events."""
    return not (op.trouble or op.reshapes or op.draws or op.dynamic or op.unforeseen) and bool(op.args)


def _placed(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where in its storage a tensor lies, and its type."""
    return tensor.shape, tensor.dtype, tensor.layout == torch.strided and (tensor.stride(), tensor.storage_offset())
