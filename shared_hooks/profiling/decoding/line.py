"""A number that grows with the tokens: what is fixed, and what each token adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed + slope * tokens``; both at least 0 where it was fitted."""

    fixed: float = 0.0
    slope: float = 0.0

    def at(self, tokens: float) -> float:
        """Its value."""
        return self.fixed + self.slope * tokens

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.slope + other.slope)

    def __sub__(self, other: Line) -> Line:
        return Line(self.fixed - other.fixed, self.slope - other.slope)

    def times(self, factor: float) -> Line:
        """All of it so many times."""
        return Line(self.fixed * factor, self.slope * factor)

    @classmethod
    def total(cls, lines: Iterable[Line]) -> Line:
        """Their sum."""
        found = cls()
        for line in lines:
            found += line
        return found

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Through (tokens, value), values at least 0: with the least squares of relative errors, since a
        millisecond off counts more at few tokens than at many. Neither part is negative. Raises
        ValueError for no points.
        """
        if not points:
            raise ValueError("no points to fit a line to")
        weights = [1.0 / max(value, TINY) ** 2 for _, value in points]
        scale = max(weights)
        weighted = [(weight / scale, x, y) for weight, (x, y) in zip(weights, points, strict=True)]
        w, wx = sum(weight for weight, _, _ in weighted), sum(weight * x for weight, x, _ in weighted)
        wy, wxx = sum(weight * y for weight, _, y in weighted), sum(weight * x * x for weight, x, _ in weighted)
        wxy = sum(weight * x * y for weight, x, y in weighted)
        spread = w * wxx - wx * wx
        slope = (w * wxy - wx * wy) / spread if spread > TINY * w * wxx else 0.0
        fixed = (wy - slope * wx) / w
        if slope < 0:
            return cls(wy / w, 0.0)
        if fixed < 0:
            return cls(0.0, wxy / wxx)
        return cls(fixed, slope)
