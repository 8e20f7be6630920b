"""Memory of what arrives and leaves in one piece: bodies of HTTP, and answers until they are fetched.

Natively both go in chunks, which are counted where they are kept. Here a whole message lies in the transport's memory
while a slow client sends or fetches it. Beyond the bound requests of the account that holds the most are evicted
(`sharing`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared_hooks.errors import ServerUnavailable, TooLarge
from shared_hooks.sharing import Holding, Party, Shares, giving_way


class Hold:
    """What one call holds, until the end of the block. ``leave`` ends the call, from any thread, without waiting."""

    def __init__(self, held: Held, party: Party, leave: Callable[[], object]) -> None:
        self.party = party
        self.leave = leave
        self.nbytes = 0
        self.since = time.monotonic()
        self._held = held

    def more(self, nbytes: int) -> None:
        """Raises TooLarge, or ServerUnavailable when there is no room."""
        self._held.take(self, nbytes)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        """It holds nothing any more."""
        self._held.give_back(self)


class Held:
    """At most ``limit`` bytes together. Any thread may call."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._shares = Shares(limit)
        self._holds: dict[Hold, None] = {}

    def hold(self, party: Party, leave: Callable[[], object]) -> Hold:
        """Nothing yet."""
        return Hold(self, party, leave)

    @property
    def nbytes(self) -> int:
        return self._shares.total

    def take(self, hold: Hold, nbytes: int) -> None:
        limit = int(self._shares.limit)
        if nbytes > limit:
            raise TooLarge(f"{nbytes} bytes in one message; at most {limit} are taken (max_inference_bytes)")
        gone: list[Hold] = []
        with self._lock:
            if not self._shares.has_room(nbytes):
                others = [Holding(one, one.party, one.nbytes, (one.since,)) for one in self._holds if one is not hold]
                found = giving_way(self._shares, hold.party, nbytes, others)
                if found is None:
                    raise ServerUnavailable(
                        f"messages of {self._shares.total} bytes arrive or wait to be fetched; max_inference_bytes is "
                        f"{limit}: try again later"
                    )
                gone = found
                for one in gone:
                    self._forget(one)
            self._shares.add(hold.party, nbytes)
            hold.nbytes += nbytes
            self._holds[hold] = None
        for one in gone:
            one.leave()

    def give_back(self, hold: Hold) -> None:
        with self._lock:
            self._forget(hold)

    def _forget(self, hold: Hold) -> None:
        if hold in self._holds:
            del self._holds[hold]
            self._shares.remove(hold.party, hold.nbytes)
            hold.nbytes = 0
