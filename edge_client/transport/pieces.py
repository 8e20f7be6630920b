"""How large the pieces are in which payloads go: every message has its price, and nothing else goes while one goes.

A quick link takes large ones; on a slow one, small ones let heartbeats, cancels and back-pressure through.
"""

from __future__ import annotations

from typing import Final

LARGEST: Final = 4 << 20
ROOM: Final = 64 << 10
"""For the header of a request before its first piece; one that is larger goes alone."""
QUICK_SECONDS: Final = 0.01
SLOW_SECONDS: Final = 0.04
"""Larger pieces while one goes within the former, smaller ones when one takes the latter."""


class Pieces:
    """``nbytes``: of the next piece. It begins with ``least``, and is that again on a link that has become slow."""

    def __init__(self, least: int) -> None:
        self._least = self._most = self.nbytes = least

    def up_to(self, message_bytes: int) -> None:
        """The other side takes messages of so many bytes, with `ROOM` for what is not payload."""
        self._most = max(1, min(LARGEST, message_bytes) - ROOM)
        self._least = self.nbytes = min(self._least, self._most)

    def gone(self, nbytes: int, seconds: float) -> None:
        """A piece went through flow control in so many seconds; one that was not full tells nothing."""
        if nbytes >= self.nbytes and seconds < QUICK_SECONDS:
            self.nbytes = min(self._most, 2 * self.nbytes)
        elif seconds > SLOW_SECONDS:
            self.nbytes = max(self._least, self.nbytes // 2)
