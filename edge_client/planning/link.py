"""The time that a link takes for a number of bytes each way, as measured by a probe or as given."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edge_client.screen import size
from shared_hooks.errors import SpecError
from shared_hooks.showing import short

# How fast one direction of a link is: a robust figure with its spread, or unknown.
#
# The time of a round's bytes is the difference of a large round and one of half its size: so neither the round trip
# nor a token bucket's burst counts. The figure is the median of all pairs of a large and a smaller round (Hodges and
# Lehmann 1963), and the interval is that of the rank test of Wilcoxon, Mann and Whitney: it assumes only that the
# noise is alike for both sizes, and one round in four may be far off.


LEAST_ROUNDS: Final = 3
"""The fewest rounds of either size for an estimate."""
Z: Final = 1.96
"""95 %; for three rounds of either size the whole range, 90 %."""
WIDEST: Final = 4.0
"""The largest ratio of an interval's ends; beyond that the speed is unknown."""


@dataclass(frozen=True)
class Speed:
    """Bytes per second. ``low`` to ``high``: the interval of the true value, given the noise (None: unknown). ``value``
    is None if it cannot be known, for the reason ``why``.
    """

    value: float | None
    low: float | None
    high: float | None
    why: str = ""

    @classmethod
    def exactly(cls, value: float) -> Speed:
        """Return a given speed; an infinite one is unknown."""
        if not math.isfinite(value):
            return cls(None, None, None, "more bytes take no more time")
        return cls(value, value, value)

    def times(self, factor: float) -> Speed:
        """Return the speed of a link ``factor`` times as fast."""
        value, low, high = (None if one is None else one * factor for one in (self.value, self.low, self.high))
        return Speed(value, low, high, self.why)

    @property
    def ratio(self) -> float:
        """``high`` over ``low``; infinite if either is unknown."""
        return self.high / self.low if self.low and self.high else math.inf

    def overlaps(self, other: Speed) -> bool:
        """Return whether both may be the same speed; False if either has no interval."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low <= other.high and other.low <= self.high

    @property
    def bounds(self) -> str:
        """As short text: the value with its interval, "at least" the lower end, or that it is unknown."""
        if self.value is None:
            return f"at least {mbit(self.low)}" if self.low else "unknown"
        return str(self)

    def __str__(self) -> str:
        if self.value is None:
            least = f"at least {mbit(self.low)}; cannot be known more closely" if self.low else "cannot be known"
            return f"{least}: {self.why}"
        if self.low == self.high or self.low is None or self.high is None:
            return mbit(self.value)
        return f"{mbit(self.value)} ({mbit(self.low)} to {mbit(self.high)})"

    def as_dict(self, prefix: str = "") -> dict[str, Any]:
        """JSON-able; null for what is unknown."""
        return {
            f"{prefix}bytes_per_second": self.value,
            f"{prefix}bytes_per_second_low": self.low,
            f"{prefix}bytes_per_second_high": self.high,
            f"{prefix}bytes_per_second_note": self.why,
        }


def speed_of(rounds: Mapping[int, Sequence[float]]) -> Speed:
    """Return the speed from the durations of rounds (ns), by their bytes."""
    largest = max(rounds, default=0)
    smaller = half_of(sorted(rounds), largest)
    if not largest:
        return Speed(None, None, None, "no bytes were sent")
    few = min(len(rounds[largest]), len(rounds[smaller]))
    if few < LEAST_ROUNDS:
        return Speed(None, None, None, f"{few} rounds are too few")
    gap = largest - smaller
    middle, least, most = shift(rounds[largest], rounds[smaller])
    if most <= 0:
        return Speed(None, None, None, f"{size(gap)} more take no more time")
    low = gap / most * 1e9
    if least <= 0 or most / least > WIDEST:
        return Speed(None, low, gap / least * 1e9 if least > 0 else None, f"{size(gap)} more drown in noise")
    return Speed(gap / middle * 1e9, low, gap / least * 1e9)


def half_of(sizes: Sequence[int], largest: int) -> int:
    """Return the largest of ``sizes`` (including 0) that is at most half of ``largest``."""
    return max((one for one in sizes if one <= largest / 2), default=0)


def shift(larger: Sequence[float], smaller: Sequence[float]) -> tuple[float, float, float]:
    """Return by how much ``larger`` values exceed ``smaller``: the median of all differences, and the ends of its
    interval.
    """
    differences = sorted(one - other for one in larger for other in smaller)
    n, m = len(larger), len(smaller)
    left_out = max(0, math.floor(n * m / 2 - Z * math.sqrt(n * m * (n + m + 1) / 12)))
    return statistics.median(differences), differences[left_out], differences[-1 - left_out]


def mbit(bytes_per_second: float | None) -> str:
    """Return a link's speed as text."""
    if bytes_per_second is None:
        return "-"
    bits = bytes_per_second * 8
    for unit, one in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= one:
            return f"{bits / one:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


