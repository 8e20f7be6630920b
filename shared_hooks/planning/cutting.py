"""Turn a trace and a frontier into what both sides need for one cut: the `Crossing` that the tail's side reads, and
the captures of the head.

A model runs its calls in one order, and a plain cut divides that order at one place. A *branch cut* ends at the last
of its calls, too, but of what runs before that place it leaves to the other side what its calls do not need: `Branch`
says which operations these are. The tail runs them where the model's Python comes to them, on the real values; the
head answers them with placeholders.

What an operation needs is found by memory and not by names: which operations made its arguments, and which wrote
to their storages before. A set whose results would differ in the other order is refused: see `check`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared_hooks.crossing import (
    INPUTS,
    Crossing,
    Fill,
    Given,
    Layout,
    Mark,
    Place,
    ReadForm,
    Slot,
    TensorForm,
    mixes_truth,
)
from shared_hooks.errors import CutRefused
from shared_hooks.forward import CallKind
from shared_hooks.modules import call_parts
from shared_hooks.recording import NEVER, DataEvent, ModuleCall, Op, Storage, Trace, Value
from shared_hooks.showing import short
from shared_hooks.tensors import LiveSet, Structure, View, form_of

Item = Op | ModuleCall
"""An operation, or the call of a scripted or compiled module, whose inside is unknown."""


@short
@dataclass(frozen=True, eq=False)
class Branch:
    """Which calls and operations run before a cut along branches.

    ``ends``: the calls that it is after, ``end``: the last of them, where the cut is; ``later``: the operations before
    it that run behind it; ``calls``: the outermost calls that contain nothing else; ``places``: of these calls, and of
    operations outside of them.
    """

    ends: tuple[ModuleCall, ...]
    end: ModuleCall
    later: frozenset[Op]
    calls: tuple[ModuleCall, ...]
    places: tuple[Place, ...]
    seqs: tuple[tuple[int, int], ...] = field(repr=False)
    """When ``later`` runs, in order: (first, last)."""

    def is_later(self, seq: int) -> bool:
        """Return whether what happens at this seq happens behind the cut."""
        at = bisect_right(self.seqs, (seq, 1 << 62)) - 1
        return seq > self.end.exit or (at >= 0 and self.seqs[at][0] <= seq <= self.seqs[at][1])

    def makes(self, value: Value) -> bool:
        """Return whether a value from before the end is created behind the cut."""
        return value.made >= 0 and self.is_later(value.made)


def branch_of(trace: Trace, ends: Sequence[ModuleCall], end: ModuleCall) -> Branch | None:
    """Return the cut after all of these calls and what they need, whose place is after ``end``; None if that is the
    plain cut there.

    Raises CutRefused for what cannot run in another order.
    """
    placed = [(call, number, item) for call, number, item in trace.placed if _begins(item) < end.exit]
    own = _needed(trace, placed, ends)
    later = [
        item for _, _, item in placed if isinstance(item, Op) and item.counts and item not in own and not item.hidden
    ]
    hidden = [item for _, _, item in placed if isinstance(item, Op) and item.counts and item.hidden and item not in own]
    opaque = [
        item
        for _, _, item in placed
        if isinstance(item, ModuleCall) and item.opaque and item.args_tainted and item not in own
    ]
    if not later and not hidden and not opaque:
        return None
    if opaque:
        raise CutRefused(f"{opaque[0].name}, scripted or compiled, would run behind the cut, and begins before its end")
    if hidden:
        raise CutRefused(f"{hidden[0].name} would run behind the cut, where torch functions are not seen")
    seqs = tuple(sorted((op.seq, max(op.seq, op.end)) for op in later))
    calls, places = _outermost(placed, frozenset(later), end)
    branch = Branch(tuple(ends), end, frozenset(later), calls, places, seqs)
    _check(trace, branch, own)
    return branch


def _begins(item: Item) -> int:
    return item.enter if isinstance(item, ModuleCall) else item.seq


def _needed(trace: Trace, placed: Sequence[tuple[ModuleCall, int, Item]], ends: Sequence[ModuleCall]) -> set[Item]:
    """Return what runs before the cut: everything in ``ends`` that depends on the inputs, and what that needs."""
    events = sorted(trace.events, key=lambda event: event.seq)
    seqs = [event.seq for event in events]
    values: set[Value] = set()
    storages: set[Storage] = set()
    own: set[Item] = set()
    for end in ends:
        values.update(end.results)
    for _, _, item in reversed(placed):
        if isinstance(item, ModuleCall):
            if not item.opaque or not item.args_tainted:
                continue
            first, last = item.enter, item.exit
        else:
            if not item.counts:
                continue
            first, last = item.seq, max(item.seq, item.end)
        inside = any(end.enter < first and last <= end.exit for end in ends)
        done = events[bisect_right(seqs, first - 1) : bisect_right(seqs, last)]
        if not inside and not _makes(item, done, first, last, values, storages):
            continue
        own.add(item)
        values.update(item.args)
        storages.update(value.storage for value in item.args if value.hangs(first))
        for event in done:
            storages.update(storage for storage, _ in event.reads if storage.tainted <= first)
    return own


def _makes(
    item: Item, done: Iterable[DataEvent], first: int, last: int, values: set[Value], storages: set[Storage]
) -> bool:
    """Return whether an item creates or writes any of these."""
    if any(value in values and value not in item.args for value in item.results):
        return True
    written = {storage for event in done for storage in event.writes}
    written.update(storage for event in done for storage, _ in event.overwrites)
    if isinstance(item, Op):
        written.update(item.writes)
    if written & storages:
        return True
    made = {value.storage for value in item.results}
    return any(first <= storage.created <= last for storage in made & storages)


def _outermost(
    placed: Sequence[tuple[ModuleCall, int, Item]], later: frozenset[Op], end: ModuleCall
) -> tuple[tuple[ModuleCall, ...], tuple[Place, ...]]:
    """Return the outermost calls all of whose counted operations are later, and the places of these and of all other
    later items.
    """
    counts: dict[ModuleCall, list[int]] = {}
    for call, _, item in placed:
        if isinstance(item, Op) and item.counts:
            outer: ModuleCall | None = call
            while outer is not None:
                known = counts.setdefault(outer, [0, 0])
                known[0] += 1
                known[1] += item in later
                outer = outer.parent
    # calls that continue after the end contain more than was counted
    whole = {call for call, (all_of_it, of_it) in counts.items() if all_of_it == of_it and call.exit < end.exit}
    calls: dict[ModuleCall, None] = {}
    places: dict[Place, None] = {}
    for call, number, item in placed:
        if not isinstance(item, Op) or item not in later:
            continue
        outermost, outer = None, call
        while outer is not None:
            if outer in whole:
                outermost = outer
            outer = outer.parent
        if outermost is None:
            places[Place(call.path, call.number, number)] = None
        elif outermost not in calls:
            calls[outermost] = None
            places[Place(outermost.path, outermost.number, -1)] = None
    return tuple(calls), tuple(places)


def _check(trace: Trace, branch: Branch, own: set[Item]) -> None:
    """Raise CutRefused if the order of the two sides could affect the result."""
    end, begins = branch.end.exit, branch.seqs[0][0]
    for refusal in trace.refusals:
        if refusal.first <= end and refusal.last >= begins:
            raise CutRefused(refusal.reason)
    if any(begins < seq < end for seq in trace.dynamic) or any(op.kind is CallKind.VALUE for op in branch.later):
        raise CutRefused("between the branches Python reads values from data, and may choose by them")
    if trace.foreign >= 0:
        raise CutRefused("code that torch does not see (threads, an extension) takes part, in an order of its own")
    if any(first < end and last > begins for drawn in trace.dice.values() for first, last in drawn):
        raise CutRefused("random numbers are drawn between the branches, and would be drawn in another order")
    for op in sorted(branch.later, key=lambda op: op.seq):
        if op.trouble:
            raise CutRefused(f"{op.name} cannot run behind the cut: {op.trouble}")
        if op.dynamic or op.draws or op.is_unforeseen:
            raise CutRefused(f"{op.name} would run behind the cut, and data decide on the form of what it gives")
        if any(value.storage.opaque or value.storage.foreign for value in (*op.args, *op.results)):
            raise CutRefused(f"{op.name} would run behind the cut, on a tensor that is sparse, nested or quantised")
        if op.reshapes:
            raise CutRefused(f"{op.name} would run behind the cut, and changes the shape of a tensor in place")
    _check_writes(trace, branch, own)


def _check_writes(trace: Trace, branch: Branch, own: set[Item]) -> None:
    """Raise CutRefused if the cut changes what is read: nothing before the cut may write after a read that is behind
    it, and nothing before it may use what is written behind it.
    """
    touched: dict[Storage, int] = {}
    wrote: dict[Storage, int] = {}
    for event in sorted(trace.events, key=lambda event: event.seq):
        if event.seq > branch.end.exit:
            break
        written = {*event.writes, *(storage for storage, _ in event.overwrites)}
        if branch.is_later(event.seq):
            for storage in (*written, *(storage for storage, _ in event.reads)):
                touched.setdefault(storage, event.seq)
            for storage in written:
                wrote.setdefault(storage, event.seq)
            continue
        if any(storage in touched and storage.created < touched[storage] for storage in written):
            raise CutRefused("before the cut a value is written in place that is read behind it as it was before that")
        if any(storage in wrote for storage, _ in event.reads):
            raise CutRefused("before the cut a value is read that is written in place behind it")


# Which elements of which storages are alive across each cut: the frontier.
#
# Walking back from the end of a run, a read makes elements of a storage live and an overwrite kills them. That
# happens only at the storage's own events, so each storage keeps those alone (its *story*), and the live set at a cut
# is computed on demand: the effort is that of the events after the cut, the memory that of a few sets on the way.


# Other names of a cut: a module that is no layer, because it holds layers, stands for the last of them that ran; and
# an abbreviated name as shown in tables, "…4.conv2", stands for the one layer or block that it fits.


def last_layer(block: str, ids: Mapping[str, int]) -> int | None:
    """Return the last layer inside ``block``, among ``ids`` (name -> number); None if there is none.

    With "…" it is the only layer that matches, or the only block; None if there are several.
    """
    before, shortened, after = block.partition("…")
    if shortened:
        for known in (list(ids), blocks(ids)):
            fits = [name for name in known if name.startswith(before) and name.endswith(after)]
            if fits:
                return ids.get(fits[0], last_layer(fits[0], ids)) if len(fits) == 1 else None
        return None
    inside = [number for name, number in ids.items() if name.startswith(f"{block}.")]
    return max(inside, default=None)


def blocks(names: Iterable[str]) -> list[str]:
    """Return the modules that contain these layers, in order."""
    found: dict[str, None] = {}
    for name in names:
        parts = call_parts(name)[0].split(".")
        found.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts))))
    return list(found)


Frontier = dict[Storage, LiveSet]

_STRIDE = 16
"""A set is kept every so many events of a storage, so that cuts can be computed in any order ..."""
_LIGHT = 4096
"""... if it consists of at most so many numbers."""


class Liveness:
    """The frontiers of one trace, computed lazily. Thread-safe, because cached values are only replaced."""

    def __init__(self, trace: Trace, branch: Branch | None = None) -> None:
        """``branch``: consider only what happens behind it."""
        self._trace = trace
        self._branch = branch
        stories: dict[Storage, _Story] = {}
        events = trace.events if branch is None else [event for event in trace.events if branch.is_later(event.seq)]
        for event in sorted(events, key=lambda event: event.seq):
            for storage, view in event.reads:
                if storage.created < event.seq and storage.tainted < NEVER:
                    _story(stories, storage).note(event.seq, view, read=True)
            # an operation overwrites after it has read
            for storage, view in event.overwrites:
                if storage.tainted < NEVER:
                    _story(stories, storage).note(event.seq, view, read=False)
            for storage in event.writes:
                if storage.tainted < NEVER:
                    _story(stories, storage).last_write = event.seq
        self._stories = sorted(stories.items(), key=lambda entry: entry[0].index)
        begun = [max(storage.created, storage.tainted) for storage, _ in self._stories]
        self._begun = np.array(begun, dtype=np.int64)
        self._ended = np.array([story.end for _, story in self._stories], dtype=np.int64)
        self._last_dynamic = max(trace.dynamic, default=-1)

    def at(self, cut: int) -> Frontier:
        """Return what is read after ``cut`` (a seq; 0: before anything ran) of what depends on the inputs by then.

        Values that do not depend on the inputs are omitted, because the cloud computes them itself. A storage that is
        only overwritten later must exist, too, though nothing of it is sent.
        """
        if cut == 0 and self._trace.foreign >= 0:
            # there are reads that are not recorded: the whole model on the other side gets the whole inputs
            return {value.storage: LiveSet.full(value.storage.elements) for value in self._trace.inputs}
        return dict(self._across(cut))

    def across_branch(self) -> Frontier:
        """Return what is read behind the branch cut of what depends on the inputs by then and is created before it. A
        storage that is only overwritten later must exist, too.
        """
        branch, found = self._branch, {}
        assert branch is not None
        for storage, story in self._stories:
            begun = max(storage.created, storage.tainted)
            if begun >= branch.end.exit or (begun >= 0 and branch.is_later(begun)):
                continue
            live = story.after(-1)
            if live or story.last_write >= 0:
                # the tail's reads may depend on the data: then a part is not enough to be safe
                found[storage] = LiveSet.full(storage.elements) if self._last_dynamic > branch.end.exit else live
        return found

    def _across(self, cut: int) -> Iterator[tuple[Storage, LiveSet]]:
        for number in np.flatnonzero((self._begun < cut) & (self._ended > cut)).tolist():
            storage, story = self._stories[number]
            live = story.after(cut)
            if live or story.last_write > cut:
                # the tail's reads may depend on the data: then a part is not enough to be safe
                yield storage, LiveSet.full(storage.elements) if self._last_dynamic > cut else live


def _story(stories: dict[Storage, _Story], storage: Storage) -> _Story:
    found = stories.get(storage)
    if found is None:
        found = stories[storage] = _Story(storage.elements)
    return found


class _Story:
    """The events of one storage, in order."""

    def __init__(self, elements: int) -> None:
        self.seqs: list[int] = []
        self.views: list[tuple[View, bool]] = []
        self.last_write = -1
        self._latest = (-1, LiveSet.empty(elements))
        self._empty = LiveSet.empty(elements)
        self._kept: dict[int, LiveSet] = {}

    def note(self, seq: int, view: View, *, read: bool) -> None:
        self.seqs.append(seq)
        self.views.append((view, read))

    @property
    def end(self) -> int:
        """The last seq with an event."""
        return max(self.last_write, self.seqs[-1] if self.seqs else -1)

    def after(self, cut: int) -> LiveSet:
        """Return what is live right after ``cut``."""
        wanted = bisect_right(self.seqs, cut)
        place, live = self._start(wanted)
        while place > wanted:
            place -= 1
            view, read = self.views[place]
            live = live.add(view) if read else live.remove(view)
            if place % _STRIDE == 0 and live.weight <= _LIGHT:
                self._kept[place] = live
        self._latest = (place, live)
        return live

    def _start(self, wanted: int) -> tuple[int, LiveSet]:
        """Return a seq at or after the wanted one at which the set is known."""
        place, live = self._latest
        if wanted <= place < wanted + _STRIDE:
            return place, live
        for place in range(wanted + -wanted % _STRIDE, len(self.views), _STRIDE):
            kept = self._kept.get(place)
            if kept is not None:
                return place, kept
        return len(self.views), self._empty


def frontier_bytes(frontier: Frontier) -> int:
    """Return the raw bytes that cross."""
    return sum(live.sent * storage.itemsize for storage, live in frontier.items())


@short
@dataclass(frozen=True)
class Capture:
    """Where the head finds a tensor on the storage of one slot: an input, the result of a module, an operation, or a
    kernel that belongs to no operation.

    ``view``: the tensor's view of its storage in the plan, from which the slot's origin follows. ``copy``: the tensor
    may be written to after the head (an input, a buffer of the model), so a copy is taken.
    """

    kind: str
    where: Any
    leaf: int
    view: View
    copy: bool


@short
@dataclass(frozen=True)
class Cutting:
    """What crosses, and the head's captures (one per slot) and recorded operations.

    ``position``: the seq of the cut; ``watched``: the head needs a function mode; ``below``: and a dispatch mode.
    ``storages``: what the slots hold.
    """

    slots: tuple[Slot, ...]
    marks: tuple[Mark, ...]
    fills: tuple[Fill, ...]
    given: tuple[Given, ...]
    reads: tuple[ReadForm, ...]
    layouts: tuple[Layout, ...]
    captures: tuple[Capture, ...]
    banked: tuple[int, ...]
    position: int
    watched: bool
    below: bool
    generators: tuple[str, ...]
    storages: tuple[Storage, ...]
    branch: Branch | None = None
    """What runs before the cut but in the tail; None for a plain cut."""


def cut_after(
    trace: Trace, layer: ModuleCall | None, frontier: Frontier, *, wide: bool = False, branch: Branch | None = None
) -> Cutting:
    """Return the cut after ``layer`` (None: before the first layer). Raises `CutRefused` with the reason.

    ``wide``: the tail may write other parts than in the plan. ``branch``: of a branch cut that ends there.
    """
    try:
        return _Cutter(trace, layer, frontier, wide, branch).work()
    except CutRefused as error:
        if not trace.trains:
            raise
        raise CutRefused(f"the model is in training mode: call its eval() ({error})") from None


def crossing_of(
    cutting: Cutting,
    trace: Trace,
    layer_id: int,
    layer_name: str,
    depth: int | None,
    context: dict[str, Any],
    path: str,
    plan: str,
    leaves: tuple[str, ...],
    calls: tuple[str, ...] = (),
) -> Crossing:
    """Return the description of a cut. ``path``: the digest of the path up to it; ``plan``: of all of it; ``leaves``:
    see `Crossing`; ``calls``: of a branch cut. Raises `CutRefused`.
    """
    if mixes_truth(cutting.slots, cutting.marks):
        raise CutRefused("the same memory crosses as truth values and as another type")
    inputs = tuple(TensorForm(value.shape, value.view.stride, value.dtype) for value in trace.inputs)
    return Crossing(
        layer_id,
        layer_name,
        depth,
        context,
        trace.input_structure,
        inputs,
        cutting.slots,
        cutting.marks,
        cutting.fills,
        cutting.given,
        cutting.reads,
        cutting.layouts,
        path,
        plan,
        cutting.generators,
        leaves,
        calls=calls,
        later=() if cutting.branch is None else cutting.branch.places,
    )


_GRADIENTS = frozenset({"grad", "backward"})
_NOWHERE = View((), (), 0)
UNSEEN = None
"""Takes the place of a module's path for a kernel that belongs to no operation."""


