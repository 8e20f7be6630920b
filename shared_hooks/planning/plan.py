"""A plan: the result of recording a model on one input signature. Layers, frontiers, cuts, and a digest to agree on."""

from __future__ import annotations

import hashlib
import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import starmap
from typing import Any, NamedTuple, SupportsIndex, overload

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks.crossing import Crossing
from shared_hooks.errors import CutRefused, UnknownLayer, near_path
from shared_hooks.modules import GROUP, INPUT, ROOT, ModuleInfo, call_name, call_parts
from shared_hooks.modules.tables import grouped
from shared_hooks.planning.cutting import (
    Branch,
    Capture,
    Cutting,
    Frontier,
    Liveness,
    blocks,
    branch_of,
    crossing_of,
    cut_after,
    frontier_bytes,
)
from shared_hooks.recording import ModuleCall, Op, Storage, Trace, Value
from shared_hooks.recording.ledger import put_off
from shared_hooks.showing import Bar, bars, folded, html_table, panel, short, size, summary_of, text_table
from shared_hooks.tensors import LiveSet, UnknownHolder, View, flatten

# The layers of a plan: what each is, what crosses after it, whether a cut is possible there; shown as a table.

_HEADS = ("id", "name", "type", "output", "crosses", "cut")
_NUMBERS = (0, 3, 4)
_WIDTHS = (5, 26, 16, 10, 10, 3)
_FIRST, _LAST = 12, 8
"""The rows of a terminal's table, limited to `showing.MOST` characters."""


@short
@dataclass(frozen=True)
class LayerInfo:
    """One layer call. Sizes in bytes, raw; ``frontier_bytes`` crosses if the model is cut after it.

    A plan's own are created without what is costly (what crosses, whether a cut is possible and why not), which is
    computed on access.
    """

    layer_id: int
    name: str
    layer_type: str
    output_bytes: int
    frontier_bytes: int
    can_split: bool
    # no default on the class, which would be found before `__getattr__` is called
    reason: str = field(default_factory=str)
    is_block: bool = False
    """Whether it is a block that ends at a place of its own; ``layer_id`` is then that of its last layer."""

    @classmethod
    def on_demand(
        cls,
        number: int,
        call: ModuleCall,
        crossing: Callable[[], int],
        refusal: Callable[[], str],
        *,
        is_block: bool = False,
    ) -> LayerInfo:
        """Return the layer of a call; ``crossing`` and ``refusal`` return the bytes and the reason (or "") of a cut."""
        made = object.__new__(cls)
        known = {"layer_id": number, "name": call.name, "layer_type": call.module_type, "is_block": is_block}
        vars(made).update(known, output_bytes=call.output_bytes, _later=(crossing, refusal))
        return made

    def __getattr__(self, name: str) -> Any:
        later = vars(self).get("_later")
        if later is None or name not in ("frontier_bytes", "can_split", "reason"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        crossing, refusal = later
        if name == "frontier_bytes":
            vars(self)[name] = crossing()
        else:
            reason = refusal()
            vars(self).update(reason=reason, can_split=not reason)
        return vars(self)[name]

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))


class PlanLayers(tuple[LayerInfo, ...]):
    """Layers in the order of execution: a tuple that is displayed as a table."""

    __slots__ = ()

    @overload
    def __getitem__(self, which: SupportsIndex) -> LayerInfo: ...
    @overload
    def __getitem__(self, which: slice) -> PlanLayers: ...
    def __getitem__(self, which: SupportsIndex | slice) -> LayerInfo | PlanLayers:
        found = super().__getitem__(which)
        return found if isinstance(found, LayerInfo) else PlanLayers(found)

    def __repr__(self) -> str:
        above, between, below = folded(self, _FIRST, _LAST)
        rows = [*map(_row, above), *([("", f"({between} more)", "", "", "", "")] if between else []), *map(_row, below)]
        # 80 columns; the reason of a missing cut does not fit
        narrow = [[_narrow(cell, most) for cell, most in zip(row, _WIDTHS, strict=True)] for row in rows]
        return text_table(_HEADS, narrow, _NUMBERS) if self else "Layers()"

    def _repr_html_(self) -> str:
        cuts = sum(layer.can_split for layer in self)
        title = f"{len(self)} layers, {cuts} of them can be cut after"
        reported = [
            Bar(one.frontier_bytes, f"{one.layer_id} {one.name}: {size(one.frontier_bytes)}", faint=not one.can_split)
            for one in self
        ]
        most = max((layer.frontier_bytes for layer in self), default=0)
        label = f"bytes that cross after each layer, at most {size(most)}; pale: no cut there"
        return panel(title, bars(reported, label), html_table(_HEADS, [_row(layer) for layer in self], _NUMBERS))


