"""Bounds of a share and of a mean. Either bound of a pair holds with the given confidence by itself (one-sided).

A share has the exact bounds of Clopper and Pearson (1934): with no change among n inputs the upper one is
1 - (1 - confidence)^(1/n), about 3/n at 95 %. A mean has Student's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

CONFIDENCE: Final = 0.95
LEAST_FOR_MEANS: Final = 10
"""Values below which nothing is said of a mean: Student's bounds take the values to be spread about evenly."""
_STEPS: Final = 200
_TINY: Final = 1e-300
_NEAR: Final = 1e-13


def share(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Lower and upper bound of the share behind ``hits`` of ``n``; (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    wrong = 1 - confidence
    low = 0.0 if hits == 0 else _solved(lambda p: incomplete_beta(p, hits, n - hits + 1), wrong)
    high = 1.0 if hits == n else _solved(lambda p: incomplete_beta(p, hits + 1, n - hits), confidence)
    return low, high


def mean(n: int, total: float, squares: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Lower and upper bound of the mean behind ``n`` values, of their sum and the sum of their squares.

    Without limit where there are fewer than `LEAST_FOR_MEANS`.
    """
    if n < LEAST_FOR_MEANS:
        return -math.inf, math.inf
    middle = total / n
    deviation = math.sqrt(max(0.0, squares / n - middle * middle) * n / (n - 1))
    reach = student(confidence, n - 1) * deviation / math.sqrt(n)
    return middle - reach, middle + reach


def student(confidence: float, freedom: int) -> float:
    """The quantile of Student's distribution, for a confidence above 1/2."""
    # P(T > t) = I_x(freedom / 2, 1/2) / 2 with x = freedom / (freedom + t^2), which falls with t
    x = _solved(lambda one: incomplete_beta(one, freedom / 2, 0.5), 2 * (1 - confidence))
    return math.sqrt(freedom * (1 - x) / x)


def needed(loss: float, confidence: float = CONFIDENCE) -> int:
    """How many inputs, all of them unchanged, show that a share is no more than ``loss``."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - loss) - 1e-9)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised one, I_x(a, b), by its continued fraction (Numerical Recipes calls the method Lentz's)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10 * _STEPS + math.isqrt(int(a + b))):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _away(1 + term * d), _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _NEAR:
            break
    return math.exp(front) * value / a


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _solved(rising: Callable[[float], float], wanted: float) -> float:
    """Where a function that rises from 0 at 0 to 1 at 1 has the value ``wanted``."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        at = (low + high) / 2
        if rising(at) < wanted:
            low = at
        else:
            high = at
        if high - low <= 1e-15 * high:
            break
    return (low + high) / 2
