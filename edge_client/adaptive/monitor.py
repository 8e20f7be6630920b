"""The thread beside the requests of ``--split auto``: it measures the link when no request shows it, and contacts a
server that is gone until it is back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from edge_client.adaptive.controller import ChosenWay, SplitController
from edge_client.call import Load
from edge_client.core import ClientCore
from edge_client.planning.link import Curve, Link
from edge_client.probing import LinkProber
from edge_client.screen import number
from edge_client.transport import State, now_ns
from shared_hooks.errors import Cancelled, IsthmusError, ServerUnavailable, logged
from shared_hooks.profiling.profile import Profile

# The decisions of ``--split auto`` with their times and numbers: kept, logged, and passed to listeners.


log = logging.getLogger("edge_client.adaptive")

KEPT: Final = 4096
"""About 1.4 kB each; `--log-decisions` has all of them."""


class Decisions:
    """Decisions and events in order; the oldest are dropped. Thread-safe.

    A listener is called with one at a time, in order, so a slow listener delays decisions. Each is a dictionary with
    ``seconds`` since the start and ``kind``: "choice" (one per request: ``candidate``, ``moved``, ``reason``, and the
    controller's numbers), "hedge", "gone", "back", "found", "probe", "allowed" (what the server lets this side use) or
    "refused" (a witness disabled a cut).
    """

    def __init__(self, on_decision: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._began = time.monotonic()
        self._listeners = [] if on_decision is None else [on_decision]
        self._lock = threading.RLock()  # a listener may itself cause an event

    @property
    def all(self) -> list[dict[str, Any]]:
        """Those so far, the oldest first, as a new list."""
        with self._lock:
            return list(self._kept)

    @property
    def began(self) -> float:
        """The ``time.monotonic()`` from which ``seconds`` count."""
        return self._began

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        """Call ``listener`` with all later ones; returns the earlier ones."""
        with self._lock:
            self._listeners = [*self._listeners, listener]
            return list(self._kept)

    def forget(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one != listener]

    def choice(self, choice: ChosenWay) -> None:
        """Add the choice for a request."""
        level = logging.INFO if choice.moved else logging.DEBUG
        known: dict[str, Any] = {"candidate": choice.candidate.name}
        if choice.candidate.codec:
            known["codec"] = choice.candidate.codec
        known |= {"moved": choice.moved, "reason": choice.reason}
        self._add("choice", {**known, **choice.numbers}, level)

    def event(self, kind: str, level: int = logging.INFO, **known: Any) -> None:
        """Add an event that changed, or may change, the choice."""
        self._add(kind, known, level)

    def _add(self, kind: str, known: dict[str, Any], level: int) -> None:
        finite = {name: _kept(value) for name, value in known.items()}
        with self._lock:
            entry = {"seconds": round(time.monotonic() - self._began, 4), "kind": kind, **finite}
            self._kept.append(entry)
            log.log(level, "%s", _sentence(kind, known))
            for listener in self._listeners:
                listener(entry)


def _kept(value: Any) -> Any:
    """Return a number without spurious digits; None for what JSON cannot represent."""
    if not isinstance(value, float):
        return value
    return None if value in (math.inf, -math.inf) else round(value, 6)


def _sentence(kind: str, known: Mapping[str, Any]) -> str:
    """Return a decision as a sentence; all its numbers go to listeners."""
    if kind == "choice":
        codec = f" with {known['codec']}" if "codec" in known else ""
        predicted = "" if known.get("predicted_ms") is None else f", {known['predicted_ms']:.1f} ms predicted"
        here = f"{known['candidate']}{codec}{predicted}: {known['reason']}"
        up, rtt = known.get("up_bytes_per_second"), known.get("rtt_ms")
        link = "" if not up or rtt is None else f" (link {number(up * 8 / 1e6)} Mbit/s up, {rtt:.1f} ms round trip)"
        return f"{'now ' if known['moved'] else ''}{here}{link}"
    reported = {
        "hedge": "{candidate} is late, so the request is computed here, too: {reason}",
        "gone": "the server is gone: {reason}",
        "back": "the server is back",
        "found": "the server is there",
        "refused": "{cut} is not used any more: {reason}",
        "allowed": "the server lets this side use other cuts",
    }
    if kind in reported:
        return reported[kind].format_map(defaultdict(str, known)).removesuffix(": ")
    return f"{kind}: {', '.join(f'{name} {_shown(value)}' for name, value in known.items() if value is not None)}"


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


# A probe of the link beside requests: trains of bytes that grow until one of them reveals the rate.
#
# A link that was fast a second ago may be slow now, and a train for the fast link fills the slow one: requests behind
# it are late, and make the link look slower still. So a probe begins with few bytes, and continues with four times as
# many only where that took no measurable time: on a fast link, or in a token bucket that lets it pass.

FIRST: Final = 16 << 10
GROWTH: Final = 4
CLEAR_NS: Final = 10e6
"""The duration of a round that is the link's own time, not a thread's."""
AGREE: Final = 1.5

Train = Callable[[int, int], tuple[float, float]]
"""Sends so many bytes, and so many more directly after them. Returns the time that the second took to arrive, and the
time of both beyond an empty round (ns). Raises ServerUnavailable if they do not arrive in time.
"""


def probed(train: Train, rtt_ns: float, largest: int, believed_ns: float, patience_ns: float) -> Link:
    """Return the link in the upward direction; nothing is known of the other.

    ``largest``: bytes of the largest first round of a train; ``believed_ns``: the estimated time of a byte;
    ``patience_ns``: the time limit of a train; a link on which one does not arrive is at most that fast.
    """
    size = min(FIRST, largest)
    while True:
        small = max(1, size // 2)
        ns_per_byte = _ns_per_byte(train, size, small, believed_ns, patience_ns)
        if size >= largest or small * ns_per_byte >= CLEAR_NS:
            break
        size = min(largest, GROWTH * size)
    points = [(0, rtt_ns), (small, rtt_ns + small * ns_per_byte), (size, rtt_ns + size * ns_per_byte)]
    return Link(Curve(tuple(points if small < size else [points[0], points[2]])), Curve(((0, 0.0),)))


def _ns_per_byte(train: Train, large: int, small: int, believed_ns: float, patience_ns: float) -> float:
    """Return nanoseconds per byte of the faster of two rounds, if the first is inconsistent, or small and suggests a
    slower link than estimated: a stall is not the link.

    The second round's arrival shows the rate. The whole train shows less (it includes a token bucket's burst), but
    counts if a busy server received both rounds at once.
    """
    found: list[float] = []
    while len(found) < 2:
        try:
            second_ns, both_ns = train(large, small)
        except ServerUnavailable:
            return patience_ns / (large + small)
        second, whole = second_ns / small, both_ns / (large + small)
        found.append(max(second, whole, 1 / small))
        slow = small * found[-1] >= CLEAR_NS and found[-1] >= AGREE * believed_ns
        if whole < AGREE * second and not (slow and large <= FIRST):
            break
    return min(found)


Check = Callable[[], None]
"""Raises Cancelled once the monitor is stopped."""
Connect = Callable[[Check], tuple[Profile, Link, Load]]

TICK_SECONDS: Final = 0.05
CALL_EVERY_SECONDS: Final = 0.5
"""The interval of attempts to contact a server that is gone."""
PROBE_SECONDS: Final = 1.5
"""The time limit of a round, which bounds the link's speed."""