def _row(layer: LayerInfo) -> tuple[str, ...]:
    cut = "yes" if layer.can_split else f"no: {layer.reason}"
    sizes = size(layer.output_bytes), size(layer.frontier_bytes)
    return "" if layer.is_block else str(layer.layer_id), layer.name, layer.layer_type, *sizes, cut


def _narrow(text: str, most: int) -> str:
    if text.startswith("no: "):
        return "no"
    return text if len(text) <= most else f"…{text[1 - most :]}" if "." in text else f"{text[: most - 1]}…"


# Follows a run along the plan's path, where Python reads data and may take another one.
#
# Names of operations are not enough: a number read from data may choose which of two tensors an operation takes,
# where a slice begins, what a module returns. So every argument and result is compared with the plan: the same place
# in the same storage, storages being identified by the order in which they appear.


def form_of_result(structure: Any) -> Any:
    """Return a structure without its numbers: modules that return those are never skipped, and each input has
    others.
    """
    if isinstance(structure, list):
        if len(structure) == 2 and structure[0] == "v" and not (structure[1] is None or isinstance(structure[1], str)):
            return ["v"]
        return [form_of_result(part) for part in structure]
    return structure


def footprint(value: Value) -> tuple[Any, ...]:
    """Return where a value of the plan lies, comparable between two plans."""
    if value.storage.outside:
        return ("outside", value.shape)
    return (value.storage.index, value.storage.elements, value.view)


