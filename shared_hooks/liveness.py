"""Which elements of which storages are alive across each cut: the frontier."""

from __future__ import annotations

from shared_hooks.trace import NEVER, Storage, Trace
from shared_hooks.views import LiveSet

Frontier = dict[Storage, LiveSet]


def frontiers(trace: Trace, cuts: list[int]) -> list[Frontier]:
    """For every position (a seq; 0 = before anything ran): what is read later of what depends on the inputs by then.

    One pass backwards over the data events: a read makes elements live, an overwrite kills them. Values that do not
    depend on the inputs are left out; the cloud computes them itself.
    """
    found: dict[int, Frontier] = {}
    live: Frontier = {}
    waiting = sorted(set(cuts))
    events = sorted(trace.events, key=lambda event: event.seq)
    written: set[Storage] = set()
    last_dynamic = max(trace.dynamic, default=-1)

    def close(until: int) -> None:
        while waiting and waiting[-1] > until:
            cut = waiting.pop()
            found[cut] = _at(live, written, cut, last_dynamic)

    for event in reversed(events):
        close(event.seq - 1)
        written.update(event.writes)
        for storage, view in event.overwrites:
            if storage in live:
                live[storage] = live[storage].remove(view)
        for storage, view in event.reads:
            if storage.created < event.seq and storage.tainted < NEVER:
                live[storage] = live.get(storage, LiveSet.empty(storage.elements)).add(view)
    close(-1)
    if trace.foreign >= 0 and 0 in found:
        # somebody reads without being seen: the whole model on the other side gets the whole inputs
        found[0] = {value.storage: LiveSet.full(value.storage.elements) for value in trace.inputs}
    return [found[cut] for cut in cuts]


def _at(live: Frontier, written: set[Storage], cut: int, last_dynamic: int) -> Frontier:
    # a storage that is only overwritten must be there, too, though nothing of it is sent
    reached = {storage: live.get(storage, LiveSet.empty(storage.elements)) for storage in written} | live
    frontier: Frontier = {}
    for storage, elements in reached.items():
        if storage.tainted < cut and storage.created < cut and (elements or storage in written):
            # what the tail reads may hang on the data: then a part is not enough to be safe
            frontier[storage] = LiveSet.full(storage.elements) if last_dynamic > cut else elements
    return dict(sorted(frontier.items(), key=lambda entry: entry[0].index))


def frontier_bytes(frontier: Frontier) -> int:
    """Bytes that cross, raw."""
    return sum(view.numel * storage.itemsize for storage, live in frontier.items() for view in live.pieces)
