"""Works out an `Explanation`: looks up in the trace what made each value that crosses, and what reads it.

One pass over the trace for all slots together; the operations around an event are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

from shared_hooks.crossing import Crossing, Place, Slot
from shared_hooks.explanation import CallReports, Explanation, Sent
from shared_hooks.modules import ROOT, call_name
from shared_hooks.planning import Capture, Cutting, Plan
from shared_hooks.recording import Event, ModuleCall, Op, Storage, Trace
from shared_hooks.tail import Answer, Enter, ReadValue, Recipe, Run, Skip
from shared_hooks.tensors import LiveSet, Structure, dtype_name, no_class, unflatten

_LONGEST = 60


def explain(plan: Plan, cutting: Cutting, crossing: Crossing, recipe: Recipe) -> Explanation:
    """What ``cutting`` of ``plan`` sends and why, and what ``recipe`` does with it."""
    number, place = crossing.layer_id, plan.place_at(crossing.layer_id, crossing.layer_name)
    layer = plan.resolve(place)
    telling = _Telling(plan.trace, cutting)
    elsewhere = {storage.index for frontier in plan.of_siblings(place) for storage in frontier}
    slots = zip(cutting.storages, crossing.slots, cutting.captures, strict=True)
    values = (plan.trace.ops[ordinal].structure for ordinal in cutting.banked)
    reads = zip(crossing.reads, values, strict=True)
    kinds = Counter(map(type, recipe.steps))
    return Explanation(
        layer_id=number,
        layer_name=crossing.name,
        layer_type="" if layer is None else layer.layer_type,
        sent=tuple(telling.sent(i, *one, elsewhere=one[0].index in elsewhere) for i, one in enumerate(slots)),
        whole=bool(crossing.slots) and max(plan.trace.dynamic, default=-1) > cutting.position,
        reads=tuple(CallReports(read.name, _where(read.place), _value(value)) for read, value in reads),
        given=tuple(CallReports(given.name, _where(given.place)) for given in crossing.given),
        generators=crossing.generators,
        description_bytes=len(crossing.to_bytes()),
        skipped=kinds[Skip],
        entered=kinds[Enter],
        answered=kinds[Answer],
        read=kinds[ReadValue],
        run=kinds[Run],
        steps=tuple(recipe.explain()),
        is_block=layer is not None and layer.is_block,
    )


class _Uses:
    """What happens to one storage after the cut, and what wrote it last before."""

    def __init__(self, elements: int) -> None:
        self.overwritten = LiveSet.empty(elements)
        self.readers: list[str] = []
        self.writer = ""
        self.written_before = ""

    def read(self, event: Event, storage: Storage, name: str) -> None:
        """Noted if anything is read that was not overwritten since the cut."""
        for view in (view for one, view in event.reads if one is storage):
            wanted = LiveSet.empty(storage.elements).add(view)
            if self.overwritten and not self._left(wanted):
                continue
            if name not in self.readers[-1:]:
                self.readers.append(name)

    def _left(self, wanted: LiveSet) -> bool:
        for piece in self.overwritten.pieces:
            wanted = wanted.remove(piece)
        return bool(wanted)


class _Telling:
    """Names for the values and uses of one trace."""

    def __init__(self, trace: Trace, cutting: Cutting) -> None:
        self.trace = trace
        self.position, self.branch = cutting.position, cutting.branch
        placed = [(item.seq, item, call) for call, _, item in trace.placed if isinstance(item, Op)]
        placed.sort(key=lambda entry: entry[0])
        self.starts = [seq for seq, _, _ in placed]
        self.placed = placed
        self.opaque = {call.exit: call for call in trace.calls if call.opaque}
        self.inputs = _leaf_names(trace.input_structure)
        self.uses = {storage: _Uses(storage.elements) for storage in cutting.storages}
        for event in sorted(trace.events, key=lambda event: event.seq):
            self._use(event)

    def _use(self, event: Event) -> None:
        after = event.seq > self.position or (self.branch is not None and self.branch.is_later(event.seq))
        for storage in dict.fromkeys(storage for storage, _ in event.reads) if after else ():
            if storage in self.uses:
                self.uses[storage].read(event, storage, self.name(event.seq))
        for storage, view in event.overwrites if after else ():
            if storage in self.uses:
                self.uses[storage].overwritten = self.uses[storage].overwritten.add(view)
        for storage in event.writes:
            uses = self.uses.get(storage)
            if uses is None or event.seq <= storage.created:
                continue
            if after:
                uses.writer = uses.writer or self.name(event.seq)
            elif self._made_at(storage) < event.seq:
                uses.written_before = self.name(event.seq)

    def _made_at(self, storage: Storage) -> int:
        """The last seq of the operation that made a storage: what it writes itself is no write in place."""
        found = self._around(storage.created)
        return storage.created if found is None else max(found[0].end, storage.created)

    def _around(self, seq: int) -> tuple[Op, ModuleCall] | None:
        index = bisect_right(self.starts, seq) - 1
        return None if index < 0 else self.placed[index][1:]

    def name(self, seq: int) -> str:
        """What happens at ``seq``: "batch_norm in stem.1"."""
        if seq == self.trace.end:
            return "the output"
        call = self.opaque.get(seq)
        if call is not None:
            return f"{call.name}, which is scripted or compiled"
        found = self._around(seq)
        return "code that torch functions do not stand for" if found is None else _named(*found)

    def sent(self, number: int, storage: Storage, slot: Slot, capture: Capture, *, elsewhere: bool) -> Sent:
        """One slot."""
        uses = self.uses[storage]
        shape = (storage.elements,) if capture.kind == "nothing" else capture.view.shape
        return Sent(
            number,
            self._value(storage, capture),
            uses.written_before,
            dtype_name(slot.dtype),
            shape,
            slot.piece_bytes,
            slot.storage_bytes,
            len(slot.pieces),
            uses.readers[0] if uses.readers else "",
            max(len(uses.readers) - 1, 0),
            uses.writer,
            elsewhere,
        )

    def _value(self, storage: Storage, capture: Capture) -> str:
        if capture.kind == "input":
            return self.inputs.get(capture.leaf, f"input {capture.leaf}")
        if storage.created in self.opaque:
            return f"the result of {self.opaque[storage.created].name}"
        found = self._around(storage.created)
        if found is not None:
            return f"the result of {_named(*found)}"
        return f"the result of {call_name(*capture.where)}" if capture.kind == "result" else "a value of the model's"


def _named(op: Op, call: ModuleCall) -> str:
    return f"{op.name} in {_module(call.name)}"


def _where(place: Place) -> str:
    return _module(call_name(place.path, place.number))


def _module(name: str) -> str:
    return "the model itself" if name in ("", ROOT) else name


def _value(structure: Structure | None) -> str:
    if structure is None:
        return ""
    text = repr(unflatten(structure, [], no_class))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _leaf_names(structure: Structure) -> dict[int, str]:
    """What the tensors of (args, kwargs) are called: "input 0", "input mask"."""
    args, kwargs = structure[1]
    found: dict[int, str] = {}
    for name, inner in [*enumerate(args[1]), *((key, inner) for key, inner in kwargs[1])]:
        for path, leaf in _leaves(inner):
            found[leaf] = f"input {name if not isinstance(name, list) else name[-1]}{path}"
    return found


def _leaves(structure: Any) -> Iterator[tuple[str, int]]:
    """The tensors of one input, with the way to them."""
    kind = structure[0]
    if kind == "t":
        yield "", structure[1]
    elif kind in ("list", "tuple", "named"):
        for number, inner in enumerate(structure[-1]):
            for path, leaf in _leaves(inner):
                yield f"[{number}]{path}", leaf
    elif kind in ("dict", "data", "map"):
        for key, inner in structure[-1]:
            for path, leaf in _leaves(inner):
                name = key[-1] if isinstance(key, list) else key
                yield (f".{name}{path}" if kind == "data" else f"[{name!r}]{path}"), leaf
