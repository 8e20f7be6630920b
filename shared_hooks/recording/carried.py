"""What a forward leaves in memory that outlives it: parameters, buffers, tensors kept in attributes or globals.

A tail must leave the server's memory as it was, so no cut may have such a write in its tail, be it after the cut or
in what the tail's Python repeats of the prefix. And where what was written depends on the inputs and is read by the
next forward, the model carries state from request to request, which a cut would keep on one side only.

A *scratch* storage is rewritten before it is read. The tail's side does not have what the head wrote there: a path that
reads first must not be cut, and where data decides on the path nobody knows which one comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared_hooks.recording.trace import NEVER, Event, Storage
from shared_hooks.tensors import LiveSet


def outside_writes(events: list[Event], *, timeless: bool) -> Iterator[tuple[Storage, int, int, str]]:
    """For each storage that existed before and is written: the positions where that rules a cut out, and what it does.

    ``timeless``: data does not decide on the path. The last position is below `NEVER` for scratch alone.
    """
    written: dict[Storage, list[Event]] = {}
    for event in events:
        for storage in event.writes:
            if storage.outside and not storage.foreign:
                written.setdefault(storage, []).append(event)
    for storage, writes in written.items():
        if storage.tainted < NEVER and live_at_start(storage, events):
            yield storage, 0, NEVER, "keeps values of this request for the next one in"
        elif not timeless or any(event.seq < storage.tainted for event in writes):
            # what does not depend on the inputs is written again by the tail's Python
            yield storage, 0, NEVER, "writes to"
        else:
            # rewritten before it is read: the head's affair, as long as it is all before the cut
            yield storage, 0, max(event.seq for event in writes) - 1, "writes after it to"


def live_at_start(storage: Storage, events: list[Event]) -> bool:
    """Whether anything of a storage is read before it is overwritten."""
    live = LiveSet.empty(storage.elements)
    for event in sorted(events, key=lambda event: -event.seq):
        for found, view in event.overwrites:
            if found is storage:
                live = live.remove(view)
        for found, view in event.reads:
            if found is storage:
                live = live.add(view)
    return bool(live)
