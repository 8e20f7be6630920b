"""When the link is probed beside the requests, and with how much. Pure: the time is passed in (ns, of one clock)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edge_client.adaptive.steadiness import SECOND
from edge_client.planning.link_estimate import FLOOR

EVERY: Final = SECOND
WAITS: Final = 2 * SECOND
"""Between two probes: at least, and where the last one found nothing new."""
SOON: Final = SECOND // 4
"""A probe that something depends on, after the one before."""
DOUBT_WAITS: Final = 8 * SECOND
"""The longest wait for a doubt's next probe: it grows fourfold while probes find nothing new."""
SHARE: Final = 0.1
"""Share of what a better link might gain, that looking for it may cost requests."""
REGRET: Final = 4 * SECOND
LARGEST_FLOOR: Final = 8 * FLOOR
"""Probes are at least `FLOOR` bytes; twice as many after each move that a probe led to and requests revoked."""
LONG_AGO: Final = 1 << 62


class Probing:
    """One link's probes: what they wait for, and which requests shared the link with them.

    There is a reason to probe after what only a probe can decide (``doubtful``), and while no transfer tells the
    goodput but a better link would move the choice: a worse one shows in the requests themselves.
    """

    def __init__(self, largest: int) -> None:
        """``largest``: the most bytes that any request takes."""
        self._largest = largest
        self._last = self._told = self._over = -LONG_AGO  # asked for, goodput known from a transfer, answered
        self._due = self._looked = -LONG_AGO
        self._began: int | None = None  # of one that is under way
        self._took = self._bytes = 0
        self._waits, self._doubt_waits = EVERY, SOON
        self._floor = FLOOR
        self._replaced = self._lured = -LONG_AGO  # when a probe changed the belief, and when a move followed from that

    def wants(
        self, now: int, *, doubtful: bool, congested: bool, shared: bool, goodput: float, gain: Callable[[], float]
    ) -> int | None:
        """The bytes of the largest round to probe with; None: no probe now. Asking counts as having probed.

        ``congested``: the last probe came late, and the next one must tell why. ``shared``: requests use the link.
        ``goodput``: bytes a second, as believed. ``gain``: what a better link would gain, 0.2 = 20 %; nothing where it
        would move no choice. Asked when nothing else speaks against a probe.
        """
        doubt = doubtful and now - self._last >= self._doubt_waits
        if not doubt and (now < self._due or now - self._told < EVERY):
            return None
        if not congested:
            if now - self._looked < EVERY:
                return None
            expected = gain()
            if expected <= 0:
                self._looked = now
                return None
            if not doubt and shared and now - self._last < self._took / (SHARE * expected):
                self._due = self._last + int(self._took / (SHARE * expected))
                return None
        self._last = self._began = now
        self._due = now + self._waits
        self._bytes = 0
        floor = max(2, min(self._largest, FLOOR) * self._floor // FLOOR)
        return max(floor, int(min(self._largest, 4 * FLOOR, 0.1 * goodput)))

    def sends(self, nbytes: int) -> None:
        """The probe that is under way hands over so many bytes more."""
        self._bytes += nbytes

    def ended(self, now: int, *, news: bool) -> None:
        """It was answered; ``news``: that changed the belief."""
        if self._began is not None:
            self._took = now - self._began
        self._began, self._over = None, now
        self._last = self._told = max(self._last, now)
        if news:
            self._replaced = now
            self._doubt_waits, self._waits = SOON, EVERY
        else:
            self._doubt_waits = min(DOUBT_WAITS, 4 * self._doubt_waits)
            self._waits = min(WAITS, 2 * self._waits)
        self._due = now + max(self._waits, self._took)

    def gave_up(self) -> None:
        """There will be no answer: the server is gone."""
        self._began = None

    def soon(self, now: int) -> None:
        """Nothing is known any more: the next doubt waits for nothing."""
        self._last = now - DOUBT_WAITS

    def observed(self, now: int) -> None:
        """The goodput is known from a request's transfer."""
        self._told = now

    def moved(self, now: int) -> None:
        """The choice moved: a better link may mean more now. Where a probe had led to the move before, that promised
        more than requests got (a bucket let it pass), and the next ones are larger.
        """
        self._looked = -LONG_AGO
        if now - self._lured < REGRET:
            self._floor = min(2 * self._floor, LARGEST_FLOOR)
        self._lured = now if now - self._replaced < EVERY else -LONG_AGO

    def shared_with(self, began: int) -> bool:
        """Whether a request that was handed over then had a probe on the link beside it: its slowness says nothing."""
        return self._began is not None or self.was_behind(began)

    def was_behind(self, began: int) -> bool:
        """... and that probe is over."""
        return began < self._over

    @property
    def under_way(self) -> int:
        """Bytes that a probe has handed over which has no answer yet."""
        return 0 if self._began is None else self._bytes