# A number tracked through noisy observations: an exponentially weighted mean that follows a sudden change.


WEIGHT: Final = 0.3
SURPRISE: Final = math.log(1.5)
"""The ratio to the mean at which an observation is a surprise, in a calm series ..."""
CALM: Final = 4.0
"""... and in a noisy one, in mean deviations."""


class Tracker:
    """Tracks a positive number by its logarithm: half and double are equally far.

    One observation far off is noise and does not change the mean. A second one in a row on the same side is a change,
    and becomes the mean. ``offset`` is added to every value internally, for numbers that may be 0.
    """

    def __init__(self, value: float, offset: float = 0.0) -> None:
        self._offset = offset
        self._mean = self._log(value)
        self._deviation = SURPRISE / CALM / 2
        self._suspect: float | None = None
        self._stale = False

    @property
    def value(self) -> float:
        """The current estimate."""
        return max(0.0, math.exp(self._mean) - self._offset)

    @property
    def stale(self) -> bool:
        """Whether the next observation replaces the estimate."""
        return self._stale

    def observe(self, value: float) -> bool:
        """Record an observation; returns whether it was taken for a sudden change."""
        seen = self._log(value)
        if self._stale:
            self.reset(value)
            return False
        off = seen - self._mean
        if abs(off) <= max(SURPRISE, CALM * self._deviation):
            self._mean += WEIGHT * off
            self._deviation += WEIGHT * (abs(off) - self._deviation)
            self._suspect = None
            return False
        if self._suspect is None or (self._suspect - self._mean) * off < 0:
            self._suspect = seen
            return False
        agree = abs(seen - self._suspect) <= SURPRISE
        self._mean = (seen + self._suspect) / 2 if agree else seen  # the first may have seen half of the change
        self._suspect = None
        return True

    def acquit(self) -> None:
        """Treat the last surprise as noise."""
        self._suspect = None

    def reset(self, value: float, stale: bool = False) -> None:
        """Forget the past. ``stale``: the next observation replaces the estimate."""
        self._mean = self._log(value)
        self._suspect = None
        self._stale = stale

    def _log(self, value: float) -> float:
        return math.log(max(value + self._offset, 1e-9))


