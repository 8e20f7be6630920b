"""How fast one direction of a link is: a robust figure with its spread, or that it cannot be known.

What the bytes of a round take is what a large round takes more than one of half its size: so neither the round trip nor
what a token bucket forgives the first bytes counts. Of all pairs of a large and a smaller round the median is the
figure (Hodges and Lehmann 1963), and the interval is the one that belongs to the rank test of Wilcoxon, Mann and
Whitney: it asks nothing of the noise but that it is alike for both sizes, and a round out of four may be far off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edge_client.screen.text import size

LEAST_ROUNDS: Final = 3
"""Fewest rounds of either size, below which nothing is said."""
Z: Final = 1.96
"""95 %; of three rounds of either size the whole range, 90 %."""
WIDEST: Final = 4.0
"""The upper end of an interval is at most so many times the lower one, or the speed cannot be known."""


@dataclass(frozen=True)
class Speed:
    """Bytes per second. ``low`` to ``high``: where the true value lies, as far as the noise lets one say (None: no
    bound is known). ``value`` is None where it cannot be known, and ``why`` says why.
    """

    value: float | None
    low: float | None
    high: float | None
    why: str = ""

    @classmethod
    def exactly(cls, value: float) -> Speed:
        """A speed that was given; infinite is none."""
        if not math.isfinite(value):
            return cls(None, None, None, "more bytes take no more time")
        return cls(value, value, value)

    def times(self, factor: float) -> Speed:
        """A link ``factor`` times as fast."""
        value, low, high = (None if one is None else one * factor for one in (self.value, self.low, self.high))
        return Speed(value, low, high, self.why)

    @property
    def ratio(self) -> float:
        """``high`` over ``low``; infinite where either is unknown."""
        return self.high / self.low if self.low and self.high else math.inf

    def overlaps(self, other: Speed) -> bool:
        """Whether both may be one speed; False where either knows no interval."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        if self.value is None:
            least = f"at least {mbit(self.low)}; cannot be known more closely" if self.low else "cannot be known"
            return f"{least}: {self.why}"
        if self.low == self.high or self.low is None or self.high is None:
            return mbit(self.value)
        return f"{mbit(self.value)} ({mbit(self.low)} to {mbit(self.high)})"

    def as_dict(self, prefix: str = "") -> dict[str, Any]:
        """JSON-able; null is what cannot be known."""
        return {
            f"{prefix}bytes_per_second": self.value,
            f"{prefix}bytes_per_second_low": self.low,
            f"{prefix}bytes_per_second_high": self.high,
            f"{prefix}bytes_per_second_note": self.why,
        }


def speed_of(rounds: Mapping[int, Sequence[float]]) -> Speed:
    """The speed from what rounds took (ns), by their bytes."""
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
    """The largest of ``sizes`` (0 among them) that is no more than half of ``largest``."""
    return max((one for one in sizes if one <= largest / 2), default=0)


def shift(larger: Sequence[float], smaller: Sequence[float]) -> tuple[float, float, float]:
    """By how much ``larger`` values are larger: the median of all differences, and the ends of its interval."""
    differences = sorted(one - other for one in larger for other in smaller)
    n, m = len(larger), len(smaller)
    left_out = max(0, math.floor(n * m / 2 - Z * math.sqrt(n * m * (n + m + 1) / 12)))
    return statistics.median(differences), differences[left_out], differences[-1 - left_out]


def mbit(bytes_per_second: float | None) -> str:
    """As people write a link's speed."""
    if bytes_per_second is None:
        return "-"
    bits = bytes_per_second * 8
    for unit, one in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= one:
            return f"{bits / one:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
