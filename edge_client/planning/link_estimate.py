"""What the link carries now, from real transfers: a measured curve whose round trip and slowness are followed.

A transfer is one number for two unknowns. Where the bytes' time is the larger part of what is expected, or the
transfer is far slower than expected and not tiny, it speaks of the goodput; else of the round trip. A token bucket lets
small transfers pass at full speed, so a fast one is believed only from `FLOOR` bytes on; a slow one always.
"""

from __future__ import annotations

from typing import Final

from edge_client.planning.link import Curve, Link
from edge_client.planning.tracker import Tracker

FLOOR: Final = 32 << 10
TINY: Final = 2 << 10
SLOW: Final = 2.0
SLOW_LARGE: Final = 1.5
"""So many times slower than expected, a transfer that is mostly round trip speaks of the goodput after all; one of
`FLOOR` bytes sooner, or small transfers between would for ever call it noise."""
FASTEST_NS_PER_BYTE: Final = 0.02
"""No direction is taken to be faster than 50 GB/s: a curve may be flat, a time per byte may not be nothing."""


class _Way:
    """One direction: the measured shape of bytes to time, times a slowness."""

    def __init__(self, curve: Curve) -> None:
        self.slowness = Tracker(1.0)
        self.suspect_bytes = 0.0  # of the last transfer that spoke of this way
        self.take(curve)

    def take(self, curve: Curve, stale: bool = False) -> None:
        self.shape = Curve(tuple((n, ns - curve.ns(0) + n * FASTEST_NS_PER_BYTE) for n, ns in curve.points))
        self.slowness.reset(1.0, stale)

    def take_line(self, nbytes: float, ns: float, stale: bool = False) -> None:
        self.take(Curve(((0, 0.0), (max(1, int(nbytes)), max(ns, 0.0)))), stale)

    def base(self, nbytes: float) -> float:
        """Not below the cost of its bytes at the fastest, also for a curve of one point."""
        return max(self.shape.ns(nbytes), nbytes * FASTEST_NS_PER_BYTE, 1.0)

    def ns(self, nbytes: float) -> float:
        return self.slowness.value * self.base(nbytes) if nbytes > 0 else 0.0

    def observe(self, nbytes: float, ns: float) -> bool:
        """The bytes took so long; True for a sudden change, after which the shape is the line through it."""
        self.suspect_bytes = nbytes
        if self.slowness.observe(max(ns, nbytes * FASTEST_NS_PER_BYTE) / self.base(nbytes)):
            self.take_line(nbytes, self.ns(nbytes))
            return True
        return False

    def curve(self, fixed_ns: float) -> Curve:
        points = self.shape.points if len(self.shape.points) > 1 else ((0, 0.0), (1 << 20, self.base(1 << 20)))
        return Curve(tuple((n, fixed_ns + (self.slowness.value * ns if n else 0.0)) for n, ns in points))


