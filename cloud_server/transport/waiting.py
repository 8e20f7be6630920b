"""Calls that wait for their client, or for something to tell it, and that nothing else bounds: each holds a thread.

Whoever comes gets a place. Where there are too many, the address that has most of them loses its oldest: who sends what
it came for is through in a moment, so those who stay are those who send nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared_hooks.errors import IsthmusError, ServerUnavailable


class Place:
    """The place of one call. ``error``: why it has to go; None while it may stay."""

    def __init__(self, address: str, leave: Callable[[], object]) -> None:
        self.address = address
        self.error: IsthmusError | None = None
        self._leave = leave
        self.since: float | None = time.monotonic()
        """When it began to wait for its client; None for one that waits for the server."""

    def send_away(self, error: IsthmusError) -> None:
        self.error = error
        self._leave()


class WaitingCalls:
    """At most ``most`` at a time, each for its client's message at most ``seconds``. Any thread may call."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._lock = threading.Lock()
        self._places: dict[Place, None] = {}  # the oldest first
        self._of: Counter[str] = Counter()

    @contextmanager
    def place(self, address: str, leave: Callable[[], object]) -> Iterator[Place]:
        """For as long as the call waits. ``leave`` ends it, from any thread; it may not block."""
        mine = self.enter(address, leave)
        try:
            yield mine
        finally:
            self.leave(mine)

    def enter(self, address: str, leave: Callable[[], object]) -> Place:
        """The same without a block: `leave` follows."""
        mine = Place(address, leave)
        gone = None
        with self._lock:
            if len(self._places) >= self._most:
                # One more of this address counts, so of equals the newcomer's own is ended.
                most = max(self._of, key=lambda name: self._of[name] + (name == address) / 2)
                gone = next(one for one in self._places if one.address == most)
                self._forget(gone)
            self._places[mine] = None
            self._of[address] += 1
        if gone is not None:
            gone.send_away(
                ServerUnavailable(f"{self._most} calls wait here, most of them of this address: the oldest is ended")
            )
        return mine

    def leave(self, place: Place) -> None:
        """It waits no more; may be said again."""
        with self._lock:
            self._forget(place)

    def sweep(self) -> None:
        """Sends those away whose message does not come."""
        with self._lock:
            until = time.monotonic() - self._seconds
            late = [one for one in self._places if one.since is not None and one.since < until]
            for one in late:
                self._forget(one)
        for one in late:
            one.send_away(ServerUnavailable(f"no message came within {self._seconds:g} s"))

    def _forget(self, place: Place) -> None:
        if place in self._places:
            del self._places[place]
            self._of[place.address] -= 1
            if not self._of[place.address]:
                del self._of[place.address]

    def __len__(self) -> int:
        return len(self._places)
