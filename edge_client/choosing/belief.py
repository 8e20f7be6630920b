"""`Belief`: the link as a client believes it to be that stays at one cut.

There requests are nearly of one size, so what they take does not tell a slow link from a long way: bytes and round trip
are distinguished by probes alone. Beyond a probe's prediction every request takes about as much more (threads, a busy
machine); that is followed, and where it suddenly changes the link is probed again. Pure: the time is passed in.
"""

from __future__ import annotations

from typing import Final

from edge_client.planning.link import Curve, Link
from edge_client.planning.link_estimate import LinkEstimate
from edge_client.planning.tracker import Tracker

UNKNOWN: Final = Link(Curve.line(1e6, 1e9 / 8), Curve.line(0.0, 1e9 / 8), "not known yet")
"""Until the first answer, where no probe was possible."""
LARGEST: Final = 128 << 10
LEAST: Final = 8 << 10
SHARE: Final = 0.1
"""Share of a second that a probe's largest round may take on the link."""
SOON: Final = 1.0
"""Seconds at least between two probes."""
AGAIN: Final = 10.0
"""... at most, while requests go on."""
LATE_TIMES: Final = 3.0
LATE_NS: Final = 5e7
"""A request that takes so many times what requests take, and so much more, asks for a probe by itself."""
_OFFSET: Final = 2e6
"""What requests take more is followed from here on: differences of less are noise on any machine."""


class Belief:
    """Not safe with threads."""

    def __init__(self) -> None:
        self._probed_link: Link | None = None
        self._estimate: LinkEstimate | None = None
        self._more = Tracker(0.0, offset=_OFFSET)
        self._changed = False
        self._at_most = float("inf")  # bytes a second, as the slowest request since the last probe has it
        self._probed = -1e9

    @property
    def link(self) -> Link:
        """As it is now."""
        if self._probed_link is not None:
            return self._probed_link
        return UNKNOWN if self._estimate is None else self._estimate.link

    @property
    def known(self) -> bool:
        """Whether anybody has looked."""
        return self._probed_link is not None or self._estimate is not None

    def take(self, link: Link | None, now: float) -> None:
        """A probe's result; None where it failed: answers alone tell, as well as they can."""
        self._probed, self._changed, self._at_most = now, False, float("inf")
        if link is not None:
            self._probed_link = link
            self._more.reset(self._more.value, stale=True)
        elif not self.known:
            self._estimate = LinkEstimate(UNKNOWN, LARGEST)
            self._estimate.forget()

    def observe(self, bytes_up: float, bytes_down: float, ns: float) -> None:
        """A request's time on the network."""
        if self._probed_link is not None:
            expected = self._probed_link.network_ns(bytes_up, bytes_down)
            if ns > LATE_TIMES * (expected + self._more.value) + LATE_NS:
                self._changed, self._at_most = True, min(self._at_most, bytes_up / ns * 1e9)
            self._changed |= self._more.observe(max(0.0, ns - expected))
        elif self._estimate is not None:
            self._estimate.observe(bytes_up, bytes_down, max(1.0, ns))

    def wants_probe(self, now: float) -> bool:
        """Whether a probe would tell something; nothing where none was ever answered."""
        if self._probed_link is None:
            return False
        return now - self._probed > (SOON if self._changed else AGAIN)

    def sizes(self) -> tuple[int, ...]:
        """Sizes of a probe's rounds: little where a late request says that the link may be slow now."""
        goodput = self.link.up.bytes_per_second if self.known else float("inf")
        largest = int(max(LEAST, min(LARGEST, SHARE * goodput, max(4 * LEAST, SHARE * self._at_most))))
        return 0, largest // 2, largest