class Follower:
    """Compares one run, step by step, with a trace. Each method returns whether the run is still on the path."""

    def __init__(self, trace: Trace, inputs: list[torch.Tensor]) -> None:
        self.storages: dict[int, Storage] = {}
        self.bases: dict[int, int] = {}
        self.keys: dict[Storage, int] = {}
        # an address must not be reused while it identifies a storage
        self.alive: list[StorageWeakRef] = []
        for tensor, value in zip(inputs, trace.inputs, strict=True):
            if not value.storage.opaque:
                self.bases[tensor.untyped_storage()._cdata] = int(tensor.storage_offset()) - value.view.offset
                self._same(tensor, value)

    @classmethod
    def of_storages(cls, slots: Mapping[Storage, torch.Tensor]) -> Follower:
        """Return a follower of a run that begins in the middle: flat tensors with the storages of what came before."""
        made = cls.__new__(cls)
        made.storages, made.bases, made.keys, made.alive = {}, {}, {}, []
        for storage, slot in slots.items():
            untyped = slot.untyped_storage()
            made.storages[untyped._cdata], made.keys[storage] = storage, untyped._cdata
            made.bases[untyped._cdata] = int(slot.storage_offset())
            made.alive.append(StorageWeakRef(untyped))
        return made

    def operation(self, op: Op, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Compare one torch function."""
        if len(arguments) != len(op.args) or len(results) != len(op.results):
            return False
        # an argument that changed its shape in place is seen as it is afterwards
        return (op.reshapes or all(map(self._same, arguments, op.args))) and all(map(self._same, results, op.results))

    def call(self, call: ModuleCall, output: Any) -> bool:
        """Compare the result of one module."""
        try:
            structure, tensors = flatten(output, plain=True)
        except UnknownHolder:
            return call.structure is None
        if call.structure is None or form_of_result(structure) != form_of_result(call.structure):
            return False
        return all(map(self._same, tensors, call.results))

    def _same(self, tensor: torch.Tensor, value: Value) -> bool:
        storage = value.storage
        if storage.outside or storage.opaque:
            return tuple(tensor.shape) == value.shape
        try:
            untyped = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return False
        key = untyped._cdata
        if key not in self.storages:
            if storage in self.keys:
                return False
            self.storages[key] = storage
            self.keys[storage] = key
            self.alive.append(StorageWeakRef(untyped))
        return self.storages[key] is storage and View.of(tensor, self.bases.get(key, 0)) == value.view


# The part of a cut that is final early: nothing writes there any more, so it may be sent while the head runs.

Call = tuple[str, int]
"""(path of a module, number of its call)."""


def finals(trace: Trace, cutting: Cutting) -> Mapping[Call | None, tuple[int, ...]]:
    """Return, by the call after which they are final, slots that are final before the cut; None: inputs that stay
    unchanged.

    This is what the plan has seen: code that relies on it must detect a run that differs.
    """
    number_of = {storage: slot for slot, storage in enumerate(cutting.storages)}
    last = {slot: _captured(trace, capture) for slot, capture in enumerate(cutting.captures)}
    for event in trace.events:
        if event.seq < cutting.position:
            for storage in (*event.writes, *(storage for storage, _ in event.overwrites)):
                if (slot := number_of.get(storage)) is not None:
                    last[slot] = max(last[slot], event.seq)
    calls = sorted((call.exit, call.path, call.number) for call in trace.calls if call.exit < cutting.position)
    found: dict[Call | None, tuple[int, ...]] = {}
    for slot, capture in enumerate(cutting.captures):
        if capture.kind == "nothing":
            continue
        key: Call | None = None
        if last[slot] >= 0:
            at = bisect_left(calls, last[slot], key=lambda call: call[0])
            if at == len(calls):
                continue
            key = calls[at][1:]
        found[key] = (*found.get(key, ()), slot)
    return found


def _captured(trace: Trace, capture: Capture) -> int:
    """Return the seq at which a head has captured it."""
    if capture.kind == "result":
        return next(call.exit for call in trace.calls if (call.path, call.number) == capture.where)
    if capture.kind == "op":
        op: Op = trace.ops[capture.where]
        return op.end
    if capture.kind == "kernel":
        kernel: Op = trace.unseen[capture.where[1]]
        return kernel.end
    return -1


class PlanCalls(NamedTuple):
    """All module calls of a plan in the order in which they begin.

    ``ends``: how many have begun when each ends; ``names``: its path and number; ``layers``: its layer's id, None if it
    is none.
    """

    modules: list[nn.Module]
    ends: list[int]
    names: list[Call]
    layers: list[int | None]


def calls_of(trace: Trace, modules: Mapping[nn.Module, ModuleInfo]) -> PlanCalls | None:
    """Return the calls of a trace; None if a module is not hooked here."""
    calls = sorted(trace.calls, key=lambda call: call.enter)
    begins = [call.enter for call in calls]
    of = {info.path: module for module, info in modules.items()}
    if not all(call.path in of for call in calls):
        return None
    return PlanCalls(
        [of[call.path] for call in calls],
        [bisect_left(begins, call.exit) for call in calls],
        [(call.path, call.number) for call in calls],
        [call.layer_id for call in calls],
    )


class HeadWalk(NamedTuple):
    """A head's way to one cut, if only results of modules are captured.

    ``calls``: shared by all cuts; ``captures``: what slots take of a call's result, by its index; ``last``: the index
    of the call that the cut is after.
    """

    calls: PlanCalls
    captures: dict[int, list[tuple[int, Capture]]]
    last: int


def walk(trace: Trace, cutting: Cutting, layer: ModuleCall, calls: PlanCalls) -> HeadWalk | None:
    """Return the walk to the cut after ``layer``; None if operations must be counted or compared, too."""
    if cutting.watched or cutting.below or any(seq < cutting.position for seq in trace.dynamic):
        return None
    captures: dict[int, list[tuple[int, Capture]]] = {}
    for slot, capture in enumerate(cutting.captures):
        if capture.kind == "result":
            if capture.where not in calls.names:
                return None
            captures.setdefault(calls.names.index(capture.where), []).append((slot, capture))
    return HeadWalk(calls, captures, calls.names.index((layer.path, layer.number)))


Cut = int | str | tuple[int | str, ...] | list[int | str]
"""A layer's id, the name of a layer or block, or "input"; several, or "a + b", are a branch cut (`planning.cutting`),
and so is a group of modules, "group:vision" (`modules.tables`).
"""


class CutNumber(int):
    """A cut by its number in one plan's `Trace.places`: layers by id, then blocks; -1 is ``"input"``."""


MOST_SETS = 256
"""The number of branch cuts that a plan keeps."""
TOGETHER = " + "
"""Joins the names of a branch cut in a single text."""


def members(cut: Any) -> tuple[int | str, ...] | None:
    """Return the calls that a cut along branches is after; None for a plain cut."""
    if isinstance(cut, (tuple, list)):
        return tuple(cut)
    if isinstance(cut, str) and (TOGETHER in cut or cut.startswith(GROUP)):
        return tuple(cut.split(TOGETHER))
    return None


class PlanKnown:
    """What a plan has computed for the known paths. It is replaced completely when another one is added, so that a
    concurrent thread keeps nothing computed for fewer paths.
    """

    def __init__(self) -> None:
        self.cuttings: dict[tuple[int, bool], tuple[Cutting, Crossing] | CutRefused] = {}
        self.layers: PlanLayers | None = None
        self.blocks: PlanLayers | None = None
        self.nbytes: dict[int, int] = {}  # of frontiers, by cut
        self.finals: dict[int, tuple[Cutting, Mapping[Call | None, tuple[int, ...]]]] = {}
        self.walks: dict[int, tuple[Cutting, HeadWalk | None]] = {}
        self.made: dict[int, tuple[Cutting, Any]] = {}
        self.branches: dict[tuple[tuple[int | str, ...], bool], tuple[Cutting, Crossing] | CutRefused] = {}


@dataclass(eq=False)
class Plan:
    """One path through the model.

    ``siblings``: the plans of other paths for inputs of this signature; ``leaves``: names of Python state that a run
    leaves changed, without effect on later runs.
    """

    trace: Trace
    signature: str
    depth: int | None
    context: dict[str, Any]
    aliases: dict[str, str]
    siblings: list[Plan] = field(default_factory=list)
    leaves: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        with put_off():
            self._work_out()

    def __repr__(self) -> str:
        others = f"{len(self.siblings)} paths known" if len(self.siblings) > 1 else ""
        return summary_of(self, f"{len(self.paths)} layers", *self._ends(), others, f"digest {self.digest[:12]}")

    def _ends(self) -> list[str]:
        calls = self.trace.layers
        return [f"{calls[0].name} to {calls[-1].name}"] if calls else []

    def _repr_html_(self) -> str:
        return self.layers._repr_html_()

    def _work_out(self) -> None:
        self._known = PlanKnown()
        self._module_calls: tuple[PlanCalls | None] | None = None
        self._refused: dict[int | tuple[str, ...], str] = {}
        self.names = [op.name for op in self.trace.ops]
        self.calls = {(call.path, call.number): call for call in self.trace.calls}
        self.paths = [call.path for call in self.trace.layers]
        self.digest = self._digest()

    @cached_property
    def liveness(self) -> Liveness:
        """What is alive where."""
        with put_off():
            return Liveness(self.trace)

    @cached_property
    def forms(self) -> list[list[Any]]:
        """Where the arguments and results of every operation lie."""
        return [[footprint(value) for value in (*op.args, *op.results)] for op in self.trace.ops]

    def _digest(self) -> str:
        """Return the digest of operations and their literals, layers, shapes and dtypes.

        Without strides and devices, which may differ between the sides; and, if Python reads data, without fractions
        among the literals: they may come from the data, and kernels of other devices round them differently.
        """
        trace = self.trace
        literals = [_without_fractions(op.literals) if trace.dynamic else op.literals for op in trace.ops]
        layers = [[call.name, call.module_type, [trace.signature_of(v) for v in call.results]] for call in trace.layers]
        text = json.dumps([self.signature, self.names, literals, layers], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    # -- cuts ---------------------------------------------------------------------------------------------------

    def layer_id(self, cut: Cut) -> int:
        """Return the id of the last layer before a cut; -1 for ``"input"``. Raises `UnknownLayer`."""
        number = self.place(cut)
        if number < len(self.paths):
            return number
        end = self.trace.places.calls[number].exit
        return sum(layer.exit < end for layer in self.trace.layers) - 1

    def place_at(self, layer_id: int, name: str) -> CutNumber:
        """Return the place of a cut as a `Crossing` describes it. Raises `UnknownLayer` if this plan has no
        such cut.
        """
        if layer_id < 0:
            return CutNumber(-1)
        layers, places = self.trace.layers, self.trace.places
        if layer_id >= len(layers):
            raise UnknownLayer(f"no layer {layer_id}: this model ran layers 0 to {len(layers) - 1}")
        if layers[layer_id].name == name:
            return CutNumber(layer_id)
        number = places.numbers.get(name, -1)
        if number < len(layers) or self.layer_id(CutNumber(number)) != layer_id:
            raise UnknownLayer(
                f'layer {layer_id} is "{layers[layer_id].name}" here, and "{name}" does not end behind it'
            )
        return CutNumber(number)

    def cut_at(self, layer_id: int, name: str) -> Cut:
        """Return the same as any plan accepts it: a layer's id, or a block's name. Raises `UnknownLayer`."""
        number = self.place_at(layer_id, name)
        return name if number >= len(self.paths) else int(number) if number >= 0 else INPUT

    def place(self, cut: Cut) -> CutNumber:
        """Return the place of a cut given by a layer's id, or the name of a layer or block. Raises `UnknownLayer` with
        similar names.
        """
        if isinstance(cut, CutNumber):
            return cut
        return CutNumber(self._number(cut))

    def _number(self, cut: Cut) -> int:
        count, names = len(self.paths), self.trace.places.numbers
        if isinstance(cut, bool) or not isinstance(cut, (int, str)):
            raise UnknownLayer(f"a cut is a layer id, a layer name or {INPUT!r}, not {cut!r:.60}")
        if isinstance(cut, int):
            if -1 <= cut < count:
                return cut
            raise UnknownLayer(f"no layer {cut}: this model ran layers 0 to {count - 1}")
        if cut == INPUT:
            return -1
        if cut in names:
            return names[cut]
        path, call = call_parts(cut)
        alias = call_name(self.aliases.get(path, path), call)
        if alias in names:
            return names[alias]
        if cut.isdecimal():
            return self._number(int(cut))
        for block in (cut, alias):
            if (last := self._last_in(block)) is not None:
                return last
        raise UnknownLayer(f"no layer {cut!r} ran in this model.{near_path(cut, [*names, *blocks(names), INPUT])}")

    def _last_in(self, block: str) -> int | None:
        """Return the last place inside a container of modules (a list of blocks, say), or the one that a name with "…"
        matches; None if there is none, or several.
        """
        calls, names = self.trace.places
        before, shortened, after = block.partition("…")
        if shortened:
            fits = {number for name, number in names.items() if name.startswith(before) and name.endswith(after)}
            layers = {number for number in fits if number < len(self.paths)}
            return next(iter(layers or fits)) if len(layers or fits) == 1 else None
        inside = [number for name, number in names.items() if name.startswith(f"{block}.")]
        return max(inside, key=lambda number: calls[number].exit, default=None)

    def resolve(self, cut: Cut) -> LayerInfo | None:
        """Return the layer or block of a cut, None for ``"input"``. A branch cut is a layer of type "set" with the
        bytes that cross it.
        """
        if (along := self._members(cut)) is not None:
            return self._set(along)
        number = self.place(cut)
        if number < len(self.paths):
            return None if number < 0 else self.layers[number]
        return self.blocks[number - len(self.paths)]

    def _set(self, cuts: tuple[int | str, ...]) -> LayerInfo:
        end = self.layer_id(self._end(self._places(cuts)))
        try:
            crossing = self._branch(cuts, wide=False)[1]
        except CutRefused as error:
            return LayerInfo(end, TOGETHER.join(map(str, cuts)), "set", 0, 0, False, str(error))
        return LayerInfo(end, crossing.name, "set", 0, crossing.payload_bytes, True)

    def frontier_bytes(self, cut: Cut) -> int:
        """Return the raw bytes that cross at a cut."""
        if self._members(cut) is not None:
            return self.cutting(cut)[1].payload_bytes
        number, known = self.place(cut), self._known.nbytes
        found = known.get(number)
        if found is None:
            found = known[number] = frontier_bytes(self._merged(number))
        return found

    def cutting(self, cut: Cut, *, wide: bool = False) -> tuple[Cutting, Crossing]:
        """Return what head and tail do for a cut. Raises `CutRefused` with the layer's name and the reason.

        ``wide``: for a run that read other values from its data than the plan. They may decide which part of a tensor
        the tail reads or writes, so storages cross completely and the tail works on copies.
        """
        if (along := self._members(cut)) is not None:
            return self._branch(along, wide)
        number = self.place(cut)
        if number in self._refused:
            raise self._refusal(number, self._refused[number])
        known = self._known
        found = known.cuttings.get((number, wide))
        if found is None:
            try:
                found = self._cut(number, wide)
            except CutRefused as error:
                found = self._refusal(number, str(error))
            known.cuttings[number, wide] = found
        if isinstance(found, CutRefused):
            raise found
        return found

    def _branch(self, cuts: Sequence[Any], wide: bool) -> tuple[Cutting, Crossing]:
        """Return the cut after these calls and everything that they need."""
        for cut in cuts:
            if not isinstance(cut, (int, str)):
                self.place(cut)  # raises if there is none
        key = tuple(cuts), wide
        found = self._known.branches.get(key)
        if found is None:
            end = self._end(self._places(cuts))
            if end < 0:
                return self.cutting(end, wide=wide)
            calls = self._calls(cuts)
            try:
                found = self._cut_along(calls, end, wide)
            except CutRefused as error:
                found = CutRefused(f"cannot cut after {' and '.join(call.name for call in calls)}: {error}")
            if len(self._known.branches) >= MOST_SETS:  # clients of a server may name any
                self._known.branches.clear()
            self._known.branches[key] = found
        if isinstance(found, CutRefused):
            raise CutRefused(str(found))
        return found

    def _calls(self, cuts: Sequence[int | str]) -> list[ModuleCall]:
        found = set(starmap(self._call_of, self._places(cuts)))
        return sorted(found, key=lambda call: (call.exit, -call.enter))

    def _names(self, cuts: Sequence[int | str]) -> tuple[str, ...]:
        return tuple(call.name for call in self._calls(cuts))

    def _members(self, cut: Cut) -> tuple[int | str, ...] | None:
        return None if isinstance(cut, str) and cut in self.trace.places.numbers else members(cut)

    def _places(self, cuts: Sequence[int | str]) -> list[tuple[CutNumber, int | str]]:
        """Return the places of these calls, and their given names; without the input."""
        named = [one for cut in cuts for one in self._in_group(cut)]
        return [(place, cut) for cut in named if (place := self.place(cut)) >= 0]

    def _end(self, placed: Sequence[tuple[CutNumber, int | str]]) -> CutNumber:
        return max((place for place, _ in placed), key=self._position, default=CutNumber(-1))

    def _in_group(self, cut: int | str) -> Sequence[int | str]:
        """Return the calls that "group:vision" stands for: the outermost ones of its modules. Raises `UnknownLayer`."""
        if not isinstance(cut, str) or not cut.startswith(GROUP):
            return (cut,)
        calls = self.trace.calls
        groups, inside = self._groups, self._groups.get(cut.removeprefix(GROUP), {})
        found = [call.name for call in calls if call.path in inside and not self._is_in(call.parent, inside)]
        if not found:
            raise UnknownLayer(
                f'no module of "{cut:.80}" ran; the groups of this model are: {", ".join(groups) or "none"}'
            )
        return found

    @cached_property
    def _groups(self) -> dict[str, dict[str, str]]:
        calls = sorted(self.trace.calls, key=lambda call: call.enter)
        return grouped((call.path, call.module_type) for call in calls)

    @staticmethod
    def _is_in(call: ModuleCall | None, paths: Collection[str]) -> bool:
        while call is not None and call.path not in paths:
            call = call.parent
        return call is not None

    def _call_of(self, number: int, cut: int | str) -> ModuleCall:
        """Return the call that a cut is after; for a block that ends where its last layer does, the block's own."""
        known = self.trace.places.calls[number]
        if not isinstance(cut, str) or cut == known.name:
            return known
        path, count = call_parts(cut)
        named = call_name(self.aliases.get(path, path), count)
        return next((call for call in self.trace.calls if call.name == named), known)

    def _cut_along(self, calls: list[ModuleCall], end: int, wide: bool) -> tuple[Cutting, Crossing]:
        branch = branch_of(self.trace, calls, self.trace.places.calls[end])
        if branch is None:
            return self.cutting(CutNumber(end), wide=wide)
        for known in (end, tuple(call.name for call in calls)):
            if known in self._refused:
                raise CutRefused(self._refused[known])
        if any(seq < branch.end.exit for seq in self.trace.dynamic):
            raise CutRefused("data decide on the path before its end, and branches are cut on one path alone")
        frontier = Liveness(self.trace, branch).across_branch()
        for sibling in self.siblings:
            if sibling is not self and self._shares_prefix(sibling, end):
                self._join(frontier, sibling._across_branch(branch))
        if wide:
            frontier = {storage: LiveSet.full(storage.elements) for storage in frontier}
        frontier = dict(sorted(frontier.items(), key=lambda entry: entry[0].index))
        cutting = cut_after(self.trace, branch.end, frontier, wide=wide, branch=branch)
        return cutting, crossing_of(
            cutting,
            self.trace,
            self.layer_id(CutNumber(end)),
            branch.end.name,
            self.depth,
            self.context,
            self.trace.path_digests[branch.end.exit],
            self.digest,
            tuple(sorted(self.leaves)),
            tuple(call.name for call in calls),
        )

    def _across_branch(self, other: Branch) -> Frontier:
        """Return what this path reads behind another path's branch cut. Raises CutRefused if it is none here."""
        calls = [call for name in (call.name for call in other.ends) for call in self.trace.calls if call.name == name]
        ends = [call for call in self.trace.calls if call.name == other.end.name]
        branch = branch_of(self.trace, calls, ends[0]) if ends else None
        if branch is None or branch.places != other.places:
            raise CutRefused("data decide on the path, and on another one other operations would be left to the tail")
        return Liveness(self.trace, branch).across_branch()

    def finals(self, cutting: Cutting) -> Mapping[Call | None, tuple[int, ...]]:
        """Return the slots of one of its cuts that are final before it (`finals`)."""
        known = self._known.finals
        found = known.get(id(cutting))
        if found is None:
            found = known[id(cutting)] = cutting, finals(self.trace, cutting)  # kept with it: the id stays its own
        return found[1]

    def kept_for(self, cutting: Cutting, make: Callable[[Plan, Cutting], Any]) -> Any:
        """Return the result of ``make`` for one of its cuts, cached."""
        known = self._known.made
        found = known.get(id(cutting))
        if found is None:
            found = known[id(cutting)] = cutting, make(self, cutting)
        return found[1]

    def walk(self, cutting: Cutting, cut: Cut, modules: Mapping[nn.Module, ModuleInfo]) -> HeadWalk | None:
        """Return what a head to this cut, of this cutting, compares; None if that is more than calls."""
        known = self._known.walks
        found = known.get(id(cutting))
        if found is None:
            if self._module_calls is None:
                self._module_calls = (calls_of(self.trace, modules),)
            (calls,) = self._module_calls
            call = self.trace.places.calls[self.place(cut)]
            found = cutting, None if calls is None else walk(self.trace, cutting, call, calls)
            known[id(cutting)] = found
        return found[1]

    def forget_walk(self, cutting: Cutting) -> None:
        """A head has left the walk, though perhaps not the plan's path."""
        self._known.walks[id(cutting)] = cutting, None

    def _refusal(self, number: int, reason: str) -> CutRefused:
        if number < 0:
            name = INPUT
        else:
            kind = f"layer {number}" if number < len(self.paths) else "block"
            name = f"{kind} ({self.trace.places.calls[number].name})"
        return CutRefused(f"cannot cut after {name}: {reason}")

    def refuse(self, cut: Cut, reason: str) -> None:
        """Refuse a cut from now on: ``verify`` found it wrong."""
        along = self._members(cut)
        self._refused[self.place(cut) if along is None else self._names(along)] = reason
        self._known = PlanKnown()

    def forget_cuts(self) -> None:
        """Called when another path became known: more may have to cross."""
        self._known = PlanKnown()

    def _cut(self, number: int, wide: bool) -> tuple[Cutting, Crossing]:
        layer = None if number < 0 else self.trace.places.calls[number]
        frontier = self._merged(number)
        if wide:
            frontier = {storage: LiveSet.full(storage.elements) for storage in frontier}
        cutting = cut_after(self.trace, layer, frontier, wide=wide)
        name = INPUT if layer is None else layer.name
        path = "" if layer is None else self.trace.path_digests[layer.exit]
        leaves = tuple(sorted(self.leaves.union(*(one.leaves for one in self.siblings))))
        return cutting, crossing_of(
            cutting,
            self.trace,
            self.layer_id(CutNumber(number)),
            name,
            self.depth,
            self.context,
            path,
            self.digest,
            leaves,
        )

    def _merged(self, number: int) -> Frontier:
        """Return the frontier of a cut, with what the other known paths that share this prefix read after it."""
        merged = self.liveness.at(self._position(number))
        for frontier in self._of_siblings(number):
            self._join(merged, frontier)
        return dict(sorted(merged.items(), key=lambda entry: entry[0].index))

    def _join(self, merged: Frontier, other: Frontier) -> None:
        """Add what another path reads of storages that this one has, too."""
        own = {storage.index: storage for storage in (*merged, *self._storages())}
        for storage, live in other.items():
            mine = own.get(storage.index)
            if mine is not None:
                merged[mine] = merged[mine].join(live) if mine in merged else live

    def of_siblings(self, cut: Cut) -> list[Frontier]:
        """Return what the other known paths that share the prefix of a cut read after it."""
        return self._of_siblings(self.place(cut))

    def _of_siblings(self, number: int) -> list[Frontier]:
        siblings = [one for one in self.siblings if one is not self and self._shares_prefix(one, number)]
        position = self._position(number)
        return [sibling.liveness.at(position) for sibling in siblings]

    def position(self, cut: Cut) -> int:
        """Return the seq of a cut; of a branch cut, that of its end."""
        if (along := self._members(cut)) is not None:
            return self._position(self._end(self._places(along)))
        return self._position(self.place(cut))

    def _position(self, number: int) -> int:
        return 0 if number < 0 else self.trace.places.calls[number].exit

    def _storages(self) -> list[Any]:
        found = {value.storage for value in self.trace.inputs}
        for op in self.trace.ops:
            found.update(value.storage for value in op.results)
        for call in self.trace.layers:
            found.update(value.storage for value in call.results)
        return list(found)

    def _shares_prefix(self, other: Plan, number: int) -> bool:
        if number < 0:
            return True
        mine = self.trace.places.calls[number]
        theirs = other.calls.get((mine.path, mine.number))
        if theirs is None or mine.exit != theirs.exit:
            return False
        count = sum(op.seq < mine.exit for op in self.trace.ops)
        last = self.layer_id(CutNumber(number))
        same_calls = self.paths[: last + 1] == other.paths[: last + 1]
        return same_calls and self.names[:count] == other.names[:count] and self.forms[:count] == other.forms[:count]

    @property
    def path(self) -> tuple[Any, ...]:
        """Identifies a path through the model."""
        returned = [
            (call.name, form_of_result(call.structure), [footprint(value) for value in call.results])
            for call in self.trace.calls
        ]
        return self.digest, self.names, self.forms, self.paths, returned

    # -- layers -------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> PlanLayers:
        """Every layer call in execution order. The list is created quickly; see `LayerInfo`."""
        known = self._known
        layers = known.layers
        if layers is None:
            layers = known.layers = PlanLayers(
                LayerInfo.on_demand(
                    number, call, partial(self.frontier_bytes, number), partial(self._refused_because, number)
                )
                for number, call in enumerate(self.trace.layers)
            )
        return layers

    @property
    def blocks(self) -> PlanLayers:
        """Every call of a block with something running behind its last layer, as a place for a cut, in that order;
        ``layer_id`` is that of its last layer.
        """
        known = self._known
        found = known.blocks
        if found is None:
            found = known.blocks = PlanLayers(
                LayerInfo.on_demand(
                    self.layer_id(CutNumber(number)),
                    call,
                    partial(self.frontier_bytes, CutNumber(number)),
                    partial(self._refused_because, CutNumber(number)),
                    is_block=True,
                )
                for number, call in enumerate(self.trace.places.calls)
                if number >= len(self.paths)
            )
        return found

    @property
    def cuts(self) -> PlanLayers:
        """Every place for a cut except the one before the first layer: layers and blocks, in execution order."""
        both = [*enumerate(self.layers), *enumerate(self.blocks, len(self.paths))]
        return PlanLayers(info for _, info in sorted(both, key=lambda one: self._position(one[0])))

    def within(self, depth: int | None) -> PlanLayers:
        """Return those of `cuts` that are an end of a module at most ``depth`` levels below the model; None: all."""
        if depth is None:
            return self.cuts
        names = self.trace.places.numbers
        shown = {number for name, number in names.items() if name.count(".") < depth}
        return PlanLayers(info for info in self.cuts if names[info.name] in shown)

    def parameters_between(self, first: Cut, last: Cut | None, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of ``model`` that a run from the cut ``first`` to ``last`` (None: to the end) may read:
        the arguments of its operations, and those of every module that it enters, or leaves. Raises `UnknownLayer`.
        """
        if last is not None and self.place(last) < 0:
            return []
        trace, begin = self.trace, self.position(first)
        end = sys.maxsize if last is None else self.position(last)
        touched = {value.storage for op in trace.ops if begin < op.seq <= end for value in op.args}
        for event in trace.events:
            if begin < event.seq <= end:
                touched.update(storage for storage, _ in (*event.reads, *event.overwrites))
                touched.update(event.writes, event.passed_out)
        entered: set[int] = set()
        for call in trace.calls:
            if call.enter <= end and call.exit > begin:
                # the modules that run inside an opaque call are unknown
                module = model if call.path == ROOT else model.get_submodule(call.path)
                entered.update(map(id, module.parameters(recurse=call.opaque or not call.has_child)))
        return [
            parameter
            for parameter, storage in zip(model.parameters(), trace.weights, strict=True)
            if storage in touched or id(parameter) in entered
        ]

    def _refused_because(self, cut: Cut) -> str:
        """Return why there is no cut; "" if there is one."""
        try:
            self.cutting(cut)
        except CutRefused as error:
            return str(error).partition(": ")[2]
        return ""


def _without_fractions(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_fractions(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_fractions(item) for key, item in value.items()}
    return "fraction" if isinstance(value, float) else value