@short
@dataclass(frozen=True)
class Curve:
    """Nanoseconds by bytes: piecewise linear between measured points, beyond the last with `bytes_per_second`.

    ``points``: (bytes, ns), bytes rising from 0. Times never decrease with more bytes. ``stated``: the known speed of
    the link; beyond the last point it is more reliable than the points' own slope, which may span a few bytes.
    """

    points: tuple[tuple[int, float], ...]
    stated: Speed | None = None

    def __post_init__(self) -> None:
        if not self.points or self.points[0][0] != 0:
            raise ValueError("a curve begins at 0 bytes")
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError("a curve's sizes rise")
        highest, rising = 0.0, []
        for nbytes, ns in self.points:
            highest = max(highest, ns)
            rising.append((nbytes, highest))
        object.__setattr__(self, "points", tuple(rising))

    @classmethod
    def line(cls, fixed_ns: float, bytes_per_second: float) -> Curve:
        """Return a link given by its numbers."""
        return cls(((0, fixed_ns), (1 << 20, fixed_ns + (1 << 20) / bytes_per_second * 1e9)))

    def ns(self, nbytes: float) -> float:
        """Return the nanoseconds for ``nbytes``."""
        points = self.points
        last, ns = points[-1]
        if nbytes >= last:
            return ns + (nbytes - last) * self._slope
        at = max(1, bisect_left([size for size, _ in points], nbytes))
        (size0, ns0), (size1, ns1) = points[at - 1], points[at]
        return ns0 + (ns1 - ns0) * (nbytes - size0) / (size1 - size0)

    @property
    def _slope(self) -> float:
        """Nanoseconds per byte: as stated, else between the largest size and the largest that is at most half of it
        (between nearly equal sizes there is only noise), within what was stated.
        """
        stated = self.stated or Speed(None, None, None)
        if stated.value:
            return 1e9 / stated.value
        most, least = (1e9 / end if end else None for end in (stated.low, stated.high))
        own = max(self._own_slope, least or 0.0)
        return own if most is None else min(own, most)

    @property
    def _own_slope(self) -> float:
        if len(self.points) < 2:
            return 0.0
        last, ns = self.points[-1]
        half = half_of([size for size, _ in self.points], last)
        return (ns - dict(self.points)[half]) / (last - half)

    @property
    def bytes_per_second(self) -> float:
        """The goodput of the largest sizes; infinite if more bytes cost nothing measurable. For users, with its
        interval: `Link.speed_up`.
        """
        return 1e9 / self._slope if self._slope > 0 else float("inf")


@short
@dataclass(frozen=True)
class Link:
    """``up(n)``: the round trip of a request of n bytes with an empty answer, less the server's own time, including
    latency and all fixed costs. ``down(n)``: what an answer of n bytes adds to that.
    """

    up: Curve
    down: Curve
    source: str = "measured"
    """"measured", or the given numbers, for the reader of a plan."""
    measured_up: Speed | None = None
    """From single rounds; None for a given link."""
    measured_down: Speed | None = None

    @property
    def speed_up(self) -> Speed:
        """The upward speed with its interval, or the reason why it is unknown."""
        return self.measured_up or Speed.exactly(self.up.bytes_per_second)

    @property
    def speed_down(self) -> Speed:
        """As `speed_up`."""
        return self.measured_down or Speed.exactly(self.down.bytes_per_second)

    @property
    def rtt_ns(self) -> float:
        """The time of an empty request with an empty answer."""
        return self.up.ns(0)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; an unknown speed is null, with the reason."""
        return {
            "rtt_ns": self.rtt_ns,
            **self.speed_up.as_dict("up_"),
            **self.speed_down.as_dict("down_"),
            "up_points": [list(point) for point in self.up.points],
            "down_points": [list(point) for point in self.down.points],
            "source": self.source,
        }

    @classmethod
    def from_dict(cls, data: object, origin: str) -> Link:
        """Return the reverse of `as_dict`, for a server's data. Raises SpecError."""
        try:
            known: Any = data
            curves = []
            for way in ("up", "down"):
                points = as_points(known[f"{way}_points"])
                value = known[f"{way}_bytes_per_second"]
                numbers = [number for point in points for number in point] + ([] if value is None else [value])
                sizes = [size for size, _ in points]
                if not points or sorted(set(sizes)) != sizes or not all(0 <= one < 1e18 for one in numbers):
                    raise ValueError("its points are not in order, or out of range")
                curves.append(Curve(points, None if not value else Speed.exactly(float(value))))
            return cls(curves[0], curves[1], source=f"measured by {origin}")
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(f"the link that {origin} reports: {error!s:.200}") from error

    def network_ns(self, bytes_up: float, bytes_down: float) -> float:
        """Return nanoseconds on the network for a request and its answer."""
        return self.up.ns(bytes_up) + self.down.ns(bytes_down)


