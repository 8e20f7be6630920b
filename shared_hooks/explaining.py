"""Explain what crosses a cut and why, and what the tail does with it, as data and as text (`Explanation`).

It is derived from the trace: what made each value that crosses, and what reads it.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared_hooks.crossing import Crossing, Place, Slot
from shared_hooks.modules import ROOT, call_name
from shared_hooks.planning import Capture, Cutting, Plan
from shared_hooks.recording import DataEvent, ModuleCall, Op, Storage, Trace
from shared_hooks.showing import short
from shared_hooks.tail import Enter, GiveResult, ReadValue, Recipe, Run, Skip
from shared_hooks.tensors import LiveSet, Structure, dtype_name, no_class, unflatten

WIDTH = 80
_STEPS = 24
_ROWS = 12


@dataclass(frozen=True, slots=True)
class Sent:
    """One storage that crosses.

    ``value``: an input, or what made it and where; ``written_before``: the last in-place write before the cut.
    ``sent_bytes`` of ``storage_bytes`` cross, in ``pieces`` pieces. ``read_by``: its first reader after the cut, or
    "the output"; empty if there is none on this path; ``read_more``: number of further readers. ``written_by``: the
    first in-place write after the cut. ``other_path``: another known path through the model reads it.
    """

    slot: int
    value: str
    written_before: str
    dtype: str
    shape: tuple[int, ...]
    sent_bytes: int
    storage_bytes: int
    pieces: int
    read_by: str
    read_more: int
    written_by: str
    other_path: bool


@dataclass(frozen=True, slots=True)
class PlaceReport:
    """A report on a place before the cut: ``what`` it is ("item", an operation, a module), ``where`` in the model.

    ``value``: of a Python value that was read from data, in the plan; every request sends its own.
    """

    what: str
    where: str
    value: str = ""


@short
@dataclass(frozen=True, slots=True)
class Explanation:
    """A cut on inputs of one form: what is sent, what is reported, and what the tail does up to the cut.

    ``whole``: Python reads data after the cut, so storages cross whole. ``reads``: values that Python read from data
    before it; ``given``: forms that cannot be computed without data; ``generators``: those whose state is sent.
    ``description_bytes``: of the cut's description, sent once per stream. ``skipped`` and ``entered`` module calls,
    ``answered``, ``read`` and ``run`` operations are those of ``steps``, a line each, indented by module.
    """

    layer_id: int
    layer_name: str
    layer_type: str
    sent: tuple[Sent, ...]
    whole: bool
    reads: tuple[PlaceReport, ...]
    given: tuple[PlaceReport, ...]
    generators: tuple[str, ...]
    description_bytes: int
    skipped: int
    entered: int
    answered: int
    read: int
    run: int
    steps: tuple[str, ...]
    is_block: bool = False
    """Whether the cut is after a block, whose last layer is ``layer_id``."""

    @property
    def sent_bytes(self) -> int:
        """Raw bytes of the frontier."""
        return sum(one.sent_bytes for one in self.sent)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH, *, everything: bool = False) -> str:
        """Format lines of at most ``width`` characters, if names allow it; long lists are folded unless
        ``everything``.
        """
        lines = [line for part in self._parts(everything) for line in part]
        return "\n".join(wrapped for line in lines for wrapped in _wrapped(line, width))

    def _parts(self, everything: bool) -> Iterator[list[str]]:
        yield [self._title(), ""]
        yield self._what_crosses(everything)
        for title, values in (("Python values read from data before the cut", self.reads), (_GIVEN, self.given)):
            if values:
                rows = [f"  {one.what} in {one.where}" + (f": {one.value}" if one.value else "") for one in values]
                yield ["", f"{title}: {len(values)}", *_folded(rows, _ROWS, everything)]
        yield ["", *self._what_the_tail_does(everything)]

    def _title(self) -> str:
        if self.layer_id < 0:
            return "cut before the first layer: the inputs cross, the whole model is the tail"
        what = "block" if self.is_block else f"layer {self.layer_id}:"
        return f"cut after {what} {self.layer_name} ({self.layer_type})"

    def _what_crosses(self, everything: bool) -> list[str]:
        rows = [
            f"Crossing with each request: {_bytes(self.sent_bytes)} in {_count(len(self.sent), 'storage')}",
        ]
        if self.whole:
            rows.append("  whole, because Python reads data after the cut and may then read any part of them")
        blocks = [self._slot(one) for one in self.sent]
        shown = blocks if everything else blocks[:_ROWS]
        rows += [line for block in shown for line in block]
        if len(shown) < len(blocks):
            rows.append(f"  ({len(blocks) - len(shown)} more)")
        for name in self.generators:
            rows.append(f"  the state of {_GENERATORS.get(name, name)}")
        return [*rows, f"Once a stream: the cut's description, {_bytes(self.description_bytes)}"]

    def _slot(self, one: Sent) -> list[str]:
        size = _bytes(one.sent_bytes)
        if one.sent_bytes < one.storage_bytes:
            size += f" of {_bytes(one.storage_bytes)}"
        if one.pieces > 1:
            size += f" in {one.pieces} pieces"
        made = f"    is {one.value}"
        if one.written_before:
            made += f", written in place by {one.written_before}"
        return [f"  slot {one.slot}: {one.dtype}[{', '.join(map(str, one.shape))}], {size}", made, *_why(one)]

    def _what_the_tail_does(self, everything: bool) -> list[str]:
        if not self.steps:
            return ["The tail begins at once: nothing is skipped, entered or replayed."]
        parts = [
            _count(self.skipped, "module call") + " skipped" if self.skipped else "",
            f"{self.entered} entered" if self.entered else "",
            _count(self.answered, "operation") + " answered without running" if self.answered else "",
            _count(self.read, "value") + " taken from the request" if self.read else "",
            _count(self.run, "operation") + " run again" if self.run else "",
        ]
        rows = [
            f"The tail up to the cut: {', '.join(part for part in parts if part)}",
            "  (operations on constants simply run, and are not listed)",
        ]
        return [*rows, *_folded([f"  {step}" for step in self.steps], _STEPS, everything)]


_GIVEN = "Added to it, because the other side cannot work it out without data"
_GENERATORS = {
    "torch": "torch's random number generator, as it is at the cut",
    "python": "Python's random number generator, as the forward begins",
    "numpy": "NumPy's random number generator, as the forward begins",
}


def _why(one: Sent) -> Iterator[str]:
    if one.read_by:
        more = f", and {one.read_more} more after that" if one.read_more else ""
        yield f"    read by {one.read_by}{more}"
    if one.written_by:
        also = "also " if one.read_by else "sent for its memory's form only: "
        yield f"    {also if one.read_by or not one.sent_bytes else ''}written in place by {one.written_by}"
    if one.other_path:
        yield f"    another known path through the model reads it{', too' if one.read_by else ''}"
    elif not one.read_by and not one.written_by:
        yield "    nothing of it is read; its form is"


def _bytes(number: int) -> str:
    return f"{number:,} byte{'' if number == 1 else 's'}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _folded(rows: list[str], most: int, everything: bool) -> list[str]:
    """Return the first third and the last two thirds of a long list: what is near the cut comes last."""
    if everything or len(rows) <= most + 1:
        return rows
    first = most // 3
    return [*rows[:first], f"  ({len(rows) - most} more)", *rows[first - most :]]


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


_LONGEST = 60


def explain(plan: Plan, cutting: Cutting, crossing: Crossing, recipe: Recipe) -> Explanation:
    """Explain what ``cutting`` of ``plan`` sends and why, and what ``recipe`` does with it."""
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
        reads=tuple(PlaceReport(read.name, _where(read.place), _value(value)) for read, value in reads),
        given=tuple(PlaceReport(given.name, _where(given.place)) for given in crossing.given),
        generators=crossing.generators,
        description_bytes=len(crossing.to_bytes()),
        skipped=kinds[Skip],
        entered=kinds[Enter],
        answered=kinds[GiveResult],
        read=kinds[ReadValue],
        run=kinds[Run],
        steps=tuple(recipe.explain()),
        is_block=layer is not None and layer.is_block,
    )


class _Uses:
    """Uses of one storage after the cut, and its last write before."""

    def __init__(self, elements: int) -> None:
        self.overwritten = LiveSet.empty(elements)
        self.readers: list[str] = []
        self.writer = ""
        self.written_before = ""

    def read(self, event: DataEvent, storage: Storage, name: str) -> None:
        """Record a read of anything that was not overwritten since the cut."""
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

    def _use(self, event: DataEvent) -> None:
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
        """Return the last seq of the operation that made a storage, whose own writes are no in-place writes."""
        found = self._around(storage.created)
        return storage.created if found is None else max(found[0].end, storage.created)

    def _around(self, seq: int) -> tuple[Op, ModuleCall] | None:
        index = bisect_right(self.starts, seq) - 1
        return None if index < 0 else self.placed[index][1:]

    def name(self, seq: int) -> str:
        """Return what happens at ``seq``: "batch_norm in stem.1"."""
        if seq == self.trace.end:
            return "the output"
        call = self.opaque.get(seq)
        if call is not None:
            return f"{call.name}, which is scripted or compiled"
        found = self._around(seq)
        return "code that torch functions do not stand for" if found is None else _named(*found)

    def sent(self, number: int, storage: Storage, slot: Slot, capture: Capture, *, elsewhere: bool) -> Sent:
        """Describe one slot."""
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
    """Return names of the tensors of (args, kwargs): "input 0", "input mask"."""
    args, kwargs = structure[1]
    found: dict[int, str] = {}
    for name, inner in [*enumerate(args[1]), *((key, inner) for key, inner in kwargs[1])]:
        for path, leaf in _leaves(inner):
            found[leaf] = f"input {name if not isinstance(name, list) else name[-1]}{path}"
    return found


def _leaves(structure: Any) -> Iterator[tuple[str, int]]:
    """Yield the tensors of one input, with their paths."""
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
