"""What a forward leaves in memory that outlives it: parameters, buffers, tensors kept in attributes or globals.

A tail must leave the server's memory as it was, and its Python runs from the beginning: so no cut may have such a
write, be it after the cut or before it. Nor could it if the next forward wrote there before it reads: one of another
form, or on another path, may read first, and would find what one side alone has written. Where what was written depends
on the inputs and is read by the next forward, the model carries state from request to request anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared_hooks.trace import NEVER, Event, Storage
from shared_hooks.views import LiveSet


def outside_writes(events: list[Event]) -> Iterator[tuple[Storage, str]]:
    """Each storage that existed before and is written, and what the model does to it."""
    written = {storage: None for event in events for storage in event.writes if storage.outside and not storage.foreign}
    for storage in written:
        carries = storage.tainted < NEVER and _live_at_start(storage, events)
        yield storage, "keeps values of this request for the next one in" if carries else "writes to"


def _live_at_start(storage: Storage, events: list[Event]) -> bool:
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
