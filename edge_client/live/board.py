"""`Board`: what the page shows, in rings that forget the oldest, and who has seen how much of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from edge_client.live.entries import Entry

RINGS: Final[Mapping[str, int]] = {"requests": 240, "events": 200, "link": 600, "edge": 600, "cloud": 600}
"""Entries of each that are kept: of requests the newest, of what is sampled once a second ten minutes."""


class Board:
    """Any thread may add and ask. A reader comes with a number, and gets what was added since: nothing is kept for
    readers, so one that is slow misses what has left its ring meanwhile, and costs nothing.
    """

    def __init__(self, about: Entry) -> None:
        self.about = about
        self.counts = {"answered": 0, "failed": 0, "cancelled": 0, "left_out": 0}
        self._rings: dict[str, deque[tuple[int, Entry]]] = {name: deque(maxlen=most) for name, most in RINGS.items()}
        self._latest: dict[str, tuple[int, Any]] = {}
        self._number = 0
        self._lock = threading.Lock()

    def add(self, ring: str, entry: Entry) -> None:
        """One more of these."""
        with self._lock:
            self._number += 1
            self._rings[ring].append((self._number, entry))

    def set(self, name: str, value: Any) -> None:
        """Something of which only the latest counts, such as what observers saw."""
        with self._lock:
            self._number += 1
            self._latest[name] = self._number, value

    def count(self, name: str) -> int:
        """One more; how many there were before."""
        with self._lock:
            before = self.counts[name]
            self.counts[name] = before + 1
            return before

    def since(self, number: int) -> tuple[int, Entry]:
        """What was added after ``number`` (0: all that is kept), and the number to come with next."""
        with self._lock:
            found: Entry = {}
            for name, ring in self._rings.items():
                new: list[Entry] = []
                for added, entry in reversed(ring):
                    if added <= number:
                        break
                    new.append(entry)
                if new:
                    found[name] = new[::-1]
            found.update({name: value for name, (added, value) in self._latest.items() if added > number})
            if found:
                found["counts"] = dict(self.counts)
            return self._number, found

    def whole(self) -> tuple[int, Entry]:
        """All that is kept, with what holds for all of it."""
        number, found = self.since(0)
        return number, {
            "now": round(time.time(), 3),
            "about": self.about,
            "counts": dict(self.counts),
            "kept": dict(RINGS),
            **{name: [] for name in self._rings},
            **found,
        }
