"""A probe of the link: rounds of a given number of bytes in each direction. Nothing is computed or kept.

Frames take the same path as those of a request (one thread receives, another sends), so that a round costs what a
request of that size costs without a worker.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

from cloud_server.limits import Limits
from protos.isthmus.v1 import split_pb2
from protos.padding import Padding, pieces
from shared_hooks.errors import BadFrame, DeadlineExceeded, IsthmusError, ServerUnavailable, TooLarge

# Limits the time for reading an account's frames while others send: an account that costs more waits between two of
# them.
#
# A frame that is cheap to send can be expensive to read (thousands of ids, a description of a cut that has to be
# parsed), and all threads share Python's lock. The time spent on an account's frames drains at its permitted rate;
# what exceeds a burst is waited for. A single active account waits for nothing, and owes nothing later.
#
# An account's frames are read one at a time, whatever the number of its streams: otherwise each stream would be one
# more thread that all others wait for.


BURST_SECONDS = 0.05
"""Seconds of processing for which an account need not wait."""
MOST_SECONDS = 10.0
"""The longest single wait."""
PRESENT_SECONDS = 1.0
"""An account counts as active for this long after its last frame."""
KEPT = 1024


class AccountPace:
    """Limits the processing time of each account's frames. ``share``: of one processor, per account. Thread-safe."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._owed: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(seconds of processing owed, when that was) by account, the most recent sender last."""
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def turn(self, account: str) -> threading.Lock:
        """Return the lock to hold while a frame is processed. Shared by all streams of an account; keep it as long as
        the stream lives.
        """
        with self._lock:
            found = self._turns.get(account)
            if found is None:
                found = self._turns[account] = threading.Lock()
            return found

    def spent(self, account: str, seconds: float) -> None:
        """Charge the account for ``seconds`` of processing."""
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
        """Return seconds until the account's next frame may be processed."""
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


Reply = split_pb2.ProbeReply | Padding


class _Round:
    """A round whose last byte has arrived."""

    def __init__(self, began_ns: int, nbytes: int, answer_bytes: int) -> None:
        self.nbytes = nbytes
        self.answer_bytes = answer_bytes
        self.complete_ns = time.perf_counter_ns()
        self.receive_ns = self.complete_ns - began_ns


class ProbeStream:
    """One stream of rounds. One thread calls `receive`, another iterates `frames`."""

    def __init__(
        self, limits: Limits, load: Callable[[], split_pb2.Load], pay: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """``pay`` is called with the number of bytes before they are processed; it may block, or raise what ends the
        stream.
        """
        self._limits = limits
        self._pay = pay
        self._load = load
        self._rounds: queue.SimpleQueue[_Round | IsthmusError | None] = queue.SimpleQueue()
        self._began_ns: int | None = None
        self._received = 0
        self._count = 0

    def receive(self, frame: Padding) -> bool:
        """Process one frame; returns False if the stream accepts no more."""
        now_ns = time.perf_counter_ns()
        if self._began_ns is None:
            self._began_ns, self._received = now_ns, 0
        self._received += frame.nbytes
        most = self._limits.max_request_bytes
        if max(self._received, frame.answer_bytes) > most:
            self.end(TooLarge(f"probe: a round of more than {most} bytes, which is the limit"))
            return False
        try:
            self._pay(frame.nbytes)
        except IsthmusError as error:
            self.end(error)
            return False
        bytearray(frame.data)  # as a request's chunk is copied into its payload
        if frame.last:
            self._count += 1
            if self._count > self._limits.max_probe_rounds:
                self.end(ServerUnavailable(f"probe: {self._limits.max_probe_rounds} rounds were answered; start again"))
                return False
            if self._rounds.qsize() >= self._limits.max_in_flight:
                self.end(BadFrame("probe: the client does not wait for its answers"))
                return False
            self._rounds.put(_Round(self._began_ns, self._received, frame.answer_bytes))
            self._began_ns = None
        return True

    def end(self, error: IsthmusError | None = None) -> None:
        """End the stream after the complete rounds, with ``error`` if given."""
        self._rounds.put(error)

    def frames(self) -> Iterator[Reply]:
        """Yield the answers, until the client leaves. Raises the error that ended the stream."""
        while True:
            try:
                item = self._rounds.get(timeout=self._limits.probe_idle_seconds)
            except queue.Empty:
                began_ns = self._began_ns  # the other thread ends rounds meanwhile
                if began_ns is None or time.perf_counter_ns() - began_ns > 1e9 * self._limits.deadline_seconds:
                    raise DeadlineExceeded(
                        f"probe: no round in {self._limits.probe_idle_seconds:g} s; start again"
                    ) from None
                continue
            if item is None:
                return
            if isinstance(item, IsthmusError):
                raise item
            server_ns = time.perf_counter_ns() - item.complete_ns
            for data in pieces(item.answer_bytes, self._limits.chunk_bytes):
                self._pay(len(data))
                yield Padding(data)
            yield split_pb2.ProbeReply(
                last=True,
                received_bytes=item.nbytes,
                server_ns=server_ns,
                receive_ns=item.receive_ns,
                load=self._load(),
            )
