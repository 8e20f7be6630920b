"""Record one forward of a model into a `Trace`.

Two modes look at the same run. `TorchFunctionMode` sees the calls the model's Python makes: their order is what the
tail will meet again, so operations are numbered there. `TorchDispatchMode` sees what the kernels below read and write,
element by element, and anything that runs out of the function mode's sight. Both are used for planning only.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward import (
    COPIES_BYTES,
    FORM_OF_OTHERS,
    HEADS,
    Kind,
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
from shared_hooks.metrics import output_bytes
from shared_hooks.modules import ModuleInfo, fast_path_off, running
from shared_hooks.purity import is_safe, pure_modules
from shared_hooks.recording import collector
from shared_hooks.recording.carried import outside_writes
from shared_hooks.recording.escapes import Handed, bits_of, perturbed
from shared_hooks.recording.kernels import KernelLog
from shared_hooks.recording.outliving import Judge
from shared_hooks.recording.repeats import Repeat, Repeats, only_assigns, only_views, run_unseen
from shared_hooks.recording.trace import NEVER, Event, ModuleCall, Op, Storage, Trace, Value
from shared_hooks.state import Change, DiceWatch, PythonState, first_few, lasting_name
from shared_hooks.tensors import UnknownHolder, View, flatten, tensors_in

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    model: nn.Module, modules: dict[nn.Module, ModuleInfo], fresh_inputs: Callable[[], Inputs], state: PythonState
) -> tuple[Trace, Any, Judge]:
    """Run the model on fresh inputs; return what it did, its output, and a judge of what it did to ``state``, which is
    the model's Python state now. The model's own exceptions pass through.

    A tensor that no operation made is a constant kept somewhere (a global, a closure), or the work of code that torch
    does not see. Where there are such tensors the model is recorded again: what is there a second time is a constant.
    What is made anew each time (``torch.from_numpy``) is one if its bits are the same for other inputs, too.
    """

    def recorded(**close: Any) -> tuple[Recorder, Any]:
        state.restore()
        recorder = Recorder(model, modules, state, unknown, into_all=into_all, **close)
        return recorder, recorder.watch(*fresh_inputs())

    unknown: list[torch.Tensor] = []
    into_all = False
    with collector.put_off():
        recorder, output = recorded()
        if recorder.repeats.wrong:
            into_all = True
            recorder, output = recorded()
        if recorder.is_unclear():
            unknown = recorder.unknown
            recorder, output = recorded(closely=True)
            if recorder.appeared or recorder.handed.known or recorder.doubtful:
                others = [_again(model, modules, state, unknown, source) for source in perturbed(fresh_inputs)]
                constants = _agreeing(recorder.appeared, others)
                recorder, output = recorded(closely=True, constants=constants)
                recorder.written_unseen |= {name for other in others if other for name in other.unseen_writes()}
        return recorder.finish(output), output, recorder.judge


def _again(
    model: nn.Module,
    modules: dict[nn.Module, ModuleInfo],
    state: PythonState,
    known: list[torch.Tensor],
    fresh_inputs: Callable[[], Inputs],
) -> Recorder | None:
    """One more recording, for what it shows of memory that torch does not see; None if it cannot be made."""
    state.restore()
    recorder = Recorder(model, modules, state, known, closely=True)
    try:
        recorder.watch(*fresh_inputs())
    except Exception:  # other values may be none that the model takes
        return None
    return recorder


def _agreeing(appeared: list[str], others: list[Recorder | None]) -> frozenset[int]:
    """Which of the tensors that no operation made had the same bits in every recording, by order of appearance."""
    lists = [other.appeared for other in others if other is not None]
    if len(lists) < len(others) or any(len(found) != len(appeared) for found in lists):
        return frozenset()
    return frozenset(i for i, bits in enumerate(appeared) if bits and all(found[i] == bits for found in lists))


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
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shields the method below from its compiler, which it imports for that: more than a second."""
        return False

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


