"""Record one forward of a model into a `Trace`.

Two modes look at the same run. `TorchFunctionMode` sees the calls the model's Python makes: their order is what the
tail will meet again, so operations are numbered there. `TorchDispatchMode` sees what the kernels below read and write,
element by element, and anything that runs out of the function mode's sight. Both are used for planning only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.attach import running
from shared_hooks.fastpath import fast_path_off
from shared_hooks.hierarchy import ModuleInfo
from shared_hooks.kernels import KernelLog
from shared_hooks.metrics import output_bytes
from shared_hooks.operations import (
    FORM_OF_OTHERS,
    Kind,
    arguments_of,
    is_escape,
    is_mapped,
    kind_of,
    literals_of,
    name_of,
)
from shared_hooks.outliving import Judge
from shared_hooks.purity import pure_modules
from shared_hooks.python_state import PythonState
from shared_hooks.trace import NEVER, Call, Event, Op, Trace, Value
from shared_hooks.trees import UnknownHolder, class_name, flatten, tensors_in
from shared_hooks.views import View

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    model: nn.Module, modules: dict[nn.Module, ModuleInfo], fresh_inputs: Callable[[], Inputs], state: PythonState
) -> tuple[Trace, Any, Judge]:
    """Run the model on fresh inputs; return what it did, its output, and a judge of what it did to ``state``, which is
    the model's Python state now. The model's own exceptions pass through.

    A tensor that no operation made is a constant kept somewhere (a global, a closure), or the work of code that torch
    does not see. Where there are such tensors the model is recorded again: what is there a second time is a constant.
    """
    recorder = Recorder(model, modules, state, [])
    output = recorder.watch(*fresh_inputs())
    if recorder.unknown:
        recorder = Recorder(model, modules, state, recorder.unknown)
        output = recorder.watch(*fresh_inputs())
    return recorder.finish(output), output, recorder.judge


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        if recorder.muted or recorder.op is not None or recorder.in_opaque:
            return func(*args, **(kwargs or {}))
        return recorder.operation(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        if recorder.muted:
            return func(*args, **(kwargs or {}))
        # our own look at tensors, and the call below, come back through the function mode
        recorder.muted = True
        try:
            return recorder.kernel(func, args, kwargs or {})
        finally:
            recorder.muted = False


class Recorder(KernelLog):
    """The session that builds a `Trace`; one run, one thread."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        state: PythonState,
        constants: list[torch.Tensor],
    ) -> None:
        super().__init__([*model.parameters(), *model.buffers(), *state.tensors(), *constants])
        self.model = model
        self.modules = modules
        self.muted = False
        self.counts: dict[str, int] = {}
        self.pure = pure_modules(modules)
        self.judge = Judge(state, self)
        self.looked = False
        self.pure_stack = [True]  # what is around the model is no code of its
        self.half_done: dict[int, str] = {}
        self.unsettled: dict[int, str] = {}
        self.layers: list[Call] = []
        self.ops: list[Op] = []

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model and return its output. Writes to the inputs if the model does."""
        with torch.no_grad():
            self.enter_inputs((args, kwargs))
        token = running.set(self)
        try:
            with torch.no_grad(), fast_path_off(), _Functions(self), _Kernels(self):
                return self.model(*args, **kwargs)
        finally:
            running.reset(token)

    def failed(self, error: BaseException) -> None:
        raise error

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        info = self.modules.get(module)
        if info is None or self.muted or self.op is not None or self.in_opaque:
            return forward(*args, **kwargs)
        self.muted = True
        parent = self.stack[-1]
        number = self.counts[info.path] = self.counts.get(info.path, 0) + 1
        call = Call(info.path, number, info.module_type, info.opaque, parent, self.tick())
        call.args = [self.value_of(tensor) for tensor in tensors_in((args, kwargs))]
        for value in call.args:
            value.last_use = call.enter
        call.args_tainted = any(value.storage.tainted <= self.seq for value in call.args)
        parent.has_child = True
        parent.items.append(call)
        if module._forward_hooks or module._forward_pre_hooks:
            for outer in self.stack:
                outer.keep = outer.keep or "a module inside it has hooks of somebody else's"
        pure = module in self.pure and all(map(_is_plain, (*args, *kwargs.values())))
        self.looked &= pure and self.pure_stack[-1]
        self.pure_stack.append(pure)
        storages = len(self.storages)
        if not pure:
            call.keep = call.keep or "its Python may change state"
        self.stack.append(call)
        self.in_opaque += info.opaque
        self.muted = False
        try:
            output = forward(*args, **kwargs)
        finally:
            self.muted = True
            self.in_opaque -= info.opaque
            call.exit = self.tick()
            self.stack.pop()
            self.pure_stack.pop()
            self.muted = False
        self.muted = True
        try:
            call.structure, tensors = flatten(output, plain=True)
        except UnknownHolder:
            tensors = list(tensors_in(output))
        self.stack.append(call)
        if info.opaque:
            self._opaque_effects(call, list(tensors_in((args, kwargs))), tensors, storages)
        call.results = [self.value_of(tensor, hidden=info.opaque) for tensor in tensors]
        self.stack.pop()
        call.output_bytes = output_bytes(tensors)
        if not call.has_child:
            call.layer_id = len(self.layers)
            self.layers.append(call)
            self._look(call.layer_id)
        # whoever called it goes on now
        self.looked &= self.pure_stack[-1]
        self.muted = False
        return output

    def _look(self, layer: int) -> None:
        """Is the state as it was at the beginning? Only where code that may write state has run since the last look."""
        if self.looked:
            before = layer - 1
            for found in (self.half_done, self.unsettled):
                if before in found:
                    found[layer] = found[before]
            return
        self.looked = True
        changes = self.judge.changes()
        if changes:
            self.half_done[layer] = told(change.name for change in changes)
        stuck = [change.name for change in changes if not change.can_be_undone]
        if stuck:
            self.unsettled[layer] = told(stuck)

    def _opaque_effects(self, call: Call, args: list[torch.Tensor], results: list[torch.Tensor], known: int) -> None:
        """A scripted or compiled module may run fused kernels that nobody sees: take its arguments as read."""
        self.events.append(Event(call.exit, [self.span(tensor) for tensor in args], [], []))
        for storage in [self.storage_of(tensor, created=call.exit) for tensor in results]:
            if storage.index >= known and call.args_tainted:
                storage.tainted = min(storage.tainted, call.exit)
                storage.born_tainted, storage.outside = True, False

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a torch function; the function mode is off while it runs."""
        name = name_of(func)
        tensors = arguments_of(args, kwargs)
        if is_mapped(tensors):
            return func(*args, **kwargs)
        arguments = [self.value_of(tensor) for tensor in tensors]
        op = Op(self.tick(), name, arguments, literals=literals_of((args, kwargs)))
        op.args_tainted = any(value.storage.tainted <= op.seq for value in arguments)
        first_event = len(self.events)
        self.fresh.clear()
        self.op = op
        try:
            result = func(*args, **kwargs)
        finally:
            self.op = None
        for value in arguments:
            value.last_use = op.seq
        if not isinstance(func, types.FunctionType):
            self._read_unseen(op, tensors, first_event)
        op.kind = kind_of(name, bool(tensors), result)
        op.end = self.seq
        if op.kind is Kind.FORM:
            return result
        if op.kind is Kind.VALUE:
            self._value_read(op, tensors, result, first_event)
        elif op.kind is Kind.TENSOR:
            for storage in self.fresh:
                # made and filled within one function: it never held anything else, and raw pointers leave no events
                if not storage.outside and (op.reads_tainted or storage.tainted < NEVER):
                    storage.tainted, storage.born_tainted = min(storage.tainted, op.seq), True
            self._results(op, tensors, result)
        elif name.endswith(".__set__"):
            op.trouble = f"it assigns {name.removesuffix('.__set__')} of a tensor"
        self.ops.append(op)
        self.stack[-1].items.append(op)
        return result

    def _read_unseen(self, op: Op, tensors: list[torch.Tensor], first_event: int) -> None:
        """Arguments that no kernel was handed are read by raw pointer, unless the function is known to want their form.

        For functions written in C++ only: those in Python consist of calls that are seen.
        """
        if len(self.events) == first_event or op.name in FORM_OF_OTHERS:
            return
        seen = {storage for event in self.events[first_event:] for storage in event.handed}
        reads = [self.span(tensor) for tensor in tensors if self.storage_of(tensor) not in seen]
        if reads:
            self.events.append(Event(self.tick(), reads, [], []))
            op.reads_tainted |= any(storage.tainted <= op.seq for storage, _ in reads)

    def _results(self, op: Op, tensors: list[torch.Tensor], result: Any) -> None:
        known = {id(tensor): value for tensor, value in zip(tensors, op.args, strict=True)}
        try:
            op.structure, results = flatten(result, plain=True)
        except UnknownHolder as error:
            op.trouble = str(error)
            results = list(tensors_in(result))
        for tensor in results:
            value = known.get(id(tensor)) or self.value_of(tensor)
            if id(tensor) in known and not value.storage.opaque and value.view != View.of(tensor, value.storage.base):
                value = self._reshaped(op, tensor, value)
            op.results.append(value)

    def _reshaped(self, op: Op, tensor: torch.Tensor, before: Value) -> Value:
        """The same object with another shape is another value from here on."""
        op.reshapes = True
        del self.value_by_id[id(tensor)]
        for call in self.stack:
            if before.made < call.enter:
                call.keep = call.keep or "it changes the shape of a tensor made outside it in place"
        return self.value_of(tensor)

    def _value_read(self, op: Op, tensors: list[torch.Tensor], result: Any, first_event: int) -> None:
        if not any(event.reads for event in self.events[first_event:]):
            # tolist() and numpy() read behind the dispatcher's back
            self.muted = True
            self.events.append(Event(self.tick(), [self.span(tensor) for tensor in tensors], [], []))
            self.muted = False
        op.reads_tainted = any(
            storage.tainted <= op.seq for event in self.events[first_event:] for storage, _ in event.reads
        )
        try:
            op.structure = flatten(result, plain=True)[0]
        except UnknownHolder:
            op.trouble = f"{op.name}() hands the bytes to code outside torch"
        if op.reads_tainted:
            if is_escape(op.name):
                self.escaped = True
            op.dynamic = True
            self.dynamic.append(op.seq)
            for call in self.stack:
                call.reads_values = True

    def finish(self, output: Any) -> Trace:
        """Close the trace: the output is read at the end."""
        end = self.tick()
        tensors = list(tensors_in(output))
        outputs = [self.value_of(tensor) for tensor in tensors]
        for value in outputs:
            value.last_use = end
        reads = [self.span(tensor) for tensor in tensors]
        self.events.append(Event(end, reads, [], []))
        _mark_escapes(self.root, self.values)
        return Trace(
            self.root,
            self.layers,
            self.events,
            self.ops,
            self.input_structure,
            self.inputs,
            outputs,
            class_name(type(output)),
            end,
            self.dynamic,
            self.foreign,
            self.draws,
            half_done=self.half_done,
            unsettled=self.unsettled,
        )


def told(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    known = list(dict.fromkeys(names))
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def _is_plain(value: Any) -> bool:
    """An argument that a module can do nothing to but by an operation."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor, nn.Parameter)


def _mark_escapes(root: Call, values: list[Value]) -> None:
    """Find the calls that cannot be skipped because something made inside is used outside and is not their result."""
    for value in values:
        call = value.made_in
        while call is not None and call is not root:
            if call.enter < value.made and value.last_use > call.exit and value not in call.results:
                call.keep = call.keep or "a value made inside it is used elsewhere without being its result"
            if call.enter < value.made and value.last_use > call.exit and not value.storage.born_tainted:
                call.keep = call.keep or "it gives a value that does not depend on the inputs"
            call = call.parent