class ServerMonitor:
    """Probes and contacts the server; reports everything to the controller, under ``lock``.

    ``connect`` is called, without the lock, when a server answers for the first time that was not available at the
    start: it measures what `SplitController.server_found` needs, and checks periodically whether to continue.
    """

    def __init__(
        self,
        client: ClientCore,
        controller: SplitController,
        lock: threading.Lock,
        decisions: Decisions,
        connect: Connect | None,
    ) -> None:
        assert client.server is not None
        self.there = connect is None
        """Whether the server answered last."""
        self._client = client
        self._controller = controller
        self._lock = lock
        self._decisions = decisions
        self._connect = connect
        self._prober = LinkProber(client.server, credentials=client.connection.credentials)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edge-monitor", daemon=True)
        self._called_at = 0.0
        self._complaint = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stopped.set()
        self._prober.close()
        if self._thread.is_alive():
            self._thread.join()

    def gone(self, why: str, seconds: float = 0.0) -> None:
        """The server does not answer, or asks for a pause of so many seconds. Thread-safe."""
        with self._lock:
            if not self.there:
                return
            self.there = False
            self._called_at = time.monotonic() + seconds - CALL_EVERY_SECONDS if seconds else self._called_at
            self._controller.server_gone(now_ns())
        self._decisions.event("gone", reason=why)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            with logged(log, f"the monitor over {self._client.server}"):  # requests continue with what is known
                if self.there:
                    self._probe_if_wanted()
                elif time.monotonic() - self._called_at >= CALL_EVERY_SECONDS:
                    self._called_at = time.monotonic()
                    self._call()

    def _probe_if_wanted(self) -> None:
        with self._lock:
            largest = self._controller.wants_probe(now_ns())
            link = None if largest is None else self._controller.link
        if largest is not None and link is not None:
            try:
                self._probe(largest, 1e9 / link.up.bytes_per_second)
            except IsthmusError as error:
                if not self._stopped.is_set():
                    self.gone(f"probe: {error}")

    def _probe(self, largest: int, believed_ns: float) -> None:
        """Send empty rounds, then bytes. Raises ServerUnavailable if not even empty ones are answered."""
        nothing = min((self._prober.round(0, 0, PROBE_SECONDS) for _ in range(2)), key=lambda one: one.network_ns)
        rtt = float(nothing.network_ns)

        def train(large: int, small: int) -> tuple[float, float]:
            with self._lock:
                self._controller.probe_sends(large + small)
            _, times = self._prober.train([(large, 0), (small, 0)], PROBE_SECONDS)
            return times.receive_ns, times.total_ns - rtt

        link = probed(train, rtt, largest, believed_ns, PROBE_SECONDS * 1e9)
        with self._lock:
            self._controller.observe_link(now_ns(), link, nothing.load)
        self._decisions.event(
            "probe", logging.DEBUG, rtt_ms=link.rtt_ns / 1e6, up_bytes_per_second=link.up.bytes_per_second
        )

    def _call(self) -> None:
        """Check whether the server is back, and repair the requests' own connection before one needs it."""
        try:
            self._prober.round(0, 0, PROBE_SECONDS)
            if self._client.state is not State.READY:
                self._client.connect(PROBE_SECONDS)
            found = self._connect(self._check) if self._connect is not None else None
            with self._lock:
                if found is not None:
                    self._controller.server_found(now_ns(), *found)
                    self._connect = None
                else:
                    self._controller.server_back(now_ns())
                self.there = True
        except IsthmusError as error:
            if not self._stopped.is_set():
                self._complain(error)
            return
        self._complaint = ""
        self._decisions.event("back" if found is None else "found")
        self._probe_if_wanted()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise Cancelled("the monitor is stopped")

    def _complain(self, error: IsthmusError) -> None:
        """Log each kind of error once."""
        kind = type(error).__name__
        if kind != self._complaint:
            self._complaint = kind
            log.info("%s: %s: %s", self._client.server, kind, error)
