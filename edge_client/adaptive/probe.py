"""A probe of the link beside requests: trains of bytes that grow until one of them tells the rate.

What was a quick link a second ago may be a slow one now, and a train that suits the first fills the second: requests
behind it come late, and say that the link is slower still. So a probe begins with little, and goes on to four times as
much only where that took no time worth measuring: on a quick link, or in a token bucket that lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edge_client.planning.link import Curve, Link
from shared_hooks.errors import ServerUnavailable

FIRST: Final = 16 << 10
GROWTH: Final = 4
TELLS_NS: Final = 10e6
"""A round that takes so long is the link's own time, not a thread's."""
AGREE: Final = 1.5

Train = Callable[[int, int], tuple[float, float]]
"""Sends so many bytes, and so many more at once behind them. What the second took to arrive, and both beyond a round of
nothing (ns). Raises ServerUnavailable where they did not come in time.
"""


def probed(train: Train, rtt_ns: float, largest: int, believed_ns: float, patience_ns: float) -> Link:
    """The way up; of the way down nothing is known. ``largest``: bytes of the largest first round of a train;
    ``believed_ns``: what a byte is believed to take; ``patience_ns``: what a train may take, so that a link on which
    one does not come is at most so fast.
    """
    size = min(FIRST, largest)
    while True:
        small = max(1, size // 2)
        ns_per_byte = _ns_per_byte(train, size, small, believed_ns, patience_ns)
        if size >= largest or small * ns_per_byte >= TELLS_NS:
            break
        size = min(largest, GROWTH * size)
    points = [(0, rtt_ns), (small, rtt_ns + small * ns_per_byte), (size, rtt_ns + size * ns_per_byte)]
    return Link(Curve(tuple(points if small < size else [points[0], points[2]])), Curve(((0, 0.0),)))


def _ns_per_byte(train: Train, large: int, small: int, believed_ns: float, patience_ns: float) -> float:
    """Of the faster of two, where the first does not agree with itself, or is a small one that tells of a slower link
    than is believed: what stalls is not the link.

    The second round's way in tells the rate. The whole train tells less (a bucket's burst is in it), but counts where a
    busy server took both rounds at once.
    """
    found: list[float] = []
    while len(found) < 2:
        try:
            second_ns, both_ns = train(large, small)
        except ServerUnavailable:
            return patience_ns / (large + small)
        second, whole = second_ns / small, both_ns / (large + small)
        found.append(max(second, whole, 1 / small))
        slow = small * found[-1] >= TELLS_NS and found[-1] >= AGREE * believed_ns
        if whole < AGREE * second and not (slow and large <= FIRST):
            break
    return min(found)
