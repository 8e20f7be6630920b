"""Record one forward of a model into a `Trace`.

Two modes look at the same run. `TorchFunctionMode` sees the calls the model's Python makes: their order is what the
tail will meet again, so operations are numbered there. `TorchDispatchMode` sees what the kernels below read and write,
element by element, and anything that runs out of the function mode's sight. Both are used for planning only.

Tensors and storages are remembered by weak references: planning needs the memory of a plain forward.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.attach import running
from shared_hooks.fastpath import fast_path_off
from shared_hooks.hierarchy import ModuleInfo
from shared_hooks.metrics import output_bytes
from shared_hooks.operations import (
    FORM_OF_OTHERS,
    FORM_ONLY,
    OVERWRITES,
    Kind,
    arguments_of,
    is_escape,
    is_mapped,
    kind_of,
    literals_of,
    name_of,
)
from shared_hooks.trace import NEVER, Call, Event, Op, Storage, Trace, Value
from shared_hooks.trees import UnknownHolder, class_name, flatten, tensors_in
from shared_hooks.views import View

_POINT = View((1,), (1,), 0)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    model: nn.Module, modules: dict[nn.Module, ModuleInfo], fresh_inputs: Callable[[], Inputs]
) -> tuple[Trace, Any]:
    """Run the model on fresh inputs; return what it did, and its output. The model's own exceptions pass through.

    A tensor that no operation made is a constant kept somewhere (a global, a closure), or the work of code that torch
    does not see. Where there are such tensors the model is recorded again: what is there a second time is a constant.
    """
    recorder = Recorder(model, modules, [])
    output = recorder.watch(*fresh_inputs())
    if recorder.unknown:
        recorder = Recorder(model, modules, recorder.unknown)
        output = recorder.watch(*fresh_inputs())
    return recorder.finish(output), output


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


class Recorder:
    """The session that builds a `Trace`; one run, one thread."""

    def __init__(self, model: nn.Module, modules: dict[nn.Module, ModuleInfo], constants: list[torch.Tensor]) -> None:
        self.model = model
        self.modules = modules
        self.seq = 0
        self.muted = False
        self.in_opaque = 0
        self.op: Op | None = None
        self.counts: dict[str, int] = {}
        # what runs around the model's own forward (hooks on the model itself) belongs to a call of its own
        self.root = Call("", 1, "", False, None, 0)
        self.stack: list[Call] = [self.root]
        self.started = False
        self.state = {module: _attributes(module) for module in modules if _is_custom(module)}
        self.layers: list[Call] = []
        self.events: list[Event] = []
        self.ops: list[Op] = []
        self.dynamic: list[int] = []
        self.draws: list[int] = []
        self.escaped = False
        self.foreign = -1
        self.storages: dict[int, Storage] = {}
        self.opaque: dict[int, tuple[Any, Storage]] = {}
        self.alive: list[StorageWeakRef] = []
        self.fresh: list[Storage] = []
        self.values: list[Value] = []
        self.value_by_id: dict[int, tuple[Any, Value]] = {}
        self.unknown: list[torch.Tensor] = []
        for tensor in [*model.parameters(), *model.buffers(), *_plain_tensors(model), *constants]:
            self.storage_of(tensor)

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

    def tick(self) -> int:
        self.seq += 1
        return self.seq

    # -- storages and values ------------------------------------------------------------------------------------

    def storage_of(self, tensor: torch.Tensor, created: int | None = None, *, is_input: bool = False) -> Storage:
        """The storage of a tensor; one never seen existed before the forward unless ``created`` says otherwise."""
        index = len(self.storages) + len(self.opaque)
        try:
            if tensor.is_quantized or tensor.is_nested:
                raise NotImplementedError
            untyped = tensor.untyped_storage()
            key, size = untyped._cdata, untyped.nbytes()
        except (RuntimeError, NotImplementedError, ValueError):
            known = self.opaque.get(id(tensor))
            if known is not None and known[0]() is tensor:
                return known[1]
            mapped = is_mapped([tensor])
            storage = Storage(index, 1, tensor.dtype, str(tensor.device), created or -1, opaque=True)
            storage.outside = created is None and not mapped
            self.opaque[id(tensor)] = (weakref.ref(tensor), storage)
            return self._mark(storage, is_input)
        if key in self.storages:
            return self.storages[key]
        # a weak reference keeps the address from being used again, not the memory
        self.alive.append(StorageWeakRef(untyped))
        elements = size // tensor.dtype.itemsize
        storage = Storage(index, elements, tensor.dtype, tensor.device.type, -1 if created is None else created)
        storage.outside = created is None
        self.storages[key] = storage
        self.fresh.append(storage)
        return self._mark(storage, is_input, tensor)

    def _mark(self, storage: Storage, is_input: bool, tensor: torch.Tensor | None = None) -> Storage:
        if is_input:
            storage.created = storage.tainted = -1
            storage.outside, storage.born_tainted = False, True
        elif storage.outside and self.started and (self.escaped or self.op is None):
            # it did not exist before the forward and no operation made it: code out of torch's sight did, from whatever
            storage.tainted = self.seq
            storage.foreign = True
            if tensor is not None:
                self.unknown.append(tensor)
            if not self.escaped:
                self.foreign = self.seq
        return storage

    def span(self, tensor: torch.Tensor) -> tuple[Storage, View]:
        storage = self.storage_of(tensor)
        return storage, self.view(tensor, storage)

    @staticmethod
    def view(tensor: torch.Tensor, storage: Storage) -> View:
        if storage.opaque:
            return _POINT
        if tensor.dtype.itemsize != storage.itemsize:
            return View((storage.elements,), (1,), 0)
        return View.of(tensor, storage.base)

    def value_of(self, tensor: torch.Tensor, *, hidden: bool = False) -> Value:
        """The value a tensor object is; objects are told apart by identity."""
        known = self.value_by_id.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        storage = self.storage_of(tensor)
        view = View.of(tensor, storage.base) if not storage.opaque else View(_shape(tensor), (), 0)
        flags = ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")
        made_in = self.stack[-1] if self.started else None
        if storage.tainted <= self.seq and tensor.requires_grad and self.started:
            flags += "g"
        value = Value(
            len(self.values), storage, view, tensor.dtype, flags, self.seq if self.started else -1, made_in, hidden
        )
        self.values.append(value)
        self.value_by_id[id(tensor)] = (weakref.ref(tensor), value)
        return value

    # -- the run ------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        raise error

    def enter_inputs(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.input_structure, tensors = flatten(inputs)
        for tensor in tensors:
            storage = self.storage_of(tensor, is_input=True)
            if storage.outside:
                # an input that is also a parameter: treat it as an input, it may be another one next time
                self._mark(storage, is_input=True)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if not storage.opaque:
                view = View.of(tensor)
                starts[storage.index] = min(starts.get(storage.index, view.offset), view.offset)
                ends[storage.index] = max(ends.get(storage.index, view.end), view.end)
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if not storage.opaque and tensor.dtype.itemsize == storage.itemsize:
                # offsets of inputs count from the first element they use: a slice of a data set is not the data set
                storage.base = starts[storage.index]
                storage.elements = ends[storage.index] - starts[storage.index]
        self.inputs = [self.value_of(tensor) for tensor in tensors]
        self.started = True

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
        storages = len(self.storages)
        given = _contents((*args, *kwargs.values()))
        custom = _is_custom(module)
        if custom:
            self._note_state()
        self.stack.append(call)
        self.in_opaque += info.opaque
        self.muted = False
        try:
            output = forward(*args, **kwargs)
        finally:
            self.muted = True
            self.in_opaque -= info.opaque
            if custom:
                self._note_state()
            call.exit = self.tick()
            self.stack.pop()
            self.muted = False
        self.muted = True
        if _contents((*args, *kwargs.values())) != given:
            call.keep = call.keep or "it changes a list or dictionary that it is given"
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
        self.muted = False
        return output

    def _note_state(self) -> None:
        """Modules whose plain attributes changed since the last look: the calls that are running did it."""
        changed = False
        for module, before in self.state.items():
            after = _attributes(module)
            if before != after:
                self.state[module] = after
                changed = True
        if changed:
            for call in self.stack:
                call.keep = call.keep or "it changes Python attributes of a module"

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

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the dispatcher: which storages it reads and writes."""
        seq = self.tick()
        inputs = arguments_of(args, kwargs)
        spans = [self.span(tensor) for tensor in inputs]
        known = {storage.index for storage, _ in spans}
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = _random_state(func, kwargs, inputs) if may_draw else None
        result = func(*args, **kwargs)
        outputs = arguments_of((result,), {})
        written, unread = _written(func, args, kwargs)
        made = [self.storage_of(tensor, created=seq) for tensor in outputs]
        is_view = bool(made) and not written and all(storage.index in known for storage in made)
        reads = []
        if not is_view and func._schema.name not in FORM_ONLY:
            reads = [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) not in unread]
        draws = before is not None and not torch.equal(before, _random_state(func, kwargs, result))
        reads_tainted = any(storage.tainted <= seq for storage, _ in reads)
        writes = [span[0] for tensor, span in zip(inputs, spans, strict=True) if id(tensor) in written]
        if reads_tainted or draws:
            for storage in [*writes, *(storage for storage in made if storage.created == seq)]:
                storage.tainted = min(storage.tainted, seq)
                storage.born_tainted |= storage.created == seq
        overwrites = [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) in unread]
        self.events.append(Event(seq, reads, overwrites, writes, [storage for storage, _ in spans]))
        op = self.op or self._unseen(func, inputs, result)
        if op is not None:
            op.reads_tainted |= reads_tainted
            op.draws |= draws
        if draws:
            self.draws.append(seq)
        if op is not None:
            op.writes += writes
        shape_from_data = (
            torch.Tag.dynamic_output_shape in func.tags or func._schema.name == "aten::_local_scalar_dense"
        )
        if reads_tainted and shape_from_data:
            self.dynamic.append(seq)
            if op is not None:
                op.dynamic = True
            for call in self.stack:
                call.reads_values = True
        self._note_writes(writes)
        return result

    def _unseen(self, func: Any, inputs: list[torch.Tensor], result: Any) -> Op | None:
        """An operation that no torch function call of the model's Python stands for."""
        if self.in_opaque:
            return None
        op = Op(self.seq, str(func), [self.value_of(tensor) for tensor in inputs], hidden=True, end=self.seq)
        op.args_tainted = any(value.storage.tainted <= op.seq for value in op.args)
        for value in op.args:
            value.last_use = op.seq
        known = {id(tensor): value for tensor, value in zip(inputs, op.args, strict=True)}
        try:
            op.structure, outputs = flatten(result, plain=True)
            op.results = [known.get(id(tensor)) or self.value_of(tensor, hidden=True) for tensor in outputs]
            op.kind = Kind.TENSOR if outputs else Kind.VALUE
        except UnknownHolder as error:
            op.trouble = str(error)
        self.stack[-1].items.append(op)
        return op

    def _note_writes(self, writes: list[Storage]) -> None:
        for storage in writes:
            if storage.born_tainted:
                continue
            for call in self.stack:
                if storage.created < call.enter:
                    call.keep = call.keep or "it writes in place to a value made outside it"

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
        )


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


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Identities of the tensors an operation writes, and of those among them that it does not read."""
    written: set[int] = set()
    unread: set[int] = set()
    arguments = func._schema.arguments
    values = [args[i] if i < len(args) else kwargs.get(argument.name) for i, argument in enumerate(arguments)]
    for number, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        found = {id(tensor) for tensor in arguments_of((values[number],), {})}
        written |= found
        if func._schema.name in OVERWRITES or argument.kwarg_only:
            unread |= found
            values[number] = None
    # out= may name a tensor that is an argument, too
    return written, unread - {id(tensor) for tensor in arguments_of(tuple(values), {})}


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tuple(tensor.shape)


_MODULE_OWN = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's Python may change while it runs: its plain attributes, and what is in them."""
    return {name: _contents(value) for name, value in vars(module).items() if name not in _MODULE_OWN}


