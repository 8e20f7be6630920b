"""Is the other side alive? It said how often it would say so while it has requests of ours.

What pings do not see, heartbeats do: a proxy answers for a server that is gone, and gRPC's own threads answer for a
process that does nothing any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

BEATS: Final = 4
"""A server is silent when so many heartbeats are missing."""
LONGEST_SECONDS: Final = 60.0
FADE: Final = 0.9
"""What a long silence that ended well leaves behind of itself at each frame."""


class Pulse:
    """One connection's bound on silence, in seconds: ``beats`` missing heartbeats, or twice the longest silence lately.

    A slow link keeps a frame for long behind others, so what was borne once is borne again, and after an alarm twice as
    much. One thread calls `heard`, one `watch`.
    """

    def __init__(self, heartbeat: float) -> None:
        self._least = self.bound = BEATS * heartbeat
        self._heard = time.monotonic()

    def heard(self) -> None:
        """A frame came."""
        now = time.monotonic()
        silence, self._heard = now - self._heard, now
        self.bound = max(self._least, FADE * self.bound, min(LONGEST_SECONDS, 2 * silence))

    @property
    def is_weak(self) -> bool:
        """Whether the silence is half of what is borne: too little to leave, enough to do without meanwhile."""
        return time.monotonic() - self._heard > self.bound / 2

    def watch(self, ended: threading.Event, patience: Callable[[], float]) -> float:
        """Seconds of silence as soon as it is longer than ``patience()`` times the bound; 0 when ``ended``.

        A patience of 0: nothing is expected now.
        """
        self._heard = time.monotonic()
        while not ended.wait(self._least / (2 * BEATS)):
            if not (times := patience()):
                self._heard = time.monotonic()
            elif (silence := time.monotonic() - self._heard) > times * self.bound:
                self.bound = max(self._least, min(LONGEST_SECONDS, 2 * self.bound))
                return silence
        return 0.0
