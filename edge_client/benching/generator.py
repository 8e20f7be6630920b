"""Send what is due, and measure the generator's own lateness: one process's share of the load."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from edge_client import interrupts
from edge_client.benching.load import ABANDONED, CONNECTION, Ended, Lane, Over, Shot
from shared_hooks.errors import DeadlineExceeded

TICK: Final = 0.05
"""Seconds between checks for timeouts."""
GONE: Final = 20
"""Consecutive connection errors, none from before the last answer, after which nothing more is sent."""
LOST: Final = "the server was gone"
AHEAD: Final = 0.2
"""Seconds from an order to second 0, so that all processes get it in time."""
GRACE: Final = 2.0
"""Seconds after the end of the last request, for those that end themselves."""


@dataclass
class Fired:
    """Result of a generator. ``processor``: its processor seconds while sending, for ``seconds``. ``why``: the reason
    why it ended early, or None.
    """

    ended: list[Ended] = field(default_factory=list)
    processor: float = 0.0
    seconds: float = 0.0
    why: str | None = None


class Generator:
    """Sends shots. ``lanes``: by client number, as in shots."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._in_a_row = 0
        self._run = 0

    def begin(self) -> None:
        """Connect all clients. Raises the first failure."""
        for lane in self.lanes:
            lane.begin()

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def fire(self, shots: Sequence[Shot], begin: float, give_up: float) -> Fired:
        """Send the shots and return when all have ended; Ctrl-C and `stop` end it early. ``begin``: second 0
        (`time.monotonic`).
        """
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
            interrupts.acknowledge()
            fired.why = "interrupted"
        if not fired.seconds:
            fired.processor, fired.seconds = time.process_time() - before, time.monotonic() - since
        now = time.monotonic()
        with self._lock:
            self._run += 1  # requests that end after this are not counted any more
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


class Gang(Protocol):
    """Sends the load of one run."""

    def fire(self, shots: Sequence[Shot], give_up: float) -> list[Fired]:
        """Send the shots; one result per process. Ends early, with the reason, at Ctrl-C and if the server is lost."""

    def close(self) -> None:
        """Disconnect all clients."""


class Alone:
    """One generator, in this process."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        """Make and connect all clients. Raises what that raises."""
        made: list[Lane] = []
        self._generator = Generator(made)
        try:
            made.extend(lanes)
            self._generator.begin()
        except BaseException:
            self._generator.close()
            raise

    def fire(self, shots: Sequence[Shot], give_up: float) -> list[Fired]:
        return [self._generator.fire(shots, time.monotonic() + AHEAD, give_up)]

    def close(self) -> None:
        self._generator.close()


Order = tuple[Shot, float, int, Over]


class WaitingLane(ABC):
    """A client with as many threads as it may have requests in flight.

    If all of them are busy, due requests wait here: their time counts from their scheduled start.
    """

    def __init__(self, in_flight: int, give_up: float) -> None:
        self._in_flight = in_flight
        self._give_up = give_up
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def request_within(self, shot: Shot, left: float, ended: Ended) -> None:
        """Make a request within ``left`` seconds, and store the result in ``ended``. Its exceptions are counted."""

    @abstractmethod
    def disconnect(self) -> None:
        """Cancel what is in flight."""

    def begin(self) -> None:
        for _ in range(self._in_flight):
            self._threads.append(threading.Thread(target=self._work, name="bench", daemon=True))
            self._threads[-1].start()

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        self._orders.put((shot, intended, int(1e9 * (time.monotonic() - intended)), over))

    def tick(self) -> None:
        return  # each request has its deadline, and a thread that waits for it

    def close(self) -> None:
        for _ in self._threads:
            self._orders.put(None)
        self.disconnect()
        for thread in self._threads:
            thread.join(1.0)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            shot, intended, late_ns, over = order
            ended = Ended(shot.number, late_ns, 0)
            try:
                left = intended + self._give_up - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded("it waited here, behind others, until then")
                self.request_within(shot, left, ended)
            except Exception as failed:  # any failure is counted
                ended.error = type(failed).__name__
            ended.took_ns = int(1e9 * (time.monotonic() - intended))
            over(ended)