def _contents(value: Any, depth: int = 4) -> Any:
    """Something that is equal as long as a value is the same object and holds the same objects."""
    if depth and isinstance(value, tuple):
        return [_contents(item, depth - 1) for item in value]
    if depth and isinstance(value, list):
        return _Same(value), [_contents(item, depth - 1) for item in value]
    if depth and isinstance(value, dict):
        return _Same(value), [(_Same(key), _contents(item, depth - 1)) for key, item in value.items()]
    return _Same(value)


class _Same:
    """Equal if it is the same object, which is kept so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _random_state(func: Any, kwargs: dict[str, Any], tensors: Any) -> torch.Tensor:
    """The state of the generator an operation would draw from: the one it is given, or its device's."""
    generator = kwargs.get("generator")
    if generator is not None:
        return generator.get_state().clone()  # type: ignore[no-any-return]
    if any(tensor.is_cuda for tensor in arguments_of((tensors,), {})):
        return torch.cuda.get_rng_state()
    return torch.get_rng_state()


def _is_custom(module: nn.Module) -> bool:
    """Whether a module's Python may change attributes, its own or others'; torch's own modules do not."""
    return not type(module).__module__.startswith(("torch.nn.", "torch.jit."))


def _plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors in plain attributes of the modules."""
    return [
        tensor
        for module in model.modules()
        for tensor in tensors_in([v for k, v in vars(module).items() if k not in _MODULE_OWN])
    ]
