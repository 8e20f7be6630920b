"""What it may cost to take an account's frames while others send, too: who costs more waits between two of them.

A frame that is cheap to send can be dear to take (thousands of ids, a description of a cut that has to be parsed), and
Python's lock is everybody's. The time that threads compute on an account's frames drains at the rate it may have; what
is left above a burst is waited for. One who is alone waits for nothing, and owes nothing later.

And an account's frames are taken one at a time, on however many streams they come: else each of its streams would be
one more thread that everybody else waits for.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

BURST_SECONDS = 0.05
"""Seconds of computing that need not be waited for."""
MOST_SECONDS = 10.0
"""To wait at a time."""
PRESENT_SECONDS = 1.0
"""An account whose last frame is so old counts as one that sends."""
KEPT = 1024


class Pace:
    """Limits what the frames of each account cost. ``share``: of one processor's time, for an account. Any thread may
    call.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._owed: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Seconds of computing by account, and when that was; who sent last is last."""
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def turn(self, account: str) -> threading.Lock:
        """Who has it takes a frame. The same for all streams of an account; to be kept as long as the stream lives."""
        with self._lock:
            found = self._turns.get(account)
            if found is None:
                found = self._turns[account] = threading.Lock()
            return found

    def spent(self, account: str, seconds: float) -> None:
        """A thread computed so long on a frame of it."""
        with self._lock:
            now = self._clock()
            owed = self._left(account, now) + seconds
            if self._alone(account, now):
                owed = min(owed, BURST_SECONDS)
            self._owed[account] = (owed, now)
            self._owed.move_to_end(account)
            if len(self._owed) > KEPT:
                self._owed.popitem(last=False)

    def wait(self, account: str) -> float:
        """Seconds until its next frame is taken."""
        with self._lock:
            now = self._clock()
            owed = self._left(account, now) - BURST_SECONDS
            if owed <= 0 or self._alone(account, now):
                return 0.0
            return min(owed / self._share, MOST_SECONDS)

    def _left(self, account: str, now: float) -> float:
        owed, at = self._owed.get(account, (0.0, now))
        return max(0.0, owed - self._share * (now - at))

    def _alone(self, account: str, now: float) -> bool:
        for name in reversed(self._owed):
            if name != account:
                return self._owed[name][1] < now - PRESENT_SECONDS
        return True
