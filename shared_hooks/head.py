"""The head: run the model up to the cut, keep what crosses, and stop.

If every value that crosses is an input or the result of some module, and no Python before the cut depends on data, the
modules' shims see enough. Otherwise a function mode counts the operations, compares them with the plan, and records the
values that Python reads.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shared_hooks import devices
from shared_hooks.crossing import ALIGN, Crossing, EarlyOutput, Slot, TensorForm, generators
from shared_hooks.errors import CutRefused
from shared_hooks.forward import (
    CallKind,
    HookExitException,
    Placeholder,
    Session,
    arguments_of,
    is_form,
    is_mapped,
    kind_of,
    name_of,
)
from shared_hooks.metrics import Measurement
from shared_hooks.modules import ModuleInfo
from shared_hooks.planning import UNSEEN, Branch, Capture, Cutting, Follower, HeadWalk, Plan
from shared_hooks.purity import is_safe
from shared_hooks.recording import ModuleCall, Op, Trace, Value
from shared_hooks.recording.trace import calls_in
from shared_hooks.state import Dice
from shared_hooks.tensors import (
    Structure,
    UnknownHolder,
    flatten,
    identical,
    leaves_of,
    no_class,
    tensors_in,
    unflatten,
)


class Diverged(BaseException):
    """The run left the plan's path. No Exception, so that the model cannot catch it."""


class CrossingListener(Protocol):
    """Learns of what crosses a cut before its head has ended (`listening`), in the head's thread."""

    def begins(self, crossing: Crossing) -> bool:
        """A head to this cut begins; one begun before has left its path. Return whether to announce what is final."""

    def final(self, slot: int, pieces: tuple[torch.Tensor, ...]) -> None:
        """According to the plan, nothing writes to this slot any more before the cut; the head's result tells whether
        that is so.

        The memory may be the head's own.
        """


_listener: ContextVar[CrossingListener | None] = ContextVar("listener", default=None)


class listening:  # used as a function
    """In the block, heads of this thread inform ``listener``, if given."""

    def __init__(self, listener: CrossingListener | None) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        self._token = _listener.set(self._listener)

    def __exit__(self, *_: object) -> None:
        _listener.reset(self._token)


class Attempt:
    """A context around a head that may leave its path: a failed one is undone, so that the next begins in the same
    state.

    ``failed``: it has left the path; the exception is swallowed.
    """

    def __init__(self, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.failed = False
        # where data decide, the path that it leaves on may draw and write to inputs though its own does not
        self._dice = Dice() if trace.dice or trace.dynamic else None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        if trace.writes_inputs or trace.dynamic:
            self._kept = [(tensor, tensor.clone()) for tensor in flatten((args, kwargs))[1]]

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Diverged):
            return False
        self.failed = True
        if self._dice is not None:
            self._dice.restore()
        with torch.no_grad():
            for tensor, before in self._kept:
                if not identical(tensor, before):
                    tensor.copy_(before)
        return True