def as_points(curve: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """Return the points from JSON."""
    return tuple((int(size), float(ns)) for size, ns in curve)


# What the link carries now, from real transfers: a measured curve whose round trip and slowness are tracked.
#
# A transfer is one number for two unknowns. Where the time of the bytes is most of what is expected, or the transfer
# is far slower than expected and not tiny, it is evidence for the goodput; otherwise for the round trip. A token
# bucket lets small transfers pass at full speed, so a fast one counts only from `FLOOR` bytes on; a slow one always.


FLOOR: Final = 32 << 10
TINY: Final = 2 << 10
SLOW: Final = 2.0
SLOW_LARGE: Final = 1.5
"""The ratio to the expected time at which a transfer dominated by the round trip still shows the goodput; one of
`FLOOR` bytes earlier, or small transfers in between would always make it noise.
"""
FASTEST_NS_PER_BYTE: Final = 0.02
"""The fastest speed of a direction, 50 GB/s: a curve may be flat, but the time per byte must not be 0."""


class _Way:
    """One direction: the measured curve of time by bytes, times a slowness."""

    def __init__(self, curve: Curve) -> None:
        self.slowness = Tracker(1.0)
        self.suspect_bytes = 0.0  # of the last transfer that suggested this direction
        self.take(curve)

    def take(self, curve: Curve, stale: bool = False) -> None:
        self.shape = Curve(tuple((n, ns - curve.ns(0) + n * FASTEST_NS_PER_BYTE) for n, ns in curve.points))
        self.slowness.reset(1.0, stale)

    def take_line(self, nbytes: float, ns: float, stale: bool = False) -> None:
        self.take(Curve(((0, 0.0), (max(1, int(nbytes)), max(ns, 0.0)))), stale)

    def base(self, nbytes: float) -> float:
        """At least the cost of its bytes at the fastest speed, also for a curve with one point."""
        return max(self.shape.ns(nbytes), nbytes * FASTEST_NS_PER_BYTE, 1.0)

    def ns(self, nbytes: float) -> float:
        return self.slowness.value * self.base(nbytes) if nbytes > 0 else 0.0

    def observe(self, nbytes: float, ns: float) -> bool:
        """Record a transfer; returns whether it was a sudden change, after which the curve is the line through it."""
        self.suspect_bytes = nbytes
        if self.slowness.observe(max(ns, nbytes * FASTEST_NS_PER_BYTE) / self.base(nbytes)):
            self.take_line(nbytes, self.ns(nbytes))
            return True
        return False

    def curve(self, fixed_ns: float) -> Curve:
        points = self.shape.points if len(self.shape.points) > 1 else ((0, 0.0), (1 << 20, self.base(1 << 20)))
        return Curve(tuple((n, fixed_ns + (self.slowness.value * ns if n else 0.0)) for n, ns in points))


class LinkEstimate:
    """The estimate of a link. ``largest``: the most bytes that any candidate sends; smaller than `FLOOR` if that is
    less.
    """

    def __init__(self, link: Link, largest: int) -> None:
        self._up, self._down = _Way(link.up), _Way(link.down)
        self._rtt = Tracker(link.rtt_ns, offset=1e3)
        self._largest = max(1, largest)
        self._floor = min(FLOOR, max(1, largest // 2))
        self.congested = False
        """Whether the last probe was so late that the next one must find the cause."""
        self.doubtful = False
        """Whether something was observed that only a probe can clarify."""

    @property
    def link(self) -> Link:
        """The current estimate."""
        return Link(self._up.curve(self._rtt.value), self._down.curve(0.0), "observed")

    @property
    def rtt_ns(self) -> float:
        return self._rtt.value

    def goodput(self) -> tuple[float, float]:
        """Return bytes per second up and down, at the size of the largest request."""
        return tuple(self._largest / way.ns(self._largest) * 1e9 for way in (self._up, self._down))  # type: ignore[return-value]

    def ns(self, bytes_up: float, bytes_down: float) -> float:
        """Return the expected time of a transfer."""
        return self._rtt.value + self._up.ns(bytes_up) + self._down.ns(bytes_down)

    def speaks_of_goodput(self, bytes_up: float, bytes_down: float) -> bool:
        """Return whether such a transfer would show the goodput, up or down, fast or slow."""
        ups, downs = self._up.ns(bytes_up), self._down.ns(bytes_down)
        return max(ups, downs) >= 0.3 * self.ns(bytes_up, bytes_down) and max(bytes_up, bytes_down) >= self._floor

    def observe(self, bytes_up: float, bytes_down: float, ns: float) -> bool:
        """Record a transfer; returns whether it was a sudden change."""
        ups, downs, rtt = self._up.ns(bytes_up), self._down.ns(bytes_down), self._rtt.value
        expected = ups + downs + rtt
        way, nbytes, own = (self._up, bytes_up, ups) if ups >= downs else (self._down, bytes_down, downs)
        mostly_bytes = own >= (0.25 if nbytes >= self._floor else 0.5) * expected
        slow = ns > (SLOW_LARGE if nbytes >= self._floor else SLOW) * expected and nbytes >= TINY
        if not mostly_bytes and not slow:
            if nbytes >= way.suspect_bytes / 2:  # as fast as before: the slow one was noise
                way.slowness.acquit()
            rest = ns - ups - downs
            # Bytes that a bucket let pass free bound the round trip only from above.
            return self._rtt.observe(rest if rest > 0.2 * ns else min(rtt, ns))
        rest = ns - (expected - own)
        if rest < 0.1 * ns:  # faster than the assumed round trip: that has fallen, too
            rest = own * ns / expected
            self._rtt.observe(min(rtt, ns))
        if rest < 0.67 * own and nbytes < self._floor:
            self.doubtful = True
            return False
        return way.observe(nbytes, rest)

    def bound(self, bytes_up: float, ahead: float, ns: float) -> None:
        """A transfer is not complete after ``ns``, with perhaps ``ahead`` other bytes before it: the link is no faster
        than that.

        The next observation decides how much slower it is.
        """
        if ns <= self.ns(bytes_up + ahead, 0):
            return
        if bytes_up >= TINY:
            self._up.take_line(bytes_up + ahead, ns - self._rtt.value, stale=True)
        else:
            self._rtt.reset(ns - self._up.ns(ahead), stale=True)
        self.doubtful = True

    def replace(self, link: Link) -> bool:
        """Record a probe's result: adopted if it differs, else averaged in. Returns whether it was a sudden change."""
        congested = link.rtt_ns > SLOW * self._rtt.value and not self._rtt.stale
        if congested and not self.congested:  # it waited behind other bytes, or it is true: the next one decides
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
        """The estimate is old: the next observations replace it."""
        for tracker in (self._up.slowness, self._down.slowness, self._rtt):
            tracker.reset(tracker.value, stale=True)
        self.doubtful = True


def _without_burst(curve: Curve) -> Curve:
    """A token bucket's first bytes are free, only after an idle time: if the last piece is far steeper than the whole,
    it alone is the link.
    """
    points = curve.points
    if len(points) < 3:
        return curve
    (size0, ns0), (size1, ns1) = points[-2:]
    last, whole = (ns1 - ns0) / (size1 - size0), (ns1 - points[0][1]) / size1
    return Curve(((0, points[0][1]), (size1, points[0][1] + size1 * (last if last > 1.7 * whole else whole))))
