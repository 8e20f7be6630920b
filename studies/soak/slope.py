"""The slope of a line through readings, with an interval in which it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

WARM_UP = 0.3
"""Share of the requests after which all that is kept on purpose (plans, recipes, imports, arenas) is full."""
BLOCKS = 20
"""Neighbouring readings are alike, so that counting each as a witness of its own makes the interval too narrow: the
line goes through the means of so many blocks."""
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228, 14: 2.145, 18: 2.101}
"""97.5 % of Student's t, by degrees of freedom."""


@dataclass(frozen=True)
class Slope:
    """In units of the readings for 100,000 requests, and half the width of the interval that has it with 95 %."""

    each: float
    margin: float
    first: float
    last: float
    most: float

    @classmethod
    def of(cls, looks: Sequence[tuple[float, float]]) -> Slope:
        """``looks``: (requests until then, reading), in order; at least one."""
        after = [look for look in looks if look[0] >= WARM_UP * looks[-1][0]] or list(looks[-1:])
        size = max(1, len(after) // BLOCKS)
        blocks = [after[k : k + size] for k in range(0, len(after) - size + 1, size)]
        points = [(mean(x for x, _ in block), mean(y for _, y in block)) for block in blocks]
        values = [y for _, y in after]
        ends = (round(values[0], 1), round(values[-1], 1), round(max(values), 1))
        x0, y0 = mean(x for x, _ in points), mean(y for _, y in points)
        spread = sum((x - x0) ** 2 for x, _ in points)
        if len(points) < 4 or not spread:
            return cls(0.0, math.inf, *ends)
        each = sum((x - x0) * (y - y0) for x, y in points) / spread
        left = sum((y - y0 - each * (x - x0)) ** 2 for x, y in points)
        freedom = len(points) - 2
        student = STUDENT[max(known for known in STUDENT if known <= freedom)]
        margin = student * math.sqrt(left / freedom / spread)
        return cls(round(each * 1e5, 2), round(margin * 1e5, 2), *ends)

    def grows(self, most: float) -> bool:
        """Whether it is surely steeper than ``most``."""
        return self.each - self.margin > most

    def __str__(self) -> str:
        return f"{self.first:g} to {self.last:g}, {self.most:g} at most; {self.each:+g} ± {self.margin:g} in 10^5"