class Banking:
    """What a session does that stops at a cut: it captures a tensor on the storage of every slot on the way.

    ``target``: the cut; ``cutting``: what is captured for it; ``begins``: the seq from which the session runs, 0: the
    beginning. What lies before that is given: ``found``, slot -> tensor, and ``read``, operation -> structure.
    """

    banks = True

    def stop_at(
        self,
        plan: Plan,
        cutting: Cutting,
        target: Crossing,
        follower: Follower | None,
        begins: int = 0,
        read: dict[int, Structure] | None = None,
    ) -> None:
        """Set the cut; must be called first."""
        self.plan = plan
        self.cutting = cutting
        self.target = target
        self.exit = HookExitException(f"cut after {target.layer_name}")
        number = plan.place_at(target.layer_id, target.layer_name)
        block = None if number < len(plan.paths) else plan.trace.places.calls[number]
        self.block = None if block is None else (block.path, block.number)
        """The call of a block that the cut is after; None where it is after a layer."""
        self.stopped = False
        self.states = generators.now(target.generators)
        self.in_opaque = 0
        self.in_operation = False
        self.read: dict[int, Structure] = {} if read is None else read
        self.other_values = False
        self.versions: dict[int, int] = {}
        """Versions of the tensors in ``found``, at the cut."""
        self.found: dict[int, torch.Tensor] = {}
        self.follower = follower
        self.wanted: dict[Any, list[tuple[int, Capture]]] = {}
        self.first_op = sum(op.seq < begins for op in plan.trace.ops) if begins else 0
        self.first_unseen = sum(op.seq < begins for op in plan.trace.unseen) if begins else 0

    @property
    def is_watched(self) -> bool:
        """Whether operations count now."""
        return not self.stopped and not self.in_opaque

    def want(self, slot: int, capture: Capture) -> None:
        """Capture a result on the way for this slot."""
        if capture.kind != "nothing":
            self.wanted.setdefault(capture.where, []).append((slot, capture))

    def bank_module(self, path: str, number: int, output: Any) -> None:
        """Called after each call of a module, layer or not."""
        if self.follower is not None:
            call = self.plan.calls.get((path, number))
            with torch._C.DisableTorchFunction():  # our own reads of tensors are not operations of the model
                on_path = call is not None and self.follower.call(call, output)
            if not on_path:
                raise Diverged
        wanted = self.wanted.get((path, number))
        if wanted:
            self.capture(wanted, leaves_of(output))
        if self.block == (path, number):
            if self.next_layer != self.target.layer_id + 1:
                raise Diverged
            self.reach_cut()

    next_layer: int

    def bank_layer(self, number: int, path: str) -> None:
        """Called after each layer; ends the session at the cut."""
        paths = self.plan.paths
        if number >= len(paths) or paths[number] != path:
            raise Diverged
        if number == self.target.layer_id and self.block is None:
            self.reach_cut()

    def reach_cut(self) -> None:
        """Called at the cut."""
        self.stopped = True
        self.versions = {slot: _version(tensor) for slot, tensor in self.found.items()}
        # done here, because leaving the forward may restore generators
        if generators.AT_CUT in self.target.generators:
            at = self.target.generators.index(generators.AT_CUT)
            self.states = (*self.states[:at], *generators.now((generators.AT_CUT,)), *self.states[at + 1 :])
        raise self.exit

    def release_bank(self) -> None:
        self.found.clear()
        # its frames refer to this session: a cycle that would keep the frontier until the collector runs
        self.exit.__traceback__ = None

    def capture(self, wanted: list[tuple[int, Capture]], leaves: list[torch.Tensor]) -> None:
        """Capture the tensors of one result for the slots that need them."""
        for slot, capture in wanted:
            if capture.leaf >= len(leaves):
                raise Diverged
            leaf = leaves[capture.leaf]
            if tuple(leaf.shape) != capture.view.shape or tuple(leaf.stride()) != capture.view.stride:
                raise Diverged
            self.found[slot] = leaf

    def early(self) -> EarlyOutput:
        """Return the pieces of the captured storages. Raises CutRefused if the code that the head has left has written
        to them.
        """
        if self.versions != {slot: _version(self.found[slot]) for slot in self.versions}:
            raise CutRefused(
                f"cannot cut after {self.target.layer_name}: code around it that a head leaves (finally, a context "
                "manager) writes in place to what crosses"
            )
        pieces: list[torch.Tensor] = []
        starts: list[int] = []
        crossing = self.target
        if self.other_values:
            if not crossing.plan_digest:  # predicted: no plan here covers all values that may cross
                raise Diverged
            place = self.plan.place_at(crossing.layer_id, crossing.layer_name)
            crossing = self.plan.cutting(place, wide=True)[1]
            if len(crossing.slots) != len(self.cutting.captures):  # a path that reads more became known meanwhile
                raise Diverged
        for number, slot in enumerate(crossing.slots):
            if not slot.pieces:
                starts.append(0)
                continue
            if number not in self.found:
                raise Diverged
            start, own = self.pieces(number, crossing)
            starts.append(start)
            pieces += own
        values = tuple(self.read[ordinal] for ordinal in self.cutting.banked)
        return EarlyOutput(crossing, tuple(pieces), values, self.states, tuple(starts) if any(starts) else ())

    def pieces(self, number: int, crossing: Crossing) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Return the start of a slot's storage modulo `ALIGN`, and its pieces."""
        slot, capture = crossing.slots[number], self.cutting.captures[number]
        whole, origin = _storage_of(slot, capture, self.found[number].detach())
        views = [whole.as_strided(piece.shape, piece.stride, origin + piece.offset) for piece in slot.pieces]
        start = whole.data_ptr() % ALIGN if devices.is_host(whole.device) else 0
        return start, tuple(view.clone() if capture.copy else view for view in views)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class HeadSession(Banking, Session):
    """Runs up to one layer and captures a tensor on the storage of every slot."""

    def __init__(
        self,
        modules: dict[nn.Module, ModuleInfo],
        measurement: Measurement | None,
        save: set[int | str],
        plan: Plan,
        cutting: Cutting,
        crossing: Crossing,
        inputs: list[torch.Tensor],
    ) -> None:
        super().__init__(modules, measurement, save)
        dynamic = any(seq < cutting.position for seq in plan.trace.dynamic)
        # a predicted cut has no plan to follow: the values that are read must equal those of the similar plan
        follower = Follower(plan.trace, inputs) if dynamic and crossing.plan_digest else None
        self.stop_at(plan, cutting, crossing, follower)
        for slot, capture in enumerate(cutting.captures):
            if capture.kind == "input":
                self.found[slot] = inputs[capture.leaf]
            else:
                self.want(slot, capture)
        self.listener = _listener.get()
        self.finals: Mapping[tuple[str, int] | None, tuple[int, ...]] = {}
        if self.listener is not None and crossing.plan_digest and self.listener.begins(crossing):
            self.finals = plan.finals(cutting)
            self.announce(None)

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.stopped:
            # the model swallowed the exit and continued
            raise self.exit
        if info.opaque:
            self.in_opaque += 1
            try:
                return super().run(info, forward, args, kwargs)
            finally:
                self.in_opaque -= 1
        output = super().run(info, forward, args, kwargs)
        if self.finals and not self.in_opaque:  # here, so that it does not count as the layer's time
            self.announce((info.path, self.counts[info.path]))
        return output

    def announce(self, after: tuple[str, int] | None) -> None:
        """Announce what is final after this call; None: before any."""
        slots = [slot for slot in self.finals.get(after, ()) if slot in self.found]
        if slots and self.listener is not None:
            below = _disable_current_modes() if self.cutting.below else contextlib.nullcontext()
            with torch._C.DisableTorchFunction(), below:  # not an operation of the model
                for slot in slots:
                    self.listener.final(slot, self.pieces(slot, self.target)[1])

    def module_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        self.bank_module(info.path, call, output)

    def layer_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        super().layer_done(info, call, output)
        self.bank_layer(self.next_layer, info.path)

    def release(self) -> None:
        self.release_bank()


