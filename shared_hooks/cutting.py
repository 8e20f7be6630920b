"""Turn a trace and a frontier into what both sides do for one cut: the recipe for the tail, the captures for
the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared_hooks.errors import CutRefused
from shared_hooks.liveness import Frontier
from shared_hooks.operations import Kind
from shared_hooks.recipe import Slot
from shared_hooks.trace import Call, Op, Storage, Trace, Value
from shared_hooks.trees import Structure, dtype_name
from shared_hooks.views import LiveSet, View


@dataclass(frozen=True)
class Capture:
    """Where the head finds a tensor on the storage of one slot: an input, a module's result, or an operation's.

    ``view``: what the tensor is of its storage in the plan, so that the slot's origin can be found from the tensor.
    ``copy``: somebody else may write to it once the head is done (an input, a buffer of the model): take a copy.
    """

    kind: str
    where: Any
    leaf: int
    view: View
    copy: bool


@dataclass(frozen=True)
class Cutting:
    """Slots, steps and inputs for the recipe; captures (one a slot) and banked operations for the head.

    ``position``: the seq of the cut; ``watched``: the head needs a function mode.
    """

    slots: tuple[Slot, ...]
    inputs: tuple[list[Any], ...]
    steps: tuple[list[Any], ...]
    captures: tuple[Capture, ...]
    banked: tuple[int, ...]
    position: int
    watched: bool
    counts: dict[str, int]


def cut_after(trace: Trace, layer: Call | None, frontier: Frontier, *, wide: bool = False) -> Cutting:
    """Work out the cut after ``layer`` (None: before the first layer). Raises `CutRefused` with the reason.

    ``wide``: what the tail writes is not what it wrote in the plan.
    """
    return _Cutter(trace, layer, frontier, wide).work()


_NOWHERE = View((), (), 0)


def _reshaped(trace: Trace, layer: Call) -> set[Storage]:
    """Storages of tensors whose shape is changed in place before the cut."""
    ops = (op for op in trace.ops if op.reshapes and op.args_tainted and op.seq < layer.exit)
    return {value.storage for op in ops for value in op.results if value.storage.born_tainted}


class _Cutter:
    def __init__(self, trace: Trace, layer: Call | None, frontier: Frontier, wide: bool) -> None:
        # what began as a constant and is only overwritten needs no slot: the cloud has the storage
        frontier = {storage: live for storage, live in frontier.items() if live or storage.born_tainted}
        if layer is not None:
            frontier |= {
                storage: LiveSet.empty(storage.elements) for storage in _reshaped(trace, layer) - set(frontier)
            }
        self.trace = trace
        self.wide = wide
        self.layer = layer
        self.position = 0 if layer is None else layer.exit
        self.frontier = frontier
        self.slot_of = {storage: number for number, storage in enumerate(frontier)}
        self.steps: list[list[Any]] = []
        self.given: set[Value] = set()
        self.banked: list[int] = []
        self.last_write: dict[Storage, tuple[list[Any] | None, Op]] = {}

    def work(self) -> Cutting:
        if self.trace.unsteady:  # even before the first layer: the state is one side's, not the other's
            raise CutRefused(self.trace.unsteady)
        if self.layer is not None:
            self._check_trace(self.layer)
        for storage in self.frontier:
            if storage.opaque:
                raise CutRefused("a sparse, nested or quantised tensor crosses")
            if storage.outside:
                raise CutRefused("the model keeps a value of this request in its own state, and reads it after the cut")
        inputs = tuple(self._source_of_input(value) for value in self.trace.inputs)
        self.given.update(self.trace.inputs)
        if self.layer is not None:
            self._walk(self.trace.root)
        self._fill()
        self._check_given()
        written = {storage for event in self.trace.events if event.seq > self.position for storage in event.writes}
        unsure = self.wide or max(self.trace.dynamic, default=-1) > self.position
        slots = tuple(
            Slot(storage.dtype, storage.elements, live.pieces, unsure or storage in written)
            for storage, live in self.frontier.items()
        )
        captures = tuple(self._capture(storage) for storage in self.frontier)
        dynamic = any(seq < self.position for seq in self.trace.dynamic)
        watched = dynamic or bool(self.banked) or any(capture.kind == "op" for capture in captures)
        watched = watched and self.layer is not None
        steps = tuple(self.steps)
        return Cutting(slots, inputs, steps, captures, tuple(self.banked), self.position, watched, self._counts())

    def _counts(self) -> dict[str, int]:
        before: dict[str, int] = {}
        again: set[str] = set()
        for call in self.trace.calls:
            if call.enter > self.position:
                again.add(call.path)
            else:
                before[call.path] = max(before.get(call.path, 0), call.number)
        return {path: before[path] for path in sorted(again) if path in before}

    def _check_trace(self, layer: Call) -> None:
        """Reasons to refuse that hold for the model rather than for one value."""
        trace = self.trace
        if layer.layer_id in trace.unsettled:
            raise CutRefused(f"here the model's Python state cannot be left: {trace.unsettled[layer.layer_id]}")
        if trace.draws and min(trace.draws) < self.position < max(trace.draws):
            raise CutRefused("random numbers are drawn before and after it, and a generator's state does not cross")
        if trace.foreign >= self.position:
            raise CutRefused("code that torch does not see (threads, an extension) reads values after the cut")

    # -- the replay ---------------------------------------------------------------------------------------------

    def _walk(self, call: Call) -> bool:
        """Steps for the part of a call that lies in the prefix; True when the cut has been reached."""
        for item in call.items:
            start = item.enter if isinstance(item, Call) else item.seq
            if start > self.position:
                return True
            if isinstance(item, Op):
                self._operation(item)
                continue
            if item.exit <= self.position and self._can_skip(item):
                self.steps.append(
                    ["skip", item.path, item.structure, [self._source(v, item.args, item.exit) for v in item.results]]
                )
                self.given.update(item.results)
                if item is self.layer:
                    return True
                continue
            if item.opaque and item.args_tainted:
                raise CutRefused(f"{item.name} is scripted or compiled, and its result cannot be replayed")
            self.steps.append(["enter", item.path])
            reached = self._walk(item)
            if item is self.layer:
                self.steps.append(["end", item.path])
                return True
            if reached:
                return True
            if item.opaque:
                self.given.update(item.results)
        return False

    def _can_skip(self, call: Call) -> bool:
        if not call.args_tainted or call.structure is None or call.keep:
            return False
        if call.reads_values and _has_number(call.structure):
            return False
        for value in call.results:
            needed = value.last_use > call.exit
            if needed and (value.storage.opaque or not (value.storage.born_tainted or value in call.args)):
                return False
        return True

    def _operation(self, op: Op) -> None:
        if any(value.storage.foreign for value in op.args):
            raise CutRefused(
                f"before the cut {op.name} takes a value that no operation made (threads, NumPy, an extension)"
            )
        if not op.args_tainted and not op.draws:
            self.given.update(op.results)
            return
        if op.trouble:
            raise CutRefused(f"{op.name} before the cut cannot be replayed: {op.trouble}")
        if op.hidden and op.kind is Kind.VALUE:
            raise CutRefused(f"before the cut {op.name} reads a value where torch functions are not seen")
        if op.kind is Kind.VALUE:
            self.banked.append(self.trace.ordinals[op])
            self.steps.append(["value", op.name])
            return
        if op.reshapes:
            # on a real tensor, be there anything in it or not: a placeholder cannot change its shape
            self.steps.append(["run", op.name])
            self.given.update(op.results)
            return
        touched = [value.storage for value in op.results] + op.writes
        if (
            op.kind is Kind.TENSOR
            and not op.hidden
            and not (op.reads_tainted or op.draws or any(s.tainted <= op.end for s in touched))
        ):
            self.steps.append(["run", op.name])
            self.given.update(op.results)
            return
        sources = [self._source(value, op.args, op.end) for value in op.results]
        structure: Structure = op.structure or ["v", None]
        step: list[Any] = ["draw", op.name, structure, sources]
        if op.hidden:
            step = ["below", op.name, structure, sources, self._writes(op)]
        elif op.args_tainted:
            step = ["give", op.name, structure, sources, self._writes(op)]
        self.steps.append(step)
        self.given.update(op.results)
        for storage in op.writes:
            self.last_write[storage] = (step, op)

    @staticmethod
    def _writes(op: Op) -> list[list[int]]:
        """The arguments on storages that began as constants and are written here: from now on not constant."""
        written = {storage for storage in op.writes if not storage.born_tainted}
        return [[number, -1] for number, value in enumerate(op.args) if value.storage in written]

    def _source(self, value: Value, args: list[Value], now: int) -> list[Any]:
        storage, view = value.storage, value.view
        if value in args:
            return ["arg", args.index(value)]
        if storage.born_tainted:
            if storage in self.slot_of:
                return self._slot_source(value)
        elif storage.tainted <= now:
            # it began as a constant, so the cloud has the real thing: stay on it
            for number, arg in enumerate(args):
                if arg.storage is storage:
                    return ["real", number, view.shape, view.stride, view.offset, dtype_name(value.dtype)]
            if storage in self.slot_of:
                raise CutRefused("a value is written in place where the write cannot be replayed")
        elif value.last_use > now:
            raise CutRefused(
                "an operation before the cut gives a value that does not depend on the inputs, among others"
            )
        if storage.opaque:
            raise CutRefused("a sparse, nested or quantised tensor is made between layers before the cut")
        return ["hole", view.shape, view.stride, dtype_name(value.dtype)]

    def _slot_source(self, value: Value) -> list[Any]:
        view = value.view
        slot = self.slot_of[value.storage]
        return [
            "slot",
            slot,
            view.shape,
            view.stride,
            view.offset,
            dtype_name(value.dtype),
            value.flags.replace("g", ""),
        ]

    def _source_of_input(self, value: Value) -> list[Any]:
        if value.storage in self.slot_of:
            return self._slot_source(value)
        if value.storage.opaque:
            raise CutRefused("an input is sparse, nested or quantised")
        return ["hole", value.view.shape, value.view.stride, dtype_name(value.dtype)]

    def _fill(self) -> None:
        """Storages that began as constants: the cloud makes them itself, and gets their content at the last write."""
        for storage, number in self.slot_of.items():
            if storage.born_tainted:
                continue
            step, op = self.last_write.get(storage, (None, None))
            fill = next((f for f in step[4] if op and op.args[f[0]].storage is storage), None) if step else None
            if fill is None:
                raise CutRefused("a value is written in place where the write cannot be replayed")
            fill[1] = number

    def _check_given(self) -> None:
        """Every value the tail will touch must have been placed by a step, an input, or code that runs again."""
        for value in self._touched_by_tail():
            if value.storage in self.slot_of and value not in self.given:
                raise CutRefused("a value that crosses is made where torch functions are not seen")
            if value.storage in self.slot_of and "g" in value.flags:
                raise CutRefused("a gradient is taken across the cut")

    def _touched_by_tail(self) -> set[Value]:
        later = {value for op in self.trace.ops if op.seq > self.position for value in op.args}
        later.update(value for call in self.trace.calls if call.enter > self.position for value in call.args)
        later.update(self.trace.outputs)
        return {value for value in later if value.made < self.position}

    # -- the head -----------------------------------------------------------------------------------------------

    def _capture(self, storage: Storage) -> Capture:
        if not self.frontier[storage]:
            return Capture("nothing", None, 0, _NOWHERE, False)
        for leaf, value in enumerate(self.trace.inputs):
            if value.storage is storage:
                return Capture("input", None, leaf, value.view, True)
        copy = not storage.born_tainted
        for call in self.trace.calls:
            for leaf, value in enumerate(call.results):
                if value.storage is storage and call.exit <= self.position:
                    return Capture("result", (call.path, call.number), leaf, value.view, copy)
        for op in self.trace.ops:
            if op.seq < self.position:
                for leaf, value in enumerate(op.results):
                    if value.storage is storage:
                        return Capture("op", self.trace.ordinals[op], leaf, value.view, copy)
        raise CutRefused("a value that crosses is made where torch functions are not seen")


def _has_number(structure: Any) -> bool:
    if isinstance(structure, list):
        if len(structure) == 2 and structure[0] == "v":
            return structure[1] is not None and not isinstance(structure[1], str)
        return any(_has_number(part) for part in structure)
    return False
