"""Sends what is due, and says how late it was itself: one process's share of the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from edge_client import interrupts
from edge_client.benching.load import ABANDONED, CONNECTION, Ended, Lane, Shot

TICK: Final = 0.05
"""Seconds between two looks at what has taken too long."""
GONE: Final = 20
"""Errors of the connection in a row, none of them from before the last answer, after which nothing more is sent."""
LOST: Final = "the server was gone"
GRACE: Final = 2.0
"""Seconds after the time of the last request, for those that end themselves."""


@dataclass
class Fired:
    """``processor``: seconds that this process had of a processor while it sent, ``seconds`` long. ``why``: it ended
    before its time, and why; None: it did not.
    """

    ended: list[Ended] = field(default_factory=list)
    processor: float = 0.0
    seconds: float = 0.0
    why: str | None = None


class Generator:
    """``lanes``: by the number of the client, as shots have it."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._in_a_row = 0
        self._run = 0

    def begin(self) -> None:
        """Connects all; raises what the first raises that cannot."""
        for lane in self.lanes:
            lane.begin()

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def fire(self, shots: Sequence[Shot], begin: float, give_up: float) -> Fired:
        """``begin``: `time.monotonic` of second 0. Returns when all have ended; Ctrl-C and `stop` end it before."""
        with self._lock:
            self._run += 1
            self._ended, self._in_a_row, run = [], 0, self._run
        fired = Fired()
        before, since = time.process_time(), time.monotonic()
        sent: list[Shot] = []
        try:
            fired.why = self._send(shots, begin, run, sent)
            fired.processor, fired.seconds = time.process_time() - before, time.monotonic() - since
            if not self.stop.is_set():
                self._wait(len(sent), time.monotonic() + give_up + GRACE)
            if fired.why is None and self._in_a_row >= GONE:  # after the last had been sent
                fired.why = LOST
        except KeyboardInterrupt:
            interrupts.heard()
            fired.why = "interrupted"
        if not fired.seconds:
            fired.processor, fired.seconds = time.process_time() - before, time.monotonic() - since
        now = time.monotonic()
        with self._lock:
            self._run += 1  # who ends after this is not counted any more
            fired.ended = self._ended
        known = {one.number for one in fired.ended}
        fired.ended += [
            Ended(one.number, 0, int(1e9 * (now - begin - one.at)), ABANDONED)
            for one in sent
            if one.number not in known
        ]
        return fired

    def _send(self, shots: Sequence[Shot], begin: float, run: int, sent: list[Shot]) -> str | None:
        ticked = time.monotonic()
        for shot in shots:
            intended = begin + shot.at
            while (left := intended - time.monotonic()) > 0:
                if self.stop.wait(min(left, TICK)):
                    return "interrupted"
                ticked = self._tick(ticked)
            if self.stop.is_set():
                return "interrupted"
            if self._in_a_row >= GONE:
                return LOST
            ticked = self._tick(ticked)
            sent.append(shot)
            self.lanes[shot.client].send(shot, intended, lambda ended: self._over(ended, run))
        return None

    def _tick(self, ticked: float) -> float:
        now = time.monotonic()
        if now - ticked < TICK:
            return ticked
        for lane in self.lanes:
            lane.tick()
        return now

    def _wait(self, sent: int, until: float) -> None:
        while len(self._ended) < sent and time.monotonic() < until and not self.stop.wait(TICK):
            self._tick(0.0)

    def _over(self, ended: Ended, run: int) -> None:
        with self._lock:
            if run != self._run:
                return
            self._ended.append(ended)
            self._in_a_row = self._in_a_row + 1 if ended.error in CONNECTION else 0