class LinkEstimate:
    """``largest``: the most bytes that any candidate sends; a smaller `FLOOR` is taken when that is less."""

    def __init__(self, link: Link, largest: int) -> None:
        self._up, self._down = _Way(link.up), _Way(link.down)
        self._rtt = Tracker(link.rtt_ns, offset=1e3)
        self._largest = max(1, largest)
        self._floor = min(FLOOR, max(1, largest // 2))
        self.congested = False
        """Whether the last probe came in so late that the next one must tell why."""
        self.doubtful = False
        """Whether something was seen that only a probe can decide."""

    @property
    def link(self) -> Link:
        """As believed now."""
        return Link(self._up.curve(self._rtt.value), self._down.curve(0.0), "observed")

    @property
    def rtt_ns(self) -> float:
        return self._rtt.value

    def goodput(self) -> tuple[float, float]:
        """Bytes per second up and down, at the size of the largest request."""
        return tuple(self._largest / way.ns(self._largest) * 1e9 for way in (self._up, self._down))  # type: ignore[return-value]

    def ns(self, bytes_up: float, bytes_down: float) -> float:
        """Expected of a transfer."""
        return self._rtt.value + self._up.ns(bytes_up) + self._down.ns(bytes_down)

    def speaks_of_goodput(self, bytes_up: float, bytes_down: float) -> bool:
        """Whether such a transfer would tell the goodput, up or down, fast or slow."""
        ups, downs = self._up.ns(bytes_up), self._down.ns(bytes_down)
        return max(ups, downs) >= 0.3 * self.ns(bytes_up, bytes_down) and max(bytes_up, bytes_down) >= self._floor

    def observe(self, bytes_up: float, bytes_down: float, ns: float) -> bool:
        """A transfer; True for a sudden change."""
        ups, downs, rtt = self._up.ns(bytes_up), self._down.ns(bytes_down), self._rtt.value
        expected = ups + downs + rtt
        way, nbytes, own = (self._up, bytes_up, ups) if ups >= downs else (self._down, bytes_down, downs)
        mostly_bytes = own >= (0.25 if nbytes >= self._floor else 0.5) * expected
        slow = ns > (SLOW_LARGE if nbytes >= self._floor else SLOW) * expected and nbytes >= TINY
        if not mostly_bytes and not slow:
            if nbytes >= way.suspect_bytes / 2:  # as fast as ever: the slow one before was noise
                way.slowness.acquit()
            rest = ns - ups - downs
            # Bytes that a bucket let pass for nothing say of the round trip only that it is no longer than this.
            return self._rtt.observe(rest if rest > 0.2 * ns else min(rtt, ns))
        rest = ns - (expected - own)
        if rest < 0.1 * ns:  # faster than the round trip that was believed: that has fallen, too
            rest = own * ns / expected
            self._rtt.observe(min(rtt, ns))
        if rest < 0.67 * own and nbytes < self._floor:
            self.doubtful = True
            return False
        return way.observe(nbytes, rest)

    def bound(self, bytes_up: float, ahead: float, ns: float) -> None:
        """A transfer is not over after ``ns``, and perhaps ``ahead`` other bytes were before it: no faster than that.
        The next observation decides how much slower.
        """
        if ns <= self.ns(bytes_up + ahead, 0):
            return
        if bytes_up >= TINY:
            self._up.take_line(bytes_up + ahead, ns - self._rtt.value, stale=True)
        else:
            self._rtt.reset(ns - self._up.ns(ahead), stale=True)
        self.doubtful = True

    def replace(self, link: Link) -> bool:
        """A probe's result: believed where it differs, else averaged in. True for a sudden change."""
        congested = link.rtt_ns > SLOW * self._rtt.value and not self._rtt.stale
        if congested and not self.congested:  # it waited behind other bytes, or it is true: the next one tells
            self.congested = self.doubtful = True
            return False
        self.congested = self.doubtful = False
        nbytes, ns = link.up.points[-1]
        stale = self._up.slowness.stale
        if nbytes and not stale and 1 / 1.5 < ns / max(self.ns(nbytes, 0), 1.0) < 1.5:
            self._rtt.observe(link.rtt_ns)
            self.observe(nbytes, 0, ns)
            return False
        self._up.take(_without_burst(link.up))
        if link.down.points[-1][0]:
            self._down.take(link.down)
        self._rtt.reset(link.rtt_ns)
        return True

    def forget(self) -> None:
        """What was known is old: the next observations replace it."""
        for tracker in (self._up.slowness, self._down.slowness, self._rtt):
            tracker.reset(tracker.value, stale=True)
        self.doubtful = True


def _without_burst(curve: Curve) -> Curve:
    """A token bucket's first bytes are free, after an idle time only: where the last piece is far steeper than the
    whole, it alone is the link.
    """
    points = curve.points
    if len(points) < 3:
        return curve
    (size0, ns0), (size1, ns1) = points[-2:]
    last, whole = (ns1 - ns0) / (size1 - size0), (ns1 - points[0][1]) / size1
    return Curve(((0, points[0][1]), (size1, points[0][1] + size1 * (last if last > 1.7 * whole else whole))))