def _reshaped(trace: Trace, layer: ModuleCall) -> set[Storage]:
    """Storages of tensors whose shape is changed in place before the cut, which a placeholder does not support."""
    ops = (op for op in trace.ops if op.reshapes and op.args_tainted and op.seq < layer.exit)
    return {value.storage for op in ops for value in op.results if value.storage.born_tainted}


class _Cutter:
    def __init__(
        self, trace: Trace, layer: ModuleCall | None, frontier: Frontier, wide: bool, branch: Branch | None
    ) -> None:
        self.branch = branch
        self.later: frozenset[Op] = frozenset() if branch is None else branch.later
        # a constant that is only overwritten needs no slot: the cloud has the storage
        frontier = {storage: live for storage, live in frontier.items() if live or storage.born_tainted}
        if layer is not None and branch is None:  # a branch cut has none
            frontier |= {
                storage: LiveSet.empty(storage.elements) for storage in _reshaped(trace, layer) - set(frontier)
            }
        self.trace = trace
        self.wide = wide
        self.layer = layer
        self.position = 0 if layer is None else layer.exit
        self.frontier = frontier
        self.slot_of = {storage: number for number, storage in enumerate(frontier)}
        self.marks: list[Mark] = []
        self.marked: set[Storage] = set()
        self.fills: dict[Storage, Fill] = {}
        self.given: list[Given] = []
        self.reads: list[ReadForm] = []
        self.layouts: list[Layout] = []
        self.banked: list[int] = []

    def work(self) -> Cutting:
        self._check_trace()
        for storage in self.frontier:
            if storage.opaque:
                raise CutRefused("a sparse, nested or quantised tensor crosses")
            if storage.foreign:
                raise CutRefused("a value that no operation made (threads, NumPy, an extension) crosses")
            if storage.outside:
                raise CutRefused("the model keeps a value of this request in its own state, and reads it after the cut")
        self._inputs()
        for call, place, op in self._prefix():
            if op in self.later:
                continue
            if op is None:
                self._opaque(call)
            else:
                self._operation(place, op)
        self._check_placed()
        written = self._written_later()
        unsure = self.wide or max(self.trace.dynamic, default=-1) > self.position
        slots = tuple(
            Slot(storage.dtype, storage.elements, live.pieces, unsure or storage in written)
            for storage, live in self.frontier.items()
        )
        captures = tuple(self._capture(storage) for storage in self.frontier)
        dynamic = any(seq < self.position for seq in self.trace.dynamic)
        below = any(capture.kind == "kernel" for capture in captures)
        watched = dynamic or below or bool(self.banked) or any(capture.kind == "op" for capture in captures)
        return Cutting(
            slots,
            tuple(self.marks),
            tuple(self.fills.values()),
            tuple(self.given),
            tuple(self.reads),
            tuple(self.layouts),
            captures,
            tuple(self.banked),
            self.position,
            (watched and self.layer is not None) or self.branch is not None,
            below and self.layer is not None,
            self._generators(),
            tuple(self.frontier),
            self.branch,
        )

    def _written_later(self) -> set[Storage]:
        """Return the storages that are written in place behind the cut."""
        if self.branch is None:
            return {storage for storage, seq in self.trace.last_writes.items() if seq > self.position}
        return {s for event in self.trace.events if self.branch.is_later(event.seq) for s in event.writes}

    def _check_trace(self) -> None:
        """Raise for reasons to refuse that concern the model rather than one value."""
        trace = self.trace
        for refusal in trace.refusals:
            if refusal.first <= self.position <= refusal.last:
                raise CutRefused(refusal.reason)
        if trace.unsteady:  # even before the first layer: the state belongs to one side
            raise CutRefused(trace.unsteady)
        if self.layer is None:
            return
        for name, drawn in trace.dice.items():
            # the states of Python's, NumPy's and torch's own generator of the CPU cross
            if name not in ("python", "numpy", "cpu") and drawn[0][1] < self.position < drawn[-1][1]:
                raise CutRefused(
                    f"random numbers of a generator ({name}) whose state does not cross are drawn on both sides"
                )
        if trace.foreign >= self.position:
            raise CutRefused("code that torch does not see (threads, an extension) reads values after the cut")

    def _generators(self) -> tuple[str, ...]:
        """Return the generators whose states must arrive with a request."""
        dice = self.trace.dice
        torchs = ("torch",) if any(last > self.position for _, last in dice.get("cpu", ())) else ()
        # the tail repeats the model's Python from its beginning
        return torchs + tuple(name for name in ("python", "numpy") if name in dice)

    # -- the prefix ---------------------------------------------------------------------------------------------

    def _prefix(self) -> Iterator[tuple[ModuleCall, Place, Op | None]]:
        """Yield every operation before the cut with its place; for a scripted or compiled module only the call."""
        if self.layer is None:
            return
        for call, number, item in self.trace.placed:
            if (item.enter if isinstance(item, ModuleCall) else item.seq) > self.position:
                return
            if isinstance(item, Op):
                yield call, Place(call.path, call.number, number), item
            elif item.opaque and item.args_tainted:
                yield item, Place(item.path, item.number, -1), None

    def _inputs(self) -> None:
        for leaf, value in enumerate(self.trace.inputs):
            if value.storage in self.slot_of:
                self._mark(INPUTS, leaf, value)
            elif value.storage.opaque:
                raise CutRefused("an input is sparse, nested or quantised")

    def _mark(self, place: Place, leaf: int, value: Value) -> None:
        flags = value.flags.replace("g", "")
        self.marks.append(Mark(place, leaf, self.slot_of[value.storage], value.view, value.dtype, flags))
        self.marked.add(value.storage)

    def _operation(self, place: Place, op: Op) -> None:
        if any(value.storage.foreign for value in op.args):
            raise CutRefused(
                f"before the cut {op.name} takes a value that no operation made (threads, NumPy, an extension)"
            )
        if not op.args_tainted and not op.draws:
            return
        if op.trouble:
            raise CutRefused(f"{op.name} before the cut cannot be replayed: {op.trouble}")
        if op.kind is CallKind.VALUE:
            if op.hidden:
                raise CutRefused(f"before the cut {op.name} reads a value where torch functions are not seen")
            self.banked.append(self.trace.ordinals[op])
            self.reads.append(ReadForm(place, op.name, form_of(op.structure)))
            return
        for storage in op.writes:
            self._written(place, op, storage)
        # a result without tensor arguments may contain numbers that were read from data
        literal = op.dynamic or (op.draws and not op.args) or (not op.reshapes and op.is_unforeseen)
        if literal:
            self.given.append(self._given(place, op))
        for leaf, value in enumerate(op.results):
            if value in op.args or op.reshapes:
                continue
            if value.storage in self.slot_of:
                if value.storage not in self.marked or self.marks[-1].place == place:
                    self._first(place, leaf, value)
            elif value.storage.opaque:
                raise CutRefused("a sparse, nested or quantised tensor is made before the cut")
            elif not literal and not op.laid and value.storage.tainted <= op.end:
                self.layouts.append(Layout(place, leaf, value.view.stride))

    def _first(self, place: Place, leaf: int, value: Value) -> None:
        if not value.storage.born_tainted:
            return  # the cloud makes the storage itself; its contents come with a fill
        self._mark(place, leaf, value)

    def _written(self, place: Place, op: Op, storage: Storage) -> None:
        """A storage that began as a constant gets its content at the last write before the cut."""
        if storage.born_tainted or storage not in self.slot_of:
            return
        for number, value in enumerate(op.args):
            if value.storage is storage:
                self.fills[storage] = Fill(place, number, self.slot_of[storage])
                return
        raise CutRefused("a value is written in place where the write cannot be replayed")

    def _given(self, place: Place, op: Op) -> Given:
        structure: Structure = op.structure or ["v", None]
        writes = tuple(number for number, value in enumerate(op.args) if value.storage in op.writes)
        return Given(place, op.name, structure, self._leaves(op.results, op.args), writes)

    def _opaque(self, call: ModuleCall) -> None:
        if call.structure is None:
            raise CutRefused(f"{call.name} is scripted or compiled, and its result cannot be replayed")
        place = Place(call.path, call.number, -1)
        self.given.append(Given(place, call.path, call.structure, self._leaves(call.results, call.args)))
        for leaf, value in enumerate(call.results):
            if value in call.args:
                continue
            if not value.storage.born_tainted or value.storage.opaque:
                raise CutRefused(f"{call.name} is scripted or compiled, and its result cannot be replayed")
            if value.storage in self.slot_of and value.storage not in self.marked:
                self._mark(place, leaf, value)

    @staticmethod
    def _leaves(results: list[Value], args: list[Value]) -> tuple[TensorForm | int, ...]:
        return tuple(
            args.index(value) if value in args else TensorForm(value.shape, value.view.stride, value.dtype)
            for value in results
        )

    def _check_placed(self) -> None:
        """Check that every storage that crosses appears in an input, a result, or code that runs again."""
        for storage in self.slot_of:
            if storage.born_tainted and storage not in self.marked:
                raise CutRefused("a value that crosses is made where torch functions are not seen")
            if not storage.born_tainted and storage not in self.fills:
                raise CutRefused("a value is written in place where the write cannot be replayed")
        for value in self._touched_by_tail():
            if value.storage in self.slot_of and "g" in value.flags:
                raise CutRefused("a gradient is taken across the cut")
            if value.chosen:
                raise CutRefused("a part of the model's own memory that data has chosen is read after the cut")

        for op in self.trace.ops:
            if op.seq > self.position:
                break
            if op.name in _GRADIENTS and not all(one.storage.born_tainted for one in op.results):
                # it would be computed after the cut, from results that are not there
                raise CutRefused("a gradient that no input changes is taken before the cut")

    def _touched_by_tail(self) -> set[Value]:
        later = {value for op in self.trace.ops if op.seq > self.position or op in self.later for value in op.args}
        later.update(value for call in self.trace.calls if call.enter > self.position for value in call.args)
        later.update(self.trace.outputs)
        made_later = self.branch.makes if self.branch is not None else lambda value: False
        return {value for value in later if value.made < self.position and not made_later(value)}

    def _is_stubbed(self, call: ModuleCall, value: Value) -> bool:
        """Return whether a head lacks such a result: it is created behind the cut, or so is everything that
        creates it.
        """
        if self.branch is None:
            return False
        outer: ModuleCall | None = call
        while outer is not None:
            if outer in self.branch.calls:
                return True
            outer = outer.parent
        return self.branch.makes(value)

    # -- the head -----------------------------------------------------------------------------------------------

    def _capture(self, storage: Storage) -> Capture:
        if not self.frontier[storage]:
            return Capture("nothing", None, 0, _NOWHERE, False)
        for leaf, value in enumerate(self.trace.inputs):
            if value.storage is storage:
                return Capture("input", None, leaf, value.view, True)
        copy = not storage.born_tainted
        for call, leaf, value in self.trace.results_on.get(storage, ()):
            if call.exit <= self.position and not self._is_stubbed(call, value):
                return Capture("result", (call.path, call.number), leaf, value.view, copy)
        first = self.trace.first_on.get(storage)
        if first is not None and first[0].seq < self.position and first[0] not in self.later:
            op, leaf, value = first
            return Capture("op", self.trace.ordinals[op], leaf, value.view, copy)
        unseen = self.trace.unseen_on.get(storage)
        if unseen is not None and self.trace.unseen[unseen[0]].seq < self.position:
            number, leaf, value = unseen
            return Capture("kernel", (UNSEEN, number), leaf, value.view, copy)
        raise CutRefused("a value that crosses is made where torch functions are not seen")
