"""Cuts along branches: a set of calls, and what these need, runs before the cut; all else behind it.

A model runs its calls in one order, and a plain cut divides that order at one place. A *branch cut* ends at the last
of its calls, too, but of what runs before that place it leaves to the other side what its calls do not need: `Branch`
says which operations these are. The tail runs them where the model's Python comes to them, on the real values; the
head answers them with placeholders.

What an operation needs is found by memory and not by names: who made the tensors that it is given, and whoever wrote to
their storages before. What would come out otherwise in the other order is refused: see `check`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared_hooks.crossing import Place
from shared_hooks.errors import CutRefused
from shared_hooks.forward import Kind
from shared_hooks.recording import Event, ModuleCall, Op, Storage, Trace, Value
from shared_hooks.showing import short

Item = Op | ModuleCall
"""An operation, or the call of a scripted or compiled module, which is not looked into."""


@short
@dataclass(frozen=True, eq=False)
class Branch:
    """``ends``: the calls that it is after, ``end``: the last of them, where the cut is; ``later``: the operations
    before it that run behind it; ``calls``: the outermost calls that hold nothing else; ``places``: of these calls, and
    of operations outside of them.
    """

    ends: tuple[ModuleCall, ...]
    end: ModuleCall
    later: frozenset[Op]
    calls: tuple[ModuleCall, ...]
    places: tuple[Place, ...]
    seqs: tuple[tuple[int, int], ...] = field(repr=False)
    """When ``later`` runs, in order: (first, last)."""

    def is_later(self, seq: int) -> bool:
        """Whether that which happens at this seq happens behind the cut."""
        at = bisect_right(self.seqs, (seq, 1 << 62)) - 1
        return seq > self.end.exit or (at >= 0 and self.seqs[at][0] <= seq <= self.seqs[at][1])

    def makes(self, value: Value) -> bool:
        """Whether a value of before the end is made behind the cut."""
        return value.made >= 0 and self.is_later(value.made)


def branch_of(trace: Trace, ends: Sequence[ModuleCall], end: ModuleCall) -> Branch | None:
    """The cut after all of these calls and what they need, whose place is after ``end``; None where that is the plain
    cut there. Raises CutRefused for what cannot run in another order.
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
    """What runs before the cut: all within ``ends`` that hangs on the inputs, and whatever that needs."""
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
    item: Item, done: Iterable[Event], first: int, last: int, values: set[Value], storages: set[Storage]
) -> bool:
    """Whether something of these is made or written by an item."""
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
    """The outermost calls of which all that counts is later, and the places of these and of all other later items."""
    counts: dict[ModuleCall, list[int]] = {}
    for call, _, item in placed:
        if isinstance(item, Op) and item.counts:
            outer: ModuleCall | None = call
            while outer is not None:
                known = counts.setdefault(outer, [0, 0])
                known[0] += 1
                known[1] += item in later
                outer = outer.parent
    # what runs on behind the end has more in it than was counted
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
    """Raises CutRefused where the order of the two sides would tell."""
    end, begins = branch.end.exit, branch.seqs[0][0]
    for refusal in trace.refusals:
        if refusal.first <= end and refusal.last >= begins:
            raise CutRefused(refusal.reason)
    if any(begins < seq < end for seq in trace.dynamic) or any(op.kind is Kind.VALUE for op in branch.later):
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
    """What is read behind the cut must be as it was where it was read: nothing before the cut may write there after
    that; and what is written behind the cut nothing before it may look at.
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