class WalkingHead(HeadSession):
    """A head that saves no layers and has no observers: it compares the calls of modules with the plan's."""

    def __init__(
        self, modules: dict[nn.Module, ModuleInfo], measurement: Measurement | None, walk: HeadWalk, *more: Any
    ) -> None:
        super().__init__(modules, measurement, set(), *more)
        self.walk = walk
        self.begun = 0
        """Calls, so far."""

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        walk, number = self.walk, self.begun
        calls = walk.calls
        if self.stopped or number == len(calls.modules) or calls.modules[number] is not module:
            if module not in self.modules:
                return forward(*args, **kwargs)
            raise self.exit if self.stopped else Diverged  # the model may have swallowed the exit
        self.begun = number + 1
        measurement = self.measurement
        if measurement is None or (layer := calls.layers[number]) is None:
            output = forward(*args, **kwargs)
        else:
            cpu, start = measurement.cpu(), measurement.mark()
            output = forward(*args, **kwargs)
            measurement.add(layer, self.modules[module], calls.names[number][1], start, cpu, output)
        if self.begun != calls.ends[number]:
            raise Diverged
        captures = walk.captures.get(number)
        if captures is not None:
            self.capture(captures, leaves_of(output))
        if number == walk.last:
            self.reach_cut()
        if self.finals and calls.names[number] in self.finals:
            self.announce(calls.names[number])
        return output


