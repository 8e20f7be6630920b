"""What every networked request takes beyond the prediction: fitted from a few real ones, kept with their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One real request: its candidate's name, what was predicted of it without calibration, and what it took (ns)."""

    name: str
    predicted_ns: float
    measured_ns: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """``overhead_ns``: the median of measured less predicted, added to the network stage of every networked candidate.

    It may be negative: then requests were faster than predicted.
    """

    overhead_ns: float
    samples: tuple[Sample, ...]

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Calibration:
        """Raises ValueError for no samples."""
        if not samples:
            raise ValueError("no requests to calibrate with")
        return cls(statistics.median(one.measured_ns - one.predicted_ns for one in samples), tuple(samples))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "overhead_ns": self.overhead_ns,
            "samples": [
                {"name": one.name, "predicted_ns": one.predicted_ns, "measured_ns": one.measured_ns}
                for one in self.samples
            ],
        }
