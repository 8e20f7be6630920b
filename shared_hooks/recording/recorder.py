"""A recorded forward of a model: its calls of modules, and what outlives it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward.foresight import watch_threads
from shared_hooks.metrics import output_bytes
from shared_hooks.modules import ModuleInfo, fast_path_off, running
from shared_hooks.purity import is_safe, pure_modules
from shared_hooks.recording.ledger import bits_of, outside_writes, perturbed, put_off
from shared_hooks.recording.operations import OperationLog
from shared_hooks.recording.outliving import Judge
from shared_hooks.recording.trace import NEVER, DataEvent, ModuleCall, Storage, Trace
from shared_hooks.state import DiceWatch, PythonState, StateChange, first_few
from shared_hooks.tensors import UnknownHolder, flatten, tensors_in

# Two modes that observe the same run, for planning only.
#
# `TorchFunctionMode` sees the calls of the model's Python: the tail will meet them in the same order, so operations
# are numbered there. `TorchDispatchMode` sees what the kernels below read and write, element by element, and
# operations that bypass the function mode.


class Functions(TorchFunctionMode):
    def __init__(self, log: OperationLog) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self.log
        if log.muted or log.op is not None or log.in_opaque:
            return func(*args, **(kwargs or {}))
        return log.operation(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells torch that the method below needs no protection from its compiler, whose import takes over a second."""
        return False

    def __init__(self, log: OperationLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self.log
        if log.muted:
            return func(*args, **(kwargs or {}))
        # our own reads of tensors, and the call below, come back through the function mode
        log.muted = True
        try:
            return log.kernel(func, args, kwargs or {})
        finally:
            log.muted = False


class _ShieldedKernels(_Kernels):
    """For a process in which torch's compiler is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, kinds, args, kwargs)


def kernels(log: OperationLog) -> TorchDispatchMode:
    return (_ShieldedKernels if "torch._dynamo" in sys.modules else _Kernels)(log)


class Recorder(OperationLog):
    """The session that builds a `Trace`; one run, one thread."""

    is_bare = False

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
        super().__init__([*own, *existing], closely=closely, into_all=into_all)
        self.weights = [self.storage_of(parameter) for parameter in model.parameters()]
        self.model = model
        self.modules = modules
        self.constants = constants
        self.written_unseen: set[str] = set()
        self.generators = [
            value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Generator)
        ]
        self.own = [(tensor, _version(tensor), bits_of(tensor) if closely else "") for tensor in own]
        self.counts: dict[str, int] = {}
        self.pure = pure_modules(modules)
        self.judge = Judge(state, self)
        self.looked = False
        self.pure_stack = [True]  # code around the model is not its own
        self.changes: list[StateChange] = []
        self.layers: list[ModuleCall] = []

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model and return its output. Writes to the inputs if the model does."""
        with torch.no_grad():
            self.enter_inputs((args, kwargs))
        self.dice_watch = DiceWatch()
        watch_threads()
        token = running.set(self)
        try:
            with torch.no_grad(), fast_path_off(), Functions(self), kernels(self):
                self.repeats.depth = torch._C._len_torch_dispatch_stack()
                output = self.model(*args, **kwargs)
        finally:
            running.reset(token)
        self.dice_watch.look(self.seq)
        return output

    def failed(self, error: BaseException) -> None:
        raise error

    def thread_starts(self) -> None:
        """Refuse a thread that the model starts."""
        self.refuse("the model starts a thread, whose operations cannot be observed")

    def is_constant(self, tensor: torch.Tensor | None) -> bool:
        # once data were passed to code outside torch, equal runs prove nothing
        muted, self.muted = self.muted, True
        self.appeared.append("" if tensor is None or self.escaped else bits_of(tensor))
        self.muted = muted
        return len(self.appeared) - 1 in self.constants

    def is_unclear(self) -> bool:
        """Return whether something happened that a closer examination must settle."""
        unseen = bool(self.unknown or self.passed_out.known or self.escaped or self.doubtful)
        return unseen or bool(self.dice_watch.drawn)

    def unseen_writes(self) -> set[str]:
        """Return the names of parameters, buffers and the like whose bytes were changed by no operation."""
        logged = {storage for event in self.events for storage in event.writes}
        found = self.passed_out.changed | self.undeclared
        for tensor, version, bits in self.own:
            storage = self.storage_of(tensor)
            if storage not in logged and (version != _version(tensor) or (bits and bits != bits_of(tensor))):
                found.add(storage)
        return {self.named(storage) for storage in found} | self.written_unseen

    def named(self, storage: Storage) -> str:
        """Return the place where the model keeps this storage."""
        if not storage.name:
            storage.name = next(
                (name for name, tensor in _named(self.model) if self._on(tensor, storage)), "a constant"
            )
        return storage.name

    def _on(self, tensor: torch.Tensor, storage: Storage) -> bool:
        return self.storage_of(tensor) is storage

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
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.refuse("a module runs inside torch.vmap, or another function of torch.func", call.enter)
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
        if info.opaque and _sets_attributes(module):
            self.refuse(f"the script of {info.path} writes an attribute of its module, which cannot be observed")
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
            self._look_at_state(call)
        # the caller continues now
        self.looked &= self.pure_stack[-1]
        self.muted = False
        return output

    def _look_at_state(self, call: ModuleCall) -> None:
        """Compare the state with that at the beginning, if code that may write state has run since the last check."""
        if not self.looked:
            self.looked = True
            self.changes = self.judge.changes()
        stuck = [change.name for change in self.changes if not change.can_be_undone]
        if stuck:
            self.refuse(f"here the model's Python state cannot be left: {first_few(stuck)}", call.exit, call.exit)

    def _opaque_effects(
        self, call: ModuleCall, args: list[torch.Tensor], results: list[torch.Tensor], known: int
    ) -> None:
        """A scripted or compiled module may run fused kernels that are not observed: its arguments count as read."""
        self.events.append(DataEvent(call.exit, [self.span(tensor) for tensor in args], [], []))
        for storage in [self.storage_of(tensor, created=call.exit) for tensor in results]:
            if storage.index >= known and call.args_tainted:
                storage.tainted = min(storage.tainted, call.exit)
                storage.born_tainted, storage.outside = True, False

    def finish(self, output: Any) -> Trace:
        """Close the trace: the output is read at the end."""
        end = self.tick()
        tensors = list(tensors_in(output))
        outputs = [self.value_of(tensor) for tensor in tensors]
        reads = [self.span(tensor) for tensor in tensors]
        self.events.append(DataEvent(end, reads, [], []))
        self._look()
        for name in sorted(self.unseen_writes()):
            self.refuse(f"code that torch does not see writes to {name}, which outlives the forward")
        if self.dice_watch.drawn or self.dice or self.draws or self.judge.reads_data:  # data may decide where it draws
            requested = sorted(_GENERATORS & self.judge.state.reach.names)
            if requested:
                what = "draws random numbers" if not self.judge.reads_data else "may draw random numbers, as data say"
                self.refuse(f"the model {what}, and its code has a generator's state in hand ({requested[0]})")
        written = list(outside_writes(self.events, timeless=not self.dynamic))
        for storage, first, last, what in written:
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
            output_bytes=output_bytes(tensors),
            writes_kept=bool(written) and (not self.dynamic or all(last < NEVER for _, _, last, _ in written)),
            weights=self.weights,
        )