def _storage_of(slot: Slot, capture: Capture, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the memory of a slot as one flat tensor, and the element of its storage where it begins."""
    origin = int(tensor.storage_offset()) - capture.view.offset
    storage = tensor.untyped_storage()
    if origin < 0 or (origin + slot.elements) * slot.dtype.itemsize > storage.nbytes():
        raise Diverged
    whole = torch.empty(0, dtype=slot.dtype, device=tensor.device)
    whole.set_(storage, origin, (slot.elements,), (1,))
    return whole, origin


class HeadMode(TorchFunctionMode):
    """Counts the operations before a cut as the recorder does, and compares them with the plan."""

    def __init__(self, session: Banking) -> None:
        super().__init__()
        self.session = session
        self.count = session.first_op
        self.names = session.plan.names
        self.ops = session.plan.trace.ops
        self.banked = set(session.cutting.banked)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self.session
        arguments = arguments_of(args, kwargs)
        mapped = is_mapped(arguments)
        before, session.in_operation = session.in_operation, not mapped
        try:
            result = func(*args, **kwargs)
        finally:
            session.in_operation = before
        if not session.is_watched:
            return result
        name = name_of(func)
        kind = kind_of(name, bool(arguments), result)
        if kind is CallKind.FORM or mapped:
            return result
        number = self.count
        self.count += 1
        if number >= len(self.names) or self.names[number] != name:
            raise Diverged
        results = leaves_of(result) if kind is CallKind.TENSOR else []
        if session.follower is not None and not session.follower.operation(self.ops[number], arguments, results):
            raise Diverged
        if kind is CallKind.VALUE:
            self._value(number, result)
        wanted = session.wanted.get(number)
        if wanted:
            session.capture(wanted, results)
        return result

    def _value(self, number: int, result: Any) -> None:
        try:
            structure: Structure | None = flatten(result, plain=True)[0]
        except UnknownHolder:
            structure = None
        if number in self.banked and structure is not None:
            self.session.read[number] = structure
        if structure is None or structure != self.ops[number].structure:
            self.session.other_values = True


class WatchBelow(TorchDispatchMode):
    """Likewise counts the kernels before a cut that belong to no operation."""

    def __init__(self, session: Banking) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session
        self.count = session.first_unseen
        self.unseen = session.plan.trace.unseen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # calling a kernel is not an operation of the model
            result = func(*args, **(kwargs or {}))
        session = self.session
        if not session.is_watched or session.in_operation:
            return result
        number = self.count
        self.count += 1
        if number >= len(self.unseen) or self.unseen[number].name != str(func):
            raise Diverged
        wanted = session.wanted.get((UNSEEN, number))
        if wanted:
            session.capture(wanted, leaves_of(result))
        return result


# A head along branches: operations that are not needed before the cut return placeholders.


@dataclass(frozen=True, eq=False)
class Stub:
    """The head's replacement for something behind the cut: ``sources`` are forms or numbers of arguments.

    ``after``: how many operations there are up to its end; ``layers``, ``counts``: of the calls in it.
    """

    structure: Structure
    sources: tuple[int | TensorForm, ...]
    after: int = 0
    layers: int = 0
    counts: tuple[tuple[str, int], ...] = ()

    def result(self, arguments: list[torch.Tensor], device: torch.device) -> Any:
        """Return the result. Raises `Diverged` for other arguments than in the plan."""
        tensors: list[torch.Tensor] = []
        for source in self.sources:
            if isinstance(source, TensorForm):
                tensors.append(Placeholder(source.shape, source.stride, source.dtype, device))
            elif source < len(arguments):
                tensors.append(arguments[source])
            else:
                raise Diverged
        return unflatten(self.structure, tensors, no_class)


@dataclass(frozen=True, eq=False)
class Stubs:
    """What the heads to one branch cut replace: calls by path and number, operations by ordinal.

    ``views``: operations that only view memory, and run; ``forms``: those that need no data, and whose result depends
    on no input. ``bare``: calls that are needed completely, with the number of operations up to their end.
    """

    calls: Mapping[tuple[str, int], Stub]
    ops: Mapping[int, Stub]
    views: frozenset[int]
    forms: frozenset[int]
    bare: Mapping[tuple[str, int], int]

    @classmethod
    def of(cls, plan: Plan, cutting: Cutting) -> Stubs:
        """Return the replacements of a plan's cut, computed once."""
        branch, trace = cutting.branch, plan.trace
        assert branch is not None
        begins = [op.seq for op in trace.ops]
        calls = {}
        for call in branch.calls:
            stub = _stub(branch, call, call.structure, call.args, call.results, call.exit)
            if stub is not None:
                inside = [call, *calls_in(call)]
                counts = Counter(one.path for one in inside)
                layers = sum(one.layer_id is not None for one in inside)
                after = bisect_left(begins, call.exit)
                calls[call.path, call.number] = replace(stub, after=after, layers=layers, counts=tuple(counts.items()))
        data = sorted(event.seq for event in trace.events)
        ops, views, forms = {}, set(), set()
        for op in branch.later:
            ordinal = trace.ordinals[op]
            quiet = bisect_left(data, op.seq) == bisect_right(data, max(op.seq, op.end))
            if quiet and op.args and all(value.storage in {one.storage for one in op.args} for value in op.results):
                views.add(ordinal)
            if op.results and not any(value.hangs(op.end) for value in op.results):
                forms.add(ordinal)
            stub = _stub(branch, op, op.structure, op.args, op.results, op.end)
            if stub is not None:
                ops[ordinal] = stub
        captured = {trace.ops[one.where].seq for one in cutting.captures if one.kind == "op"}
        later = sorted(op.seq for op in branch.later)
        bare = {}
        for call in trace.calls:
            within = bisect_left(later, call.enter) == bisect_left(later, call.exit)
            watched = cutting.below or any(call.enter < seq < call.exit for seq in captured)
            if call.exit <= branch.end.exit and within and not watched:
                bare[call.path, call.number] = bisect_left(begins, call.exit)
        return cls(calls, ops, frozenset(views), frozenset(forms), bare)


def _stub(
    branch: Branch,
    item: Op | ModuleCall,
    structure: Structure | None,
    given: list[Value],
    results: list[Value],
    end: int,
) -> Stub | None:
    """Return the replacement of one call or operation.

    None if a result is neither an argument nor made behind the cut, or depends on no input, so that both sides compute
    it: then the code itself runs, as far as it gets.
    """
    sources: list[int | TensorForm] = []
    for value in results:
        if value in given:
            sources.append(given.index(value))
        elif branch.makes(value) and value.hangs(end) and not value.flags.replace("g", ""):
            sources.append(TensorForm(value.shape, value.view.stride, value.dtype))
        else:
            return None
    if structure is None and (results or isinstance(item, ModuleCall)):
        return None
    return Stub(["v", None] if structure is None else structure, tuple(sources))


class BranchHead(HeadSession):
    """Runs what a branch cut needs; the model's Python passes through the rest on placeholders.

    ``stubs``: of this cut; ``is_pure``: whether a module's Python has no effect but its result, so that it need not
    run.
    """

    def __init__(
        self,
        modules: dict[nn.Module, ModuleInfo],
        measurement: Measurement | None,
        save: set[int | str],
        stubs: Stubs,
        is_pure: Callable[[nn.Module], bool],
        device: torch.device,
        *more: Any,
    ) -> None:
        super().__init__(modules, measurement, save, *more)
        self.stubs = stubs
        self.is_pure = is_pure
        self.device = device
        self.mode: BranchMode | None = None
        assert self.cutting.branch is not None
        self.later = {(call.path, call.number) for call in self.cutting.branch.calls}
        self.later_calls = 0
        """How many calls behind the cut are entered, one in another, because they cannot be left out."""

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        info = self.modules.get(module)
        if info is None or self.stopped or self.in_opaque or self.mode is None:
            return super().call(module, forward, args, kwargs)
        key = info.path, self.counts.get(info.path, 0) + 1
        stub = self.stubs.calls.get(key)
        if stub is not None and self.is_pure(module) and all(map(is_safe, (*args, *kwargs.values()))):
            with torch._C.DisableTorchFunction():
                output = stub.result(list(tensors_in((args, kwargs))), self.device)
            self.begun += 1
            for path, count in stub.counts:
                self.counts[path] = self.counts.get(path, 0) + count
            self.next_layer += stub.layers
            self.mode.count = stub.after
            return output
        after = self.stubs.bare.get(key)
        if after is None:
            self.later_calls += key in self.later
            try:
                return super().call(module, forward, args, kwargs)
            finally:
                self.later_calls -= key in self.later
        self.in_opaque += 1
        try:
            output = super().call(module, forward, args, kwargs)
        finally:
            self.in_opaque -= 1
        self.mode.count = after
        return output

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module; what passes through on placeholders is not measured."""
        if not self.later_calls or self.measurement is None:
            return super().run(info, forward, args, kwargs)
        measurement, self.measurement = self.measurement, None
        try:
            return super().run(info, forward, args, kwargs)
        finally:
            self.measurement = measurement

    @property
    def is_real(self) -> bool:
        """Whether what runs now runs on this side."""
        return not self.later_calls


class BranchMode(HeadMode):
    """Answers the operations behind the cut, too."""

    session: BranchHead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session, number = self.session, self.count
        stub = session.stubs.ops.get(number)
        stubs = session.stubs
        if not session.is_watched or (stub is None and number not in stubs.views and number not in stubs.forms):
            return super().__torch_function__(func, types, args, kwargs)
        name, arguments = name_of(func), arguments_of(args, kwargs or {})
        if self.names[number] != name or is_form(name) or is_mapped(arguments):
            return super().__torch_function__(func, types, args, kwargs)
        op = self.ops[number]
        if len(arguments) != len(op.args):
            raise Diverged
        self.count += 1
        real = not any(type(one) is Placeholder for one in arguments)
        if number in stubs.forms or (number in stubs.views and real):
            return func(*args, **(kwargs or {}))
        if stub is None:
            raise CutRefused(f"cannot cut after {session.target.layer_name}: {name} behind it cannot be left out")
        return stub.result(arguments, session.device)


@contextlib.contextmanager
def watching(session: Banking) -> Iterator[None]:
    """The modes that the head's cut needs."""
    with contextlib.ExitStack() as modes:
        if isinstance(session, BranchHead):
            session.mode = BranchMode(session)
            modes.enter_context(session.mode)
        elif session.cutting.watched:
            modes.enter_context(HeadMode(session))
        if session.cutting.below:
            modes.enter_context(WatchBelow(session))
        yield
