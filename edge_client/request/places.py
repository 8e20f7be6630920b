"""`Places`: room for requests between head and answer, by number and by the bytes that they send."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Final

from shared_hooks.showing import size

KINDS: Final = 256
"""Cuts of which it is known what they send."""


class Places:
    """Any thread may call. At most ``most_bytes`` lie between heads and answers, or one request that has more.

    What a head will make is not known before it has run: it is taken for as large as the last one of its cut, and the
    first of a cut for as large as the largest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._taken = 0
        self._bytes = 0
        self._sizes: dict[Hashable, int] = {}

    def __str__(self) -> str:
        return f"{self._taken} requests of {size(self._bytes)}"

    def take(self, cut: Hashable, most: int, until: float) -> Place | None:
        """A place, once fewer than ``most`` are taken and there is room for a frontier of ``cut``; None where there is
        none before ``until`` (``time.monotonic()``).
        """
        with self._changed:

            def is_free() -> bool:
                return not self._taken or (self._taken < most and self._bytes + self._expected(cut) <= self._most_bytes)

            if not self._changed.wait_for(is_free, max(0.0, until - time.monotonic())):
                return None
            self._taken += 1
            place = Place(self, cut)
            self._weigh(place, self._expected(cut))
            return place

    def _expected(self, cut: Hashable) -> int:
        return self._sizes.get(cut) or max(self._sizes.values(), default=0)

    def weigh(self, place: Place, nbytes: int) -> None:
        """What its head has made, in bytes."""
        with self._changed:
            if len(self._sizes) >= KINDS:
                self._sizes.clear()
            self._sizes[place.cut] = nbytes
            if not place.is_left:
                self._weigh(place, nbytes)

    def leave(self, place: Place) -> None:
        """Once; more often without effect."""
        with self._changed:
            if not place.is_left:
                self._weigh(place, 0)
                place.is_left = True
                self._taken -= 1

    def _weigh(self, place: Place, nbytes: int) -> None:
        self._bytes += nbytes - place.nbytes
        place.nbytes = nbytes
        self._changed.notify_all()


class Place:
    """Of one request: ``nbytes`` of the room."""

    __slots__ = ("_places", "cut", "is_left", "nbytes")

    def __init__(self, places: Places, cut: Hashable) -> None:
        self._places = places
        self.cut = cut
        self.nbytes = 0
        self.is_left = False

    def weigh(self, nbytes: int) -> None:
        self._places.weigh(self, nbytes)

    def leave(self) -> None:
        self._places.leave(self)
