"""What is kept of one codec at one cut: sums, from which the mean and its bounds come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_client.calibrating import intervals
from edge_client.calibrating.outputs import Row
from edge_client.planning.loss_table import CodecLoss

LEAST_TO_STOP = 16
"""Rows before a codec can be called too lossy."""


@dataclass
class Tally:
    """The losses of one codec at one cut, or of one step of it; ``is_share``: every loss is 0 or 1."""

    codec: str
    lossless: bool
    is_share: bool
    confidence: float
    step: float | None = None
    """The step of a codec that was learnt."""
    inputs: int = 0
    nbytes: int = 0
    rows: int = 0
    stopped: bool = False
    used: bool = False
    _loss: float = 0.0
    _squares: float = 0.0
    _measures: dict[str, tuple[float, int]] = field(default_factory=dict)
    _labelled: int = 0
    _right: int = 0

    def sent(self, nbytes: int, used: bool) -> None:
        """One input's header and payload; whether any tensor went with this codec."""
        self.inputs += 1
        self.nbytes += nbytes
        self.used |= used

    def take(self, rows: Sequence[Row]) -> None:
        """What became of one input."""
        for row in rows:
            self.rows += 1
            self._loss += row.loss
            self._squares += row.loss * row.loss
            for name, value in row.measures.items():
                total, count = self._measures.get(name, (0.0, 0))
                self._measures[name] = total + value, count + 1
            if row.right is not None:
                self._labelled += 1
                self._right += row.right

    def bounds(self) -> tuple[float, float]:
        """Bounds of the loss, each with the confidence by itself; not below 0."""
        if self.lossless:
            return 0.0, 0.0
        if self.is_share:
            return intervals.share(round(self._loss), self.rows, self.confidence)
        low, high = intervals.mean(self.rows, self._loss, self._squares, self.confidence)
        return max(0.0, low), high

    def stop_if_worse_than(self, loss: float) -> None:
        """No further inputs for what is surely lossier than that."""
        if not self.lossless and self.rows >= LEAST_TO_STOP and self.bounds()[0] > loss:
            self.stopped = True

    def result(self) -> CodecLoss:
        """For the table. At least one input was sent."""
        low, high = self.bounds()
        return CodecLoss(
            codec=self.codec,
            lossless=self.lossless,
            n=self.rows,
            bytes_up=self.nbytes / self.inputs,
            loss=self._loss / self.rows if self.rows else 0.0,
            low=low,
            high=None if high == float("inf") else high,
            accuracy=self._right / self._labelled if self._labelled else None,
            measures={
                **{name: total / count for name, (total, count) in self._measures.items()},
                **({} if self.step is None else {"step": self.step}),
            },
            stopped=self.stopped,
        )
