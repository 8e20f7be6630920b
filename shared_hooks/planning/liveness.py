"""Which elements of which storages are alive across each cut: the frontier.

Going back from the end of a run, a read makes elements of a storage live and an overwrite kills them. That happens at
the storage's own events only, so each storage keeps those alone (its *story*), and what is live at a cut is worked out
when somebody asks: the effort is that of the events that follow the cut, the memory that of a few sets on the way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from shared_hooks.planning.branches import Branch
from shared_hooks.recording import NEVER, Storage, Trace
from shared_hooks.tensors import LiveSet, View

# Other names of a cut: a module that is no layer, because it holds layers, stands for the last of them that ran; and
# a name that was shortened where it was shown, as "…4.conv2", for the one layer or block that it fits.


def last_layer(block: str, ids: Mapping[str, int]) -> int | None:
    """The last layer inside ``block``, of ``ids`` (name -> number); None where none is in it. With "…" it is the only
    layer that it fits, or the only block; None where there are several.
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
    """The modules that hold these layers, in the order in which they are met."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.partition("#")[0].split(".")
        found.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts))))
    return list(found)


Frontier = dict[Storage, LiveSet]

_STRIDE = 16
"""A set is kept every so many events of a storage, so that cuts may be asked for in any order ..."""
_LIGHT = 4096
"""... if it consists of no more than so many numbers."""


class Liveness:
    """The frontiers of one trace, worked out when asked for. Safe with threads: what is kept is only ever replaced."""

    def __init__(self, trace: Trace, branch: Branch | None = None) -> None:
        """``branch``: of what happens, only that which does so behind it."""
        self._trace = trace
        self._branch = branch
        stories: dict[Storage, _Story] = {}
        events = trace.events if branch is None else [event for event in trace.events if branch.is_later(event.seq)]
        for event in sorted(events, key=lambda event: event.seq):
            for storage, view in event.reads:
                if storage.created < event.seq and storage.tainted < NEVER:
                    _story(stories, storage).note(event.seq, view, read=True)
            # of one operation, what it overwrites it does so after it has read
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
        """What is read after ``cut`` (a seq; 0 = before anything ran) of what depends on the inputs by then.

        Values that do not depend on the inputs are left out; the cloud computes them itself. A storage that is only
        overwritten later must be there, too, though nothing of it is sent.
        """
        if cut == 0 and self._trace.foreign >= 0:
            # somebody reads without being seen: the whole model on the other side gets the whole inputs
            return {value.storage: LiveSet.full(value.storage.elements) for value in self._trace.inputs}
        return dict(self._across(cut))

    def across_branch(self) -> Frontier:
        """What is read behind the branch cut of what depends on the inputs by then and is made before it. A storage
        that is only overwritten later must be there, too.
        """
        branch, found = self._branch, {}
        assert branch is not None
        for storage, story in self._stories:
            begun = max(storage.created, storage.tainted)
            if begun >= branch.end.exit or (begun >= 0 and branch.is_later(begun)):
                continue
            live = story.after(-1)
            if live or story.last_write >= 0:
                # what the tail reads may hang on the data: then a part is not enough to be safe
                found[storage] = LiveSet.full(storage.elements) if self._last_dynamic > branch.end.exit else live
        return found

    def _across(self, cut: int) -> Iterator[tuple[Storage, LiveSet]]:
        for number in np.flatnonzero((self._begun < cut) & (self._ended > cut)).tolist():
            storage, story = self._stories[number]
            live = story.after(cut)
            if live or story.last_write > cut:
                # what the tail reads may hang on the data: then a part is not enough to be safe
                yield storage, LiveSet.full(storage.elements) if self._last_dynamic > cut else live


def _story(stories: dict[Storage, _Story], storage: Storage) -> _Story:
    found = stories.get(storage)
    if found is None:
        found = stories[storage] = _Story(storage.elements)
    return found


class _Story:
    """What happened to one storage, in order."""

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
        """The last seq that says anything about it."""
        return max(self.last_write, self.seqs[-1] if self.seqs else -1)

    def after(self, cut: int) -> LiveSet:
        """What is live right after ``cut``."""
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
        """A place at or after the wanted one at which the set is known."""
        place, live = self._latest
        if wanted <= place < wanted + _STRIDE:
            return place, live
        for place in range(wanted + -wanted % _STRIDE, len(self.views), _STRIDE):
            kept = self._kept.get(place)
            if kept is not None:
                return place, kept
        return len(self.views), self._empty


def frontier_bytes(frontier: Frontier) -> int:
    """Bytes that cross, raw."""
    return sum(live.sent * storage.itemsize for storage, live in frontier.items())
