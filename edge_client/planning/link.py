"""What a link carries, as measured by a probe or as given: how long so many bytes take, each way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.planning.speed import Speed, half_of
from shared_hooks.showing import short


@short
@dataclass(frozen=True)
class Curve:
    """Nanoseconds by bytes: straight lines between measured points, beyond the last by `bytes_per_second`.

    ``points`` are (bytes, ns), bytes rising from 0. Times never fall with more bytes. ``stated``: how fast the link is
    known to be; beyond the last point it says more than the points' own slope, which may be of a few bytes.
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
        for size, ns in self.points:
            highest = max(highest, ns)
            rising.append((size, highest))
        object.__setattr__(self, "points", tuple(rising))

    @classmethod
    def line(cls, fixed_ns: float, bytes_per_second: float) -> Curve:
        """A link given by its numbers."""
        return cls(((0, fixed_ns), (1 << 20, fixed_ns + (1 << 20) / bytes_per_second * 1e9)))

    def ns(self, nbytes: float) -> float:
        """Nanoseconds that ``nbytes`` take."""
        points = self.points
        last, ns = points[-1]
        if nbytes >= last:
            return ns + (nbytes - last) * self._slope
        at = max(1, bisect_left([size for size, _ in points], nbytes))
        (size0, ns0), (size1, ns1) = points[at - 1], points[at]
        return ns0 + (ns1 - ns0) * (nbytes - size0) / (size1 - size0)

    @property
    def _slope(self) -> float:
        """Nanoseconds a byte: as stated, else between the largest size and the largest that is at most half of it
        (between two sizes that hardly differ there is only noise), within what was stated.
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
        """Goodput of the largest sizes; infinite when more bytes cost nothing measurable. What may be said of it to
        people, with its spread, is `Link.speed_up`.
        """
        return 1e9 / self._slope if self._slope > 0 else float("inf")


@short
@dataclass(frozen=True)
class Link:
    """``up(n)``: a request of n bytes and an empty answer, there and back, less the server's own time; it holds the
    round trip and all that is fixed. ``down(n)``: what an answer of n bytes adds to that.
    """

    up: Curve
    down: Curve
    source: str = "measured"
    """"measured", or the numbers that were given: for the reader of a plan."""
    measured_up: Speed | None = None
    """From single rounds; None for a link that was given."""
    measured_down: Speed | None = None
    quarters: tuple[Curve, Curve] | None = None
    """First and third quartile of the rounds that ``up`` is the middle of; None for a link that was given."""

    @property
    def speed_up(self) -> Speed:
        """How fast it is, with its spread; or that it cannot be known."""
        return self.measured_up or Speed.exactly(self.up.bytes_per_second)

    @property
    def speed_down(self) -> Speed:
        """As `speed_up`."""
        return self.measured_down or Speed.exactly(self.down.bytes_per_second)

    @property
    def rtt_ns(self) -> float:
        """A request and an answer of no bytes."""
        return self.up.ns(0)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a speed that cannot be known is null, with the reason."""
        return {
            "rtt_ns": self.rtt_ns,
            **self.speed_up.as_dict("up_"),
            **self.speed_down.as_dict("down_"),
            "up_points": [list(point) for point in self.up.points],
            "down_points": [list(point) for point in self.down.points],
            "source": self.source,
        }

    def network_ns(self, bytes_up: float, bytes_down: float) -> float:
        """Nanoseconds on the network for a request and its answer."""
        return self.up.ns(bytes_up) + self.down.ns(bytes_down)


def as_points(curve: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """Points as JSON has them."""
    return tuple((int(size), float(ns)) for size, ns in curve)