class _ShieldedKernels(_Kernels):
    """For a process in which torch's compiler is at work."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, kinds, args, kwargs)


def _kernels(recorder: Recorder) -> TorchDispatchMode:
    return (_ShieldedKernels if "torch._dynamo" in sys.modules else _Kernels)(recorder)


class Recorder(KernelLog):
    """The session that builds a `Trace`; one run, one thread."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        state: PythonState,
        existing: list[torch.Tensor],
        *,
        closely: bool = False,
        constants: frozenset[int] = frozenset(),
        into_all: bool = False,
    ) -> None:
        own = [*model.parameters(), *model.buffers(), *state.tensors()]
        super().__init__([*own, *existing])
        self.weights = [self.storage_of(parameter) for parameter in model.parameters()]
        self.model = model
        self.modules = modules
        self.muted = False
        self.handed = Handed()
        self.constants = constants
        self.written_unseen: set[str] = set()
        self.closely = closely
        self.dice_watch = DiceWatch()
        self.generators = [
            value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Generator)
        ]
        self.own = [(tensor, _version(tensor), bits_of(tensor) if closely else "") for tensor in own]
        self.counts: dict[str, int] = {}
        self.pure = pure_modules(modules)
        self.judge = Judge(state, self)
        self.looked = False
        self.pure_stack = [True]  # what is around the model is no code of its
        self.half_done: dict[int, set[str]] = {}
        self.changes: list[Change] = []
        self.layers: list[ModuleCall] = []
        self.ops: list[Op] = []
        self.repeats = Repeats(into_all=into_all)

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model and return its output. Writes to the inputs if the model does."""
        with torch.no_grad():
            self.enter_inputs((args, kwargs))
        self.dice_watch = DiceWatch()
        token = running.set(self)
        try:
            with torch.no_grad(), fast_path_off(), _Functions(self), _kernels(self):
                self.repeats.depth = torch._C._len_torch_dispatch_stack()
                output = self.model(*args, **kwargs)
        finally:
            running.reset(token)
        self.dice_watch.look(self.seq)
        return output

    def failed(self, error: BaseException) -> None:
        raise error

    def is_constant(self, tensor: torch.Tensor | None) -> bool:
        # once the data was handed to code outside torch, no likeness of two runs proves anything
        muted, self.muted = self.muted, True
        self.appeared.append("" if tensor is None or self.escaped else bits_of(tensor))
        self.muted = muted
        return len(self.appeared) - 1 in self.constants

    def is_unclear(self) -> bool:
        """Whether something happened that a closer look must settle."""
        unseen = bool(self.unknown or self.handed.known or self.escaped or self.doubtful)
        return unseen or bool(self.dice_watch.drawn)

    def unseen_writes(self) -> set[str]:
        """Names of parameters, buffers and the like whose bytes were changed by no operation."""
        logged = {storage for event in self.events for storage in event.writes}
        found = self.handed.changed | self.undeclared
        for tensor, version, bits in self.own:
            storage = self.storage_of(tensor)
            if storage not in logged and (version != _version(tensor) or (bits and bits != bits_of(tensor))):
                found.add(storage)
        return {self.named(storage) for storage in found} | self.written_unseen

    def named(self, storage: Storage) -> str:
        """Where the model keeps this storage."""
        if not storage.name:
            storage.name = next(
                (name for name, tensor in _named(self.model) if self._on(tensor, storage)), "a constant"
            )
        return storage.name

    def _on(self, tensor: torch.Tensor, storage: Storage) -> bool:
        return self.storage_of(tensor) is storage

    def _look(self) -> None:
        if self.closely:
            self.dice_watch.look(self.seq)
        if self.handed.known:
            muted, self.muted = self.muted, True
            self.handed.look()
            self.muted = muted

    def _hand(self, op: Op, tensors: list[torch.Tensor]) -> None:
        """Code outside torch gets hold of the memory: what is constant is watched, the rest counts as written."""
        self.muted = True
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if storage.outside and not storage.foreign:
                self.handed.add(storage, tensor)
            elif storage.tainted <= op.seq:
                self.events.append(Event(self.tick(), [], [], [storage]))
        self.muted = False

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        info = self.modules.get(module)
        if info is None or self.muted or self.op is not None or self.in_opaque:
            return forward(*args, **kwargs)
        self.muted = True
        parent = self.stack[-1]
        number = self.counts[info.path] = self.counts.get(info.path, 0) + 1
        call = ModuleCall(info.path, number, info.module_type, info.opaque, parent, self.tick())
        call.args = [self.value_of(tensor) for tensor in tensors_in((args, kwargs))]
        call.args_tainted = any(value.hangs(self.seq) for value in call.args)
        parent.has_child = True
        parent.items.append(call)
        self._look()
        pure = module in self.pure and all(map(is_safe, (*args, *kwargs.values())))
        self.looked &= pure and self.pure_stack[-1]
        self.pure_stack.append(pure)
        storages = self.numbered
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
        self._look()
        try:
            call.structure, tensors = flatten(output, plain=True)
        except UnknownHolder:
            tensors = list(tensors_in(output))
        self.stack.append(call)
        if info.opaque:
            self._opaque_effects(call, list(tensors_in((args, kwargs))), tensors, storages)
        call.results = [self.value_of(tensor, hidden=info.opaque) for tensor in tensors]
        self.stack.pop()
        with torch._C.DisableTorchFunction():
            call.output_bytes = output_bytes(tensors)
        if not call.has_child:
            call.layer_id = len(self.layers)
            self.layers.append(call)
            self._look_at_state(call, call.layer_id)
        # whoever called it goes on now
        self.looked &= self.pure_stack[-1]
        self.muted = False
        return output

    def _look_at_state(self, call: ModuleCall, layer: int) -> None:
        """Is the state as it was at the beginning? Only where code that may write state has run since the last look."""
        if not self.looked:
            self.looked = True
            self.changes = self.judge.changes()
        if self.changes:
            self.half_done[layer] = {lasting_name(change, self.judge.state.places) for change in self.changes}
        stuck = [change.name for change in self.changes if not change.can_be_undone]
        if stuck:
            self.refuse(f"here the model's Python state cannot be left: {first_few(stuck)}", call.exit, call.exit)

    def _opaque_effects(
        self, call: ModuleCall, args: list[torch.Tensor], results: list[torch.Tensor], known: int
    ) -> None:
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
        if name in HEADS and len(args) == 1 and not kwargs and is_dense(args[0]):
            return func(*args)
        only_form = is_form(name)
        op = Op(self.tick(), name, arguments)
        if not only_form:
            op.literals = literals_of((args, kwargs))
        for value in arguments:
            op.args_tainted |= value.hangs(op.seq)
            op.takes_chosen |= value.chosen
        first_event, own = len(self.events), self.numbered
        before = self.storage_of(tensors[0]) if name == "data.__set__" else None
        self._look()
        self.fresh.clear()
        unseen = self.repeats.may_be_unseen and not (only_form or op.takes_chosen)
        viewing = unseen and only_views(name, func, args, tensors)
        assigning = unseen and only_assigns(name, func, args, op)
        again = unseen and not (viewing or assigning or self.closely or self.handed.known)
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
        if self.handed.known:
            self.muted = True
            self.handed.settle()
            self.muted = False
        if name in COPIES_BYTES:
            self.events.append(Event(self.tick(), [self.span(tensor) for tensor in tensors], [], []))
            op.reads_tainted |= op.args_tainted
        if before is not None:
            self.moved(tensors[0], before, op.args_tainted)
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
        if op.kind is Kind.FORM:
            return result
        if only_form:
            op.literals = literals_of((args, kwargs))
        if op.kind is Kind.VALUE:
            self._value_read(op, tensors, result, first_event)
        elif op.kind is Kind.TENSOR:
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
            if again and repeat is None and self.regular and _is_told(op):
                self.repeats.learn(func, args, kwargs, tensors, op, self.events[first_event:], results, made)
        elif name.endswith(".__set__"):
            op.trouble = f"it assigns {name.removesuffix('.__set__')} of a tensor"
        self.ops.append(op)
        self.stack[-1].items.append(op)
        return result

    def _viewed(self, storage: Storage, results: list[torch.Tensor]) -> None:
        """A call has run that only makes views."""
        known = self.storages
        self.repeats.wrong |= any(known.get(tensor.untyped_storage()._cdata) is not storage for tensor in results)

    def _assigned(self, op: Op, tensor: torch.Tensor, index: Any, value: torch.Tensor) -> None:
        """A call has run that only copies ``value`` to a view of ``tensor``."""
        target, source = (argument.storage for argument in op.args)
        view = run_unseen(torch.Tensor.__getitem__, (tensor, index), {})
        reads, overwrites = [self.span(value)], [(target, self.view(view, target))]
        self.events.append(Event(self.tick(), reads, overwrites, [target], [target, source]))
        op.writes.append(target)
        if source.tainted <= op.seq:
            op.reads_tainted = True
            target.tainted = min(target.tainted, self.seq)

    def _repeated(self, op: Op, repeat: Repeat, results: list[torch.Tensor]) -> None:
        """A call has run of which it is known what it does below: numbers go on as if it had been looked into."""
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
        """What Python makes from its own numbers after it has read data may be made from the data.

        So it is sent, and what follows from it is not computed twice: a token of a decoder, say.
        """
        for storage in self.fresh:
            if not storage.outside and storage.created >= op.seq:
                storage.tainted, storage.born_tainted, op.draws = op.seq, True, True
                op.unforeseen = True  # elsewhere the numbers are not known to hold data

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
            if any(storage.tainted <= op.seq for storage, _ in reads):
                op.reads_tainted = op.unforeseen = True
                self.note_dynamic(op)  # what is read so decides on something: where to split, how long a result is

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
            # tolist() and numpy() read behind the dispatcher's back
            self.muted = True
            self.events.append(Event(self.tick(), [self.span(tensor) for tensor in tensors], [], []))
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
            self._hand(op, tensors)
        if op.reads_tainted:
            self.escaped |= is_escape(op.name)
            self.note_dynamic(op)

    def finish(self, output: Any) -> Trace:
        """Close the trace: the output is read at the end."""
        end = self.tick()
        tensors = list(tensors_in(output))
        outputs = [self.value_of(tensor) for tensor in tensors]
        reads = [self.span(tensor) for tensor in tensors]
        self.events.append(Event(end, reads, [], []))
        self._look()
        for name in sorted(self.unseen_writes()):
            self.refuse(f"code that torch does not see writes to {name}, which outlives the forward")
        for storage, first, last, what in outside_writes(self.events, timeless=not self.dynamic):
            self.refuse(f"the model {what} {self.named(storage)}, which outlives the forward", first, last)
            if last < NEVER:
                self.scratch.add(storage)
        return Trace(
            self.root,
            self.layers,
            self.events,
            self.ops,
            self.input_structure,
            self.inputs,
            outputs,
            end,
            self.dynamic,
            self.foreign,
            self.draws,
            refusals=tuple(self.refusals),
            dice=self.dice | self.dice_watch.drawn,
            half_done=self.half_done,
            weights=self.weights,
        )


def _is_told(op: Op) -> bool:
    """Whether all that an operation did stands in its events."""
    return not (op.trouble or op.reshapes or op.draws or op.dynamic or op.unforeseen) and bool(op.args)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                for tensor in tensors_in(value):
                    yield f"{path}.{name}" if path else name, tensor
