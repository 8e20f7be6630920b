"""Quantiles, and how far they may be off.

Requests of a queue are not independent: one that is slow makes the next slow. So the bootstrap draws whole stretches of
time with replacement, not requests; and what is shorter than a few stretches has no interval at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

STRETCHES: Final = 20
DRAWS: Final = 300
FEWEST: Final = 100
"""Requests below which nothing is said of an interval."""
CONFIDENCE: Final = 0.95
FEW_BEYOND: Final = 10
"""Samples beyond a quantile below which it is hardly known."""


@dataclass(frozen=True)
class Estimate:
    """``value`` in its unit, infinite where it lies among requests without an answer; ``low`` to ``high``: with
    `CONFIDENCE`, None where too little is known. ``spread``: standard deviation of the value's logarithm.
    """

    value: float
    low: float | None = None
    high: float | None = None
    spread: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no infinity: None."""
        known = {"value": self.value, "low": self.low, "high": self.high, "spread": self.spread}
        return {name: one if one is not None and math.isfinite(one) else None for name, one in known.items()}


def quantile(values: np.ndarray, share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; NaN of nothing."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.nan


def estimate(values: np.ndarray, figure: Callable[[np.ndarray], float], seed: int = 0) -> Estimate:
    """``figure`` of ``values``, which are in the order in which the requests began."""
    value = figure(values) if len(values) else math.nan
    if len(values) < FEWEST:
        return Estimate(value)
    dice = np.random.default_rng(seed)
    stretches = np.array_split(values, STRETCHES)
    drawn = np.array(
        [
            figure(np.concatenate([stretches[at] for at in dice.integers(STRETCHES, size=STRETCHES)]))
            for _ in range(DRAWS)
        ]
    )
    edges = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    known = drawn[np.isfinite(drawn) & (drawn > 0)]
    spread = float(np.std(np.log(known))) if len(known) == DRAWS else None
    return Estimate(value, float(edges[0]), float(edges[1]), spread)