_GENERATORS = frozenset(
    "get_rng_state set_rng_state fork_rng get_state set_state getstate setstate initial_seed".split()
)


def _sets_attributes(module: nn.Module) -> bool:
    """Return whether a scripted module keeps state."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    return "prim::SetAttr" in str(module._c._get_method("forward").inlined_graph)


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


# Records a forward of a model into a `Trace`, as often as necessary to resolve everything.


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    model: nn.Module, modules: dict[nn.Module, ModuleInfo], fresh_inputs: Callable[[], Inputs], state: PythonState
) -> tuple[Trace, Any, Judge]:
    """Run the model on fresh inputs; returns what it did, its output, and a judge of what it did to ``state``, the
    model's current Python state. The model's own exceptions pass through.

    A tensor that no operation created is a constant kept somewhere (a global, a closure), or comes from code that torch
    does not see. If there are such tensors the model is recorded again: what exists a second time is a constant. What
    is created each time (``torch.from_numpy``) is one if its bits are the same for other inputs.
    """

    def recorded(**close: Any) -> tuple[Recorder, Any]:
        state.restore()
        recorder = Recorder(model, modules, state, unknown, into_all=into_all, **close)
        return recorder, recorder.watch(*fresh_inputs())

    unknown: list[torch.Tensor] = []
    into_all = False
    with put_off():
        recorder, output = recorded()
        if recorder.repeats.wrong:
            into_all = True
            recorder, output = recorded()
        if recorder.is_unclear():
            unknown = recorder.unknown
            recorder, output = recorded(closely=True)
            if recorder.appeared or recorder.passed_out.known or recorder.doubtful:
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
    """Return another recording, for what it shows of memory that torch does not see; None if it fails."""
    state.restore()
    recorder = Recorder(model, modules, state, known, closely=True)
    try:
        recorder.watch(*fresh_inputs())
    except Exception:  # the model may reject other values
        return None
    return recorder


def _agreeing(appeared: list[str], others: list[Recorder | None]) -> frozenset[int]:
    """Which of the tensors that no operation created had the same bits in every recording, by order of appearance."""
    lists = [other.appeared for other in others if other is not None]
    if len(lists) < len(others) or any(len(found) != len(appeared) for found in lists):
        return frozenset()
    return frozenset(i for i, bits in enumerate(appeared) if bits and all(found[i] == bits for found in lists))
