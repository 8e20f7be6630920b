"""Read the inputs that codecs are evaluated on, and their labels: a folder per class, file names, or a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from edge_client.calibrating.outputs import ComparedRow
from edge_client.planning.codecs import CodecLoss
from edge_client.pruning.data import find
from edge_client.user_input import NamedInput, labelled, named_inputs
from edge_client.user_text import option
from shared_hooks.errors import SpecError, near

Data = str | Path | Iterable[Any]
"""A folder or a glob of files; or inputs in memory, or pairs of one and its label."""


def inputs_of(data: Data, labels: str | Path | None = None) -> list[NamedInput]:
    """Return every input once, with its label if it has one. Raises SpecError, InputMismatch."""
    if isinstance(data, (str, Path)):
        found = find(str(data), option("input"))
    else:
        items = list(data)
        pairs = bool(items) and all(_is_pair(one) for one in items)
        found = labelled(items, option("input")) if pairs else named_inputs(items)
    return found if labels is None else _with_labels(found, Path(labels))


def _is_pair(one: Any) -> bool:
    """Return whether it is (input, label): a label is a text or a number, which cannot be a model's tensor."""
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], (str, int))


def _with_labels(found: Sequence[NamedInput], file: Path) -> list[NamedInput]:
    known = _read(file)
    used: dict[str, NamedInput] = {}
    made = []
    for one in found:
        names = [one.origin, one.name, one.file_name]
        key = next((name for name in names if name in known), None)
        if key is None:
            made.append(one)
            continue
        if (other := used.setdefault(key, one)) is not one:
            raise SpecError(f'{file}: "{key:.80}" is {other.origin} as well as {one.origin}: name them in full')
        label = known[key]
        made.append(
            replace(one, label=label) if one.item is None else replace(one, item=replace(one.item, truth=label))
        )
    missing = [name for name in known if name not in used]
    if missing:
        raise SpecError(
            f"{file}: {len(missing)} of {len(known)} labels are of no input, such as "
            f'"{missing[0]:.80}".{near(missing[0], [one.file_name for one in found])}'
        )
    return made


def _read(file: Path) -> dict[str, str]:
    """Read two columns, file and label; a header line is skipped."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = [row for row in csv.reader(text) if row]
    except OSError as error:
        raise SpecError(f"{option('labels')}: {file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{option('labels')}: {file} is no CSV file: {error}") from error
    if rows and [cell.strip().lower() for cell in rows[0][:2]] in (["file", "label"], ["filename", "label"]):
        del rows[0]
    known: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise SpecError(f"{file}: row {number}: expected a file's name and its label, found {len(row)} columns")
        name, label = (cell.strip() for cell in row)
        if known.setdefault(name, label) != label:
            raise SpecError(f'{file}: "{name:.80}" has two labels, "{known[name]:.40}" and "{label:.40}"')
    if not known:
        raise SpecError(f"{file} holds no label: expected rows of a file's name and its label")
    return known


# Confidence bounds of a share and of a mean. Either bound of a pair holds with the given confidence by itself
# (one-sided).
#
# A share has the exact bounds of Clopper and Pearson (1934): with no change among n inputs the upper one is 1 - (1 -
# confidence)^(1/n), about 3/n at 95 %. A mean has Student's.


CONFIDENCE: Final = 0.95
LEAST_FOR_MEANS: Final = 10
"""Minimum values for bounds of a mean: Student's bounds assume a roughly normal spread."""
_STEPS: Final = 200
_TINY: Final = 1e-300
_NEAR: Final = 1e-13


def share(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return lower and upper bound of the proportion behind ``hits`` of ``n``; (0, 1) for n = 0."""
    if not n:
        return 0.0, 1.0
    wrong = 1 - confidence
    low = 0.0 if hits == 0 else _solved(lambda p: incomplete_beta(p, hits, n - hits + 1), wrong)
    high = 1.0 if hits == n else _solved(lambda p: incomplete_beta(p, hits + 1, n - hits), confidence)
    return low, high


def mean(n: int, total: float, squares: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return lower and upper bound of the mean behind ``n`` values, from their sum and the sum of their squares.

    Unbounded for fewer than `LEAST_FOR_MEANS`.
    """
    if n < LEAST_FOR_MEANS:
        return -math.inf, math.inf
    middle = total / n
    deviation = math.sqrt(max(0.0, squares / n - middle * middle) * n / (n - 1))
    reach = student(confidence, n - 1) * deviation / math.sqrt(n)
    return middle - reach, middle + reach


def student(confidence: float, freedom: int) -> float:
    """Return the quantile of Student's distribution, for a confidence above 1/2."""
    # P(T > t) = I_x(freedom / 2, 1/2) / 2 with x = freedom / (freedom + t^2), which falls with t
    x = _solved(lambda one: incomplete_beta(one, freedom / 2, 0.5), 2 * (1 - confidence))
    return math.sqrt(freedom * (1 - x) / x)


def needed(loss: float, confidence: float = CONFIDENCE) -> int:
    """Return how many unchanged inputs show that a proportion is at most ``loss``."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - loss) - 1e-9)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, I_x(a, b), by its continued fraction (Lentz's method)."""
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
    """Return where a function that rises from 0 at 0 to 1 at 1 has the value ``wanted``."""
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


# What is kept of one codec at one cut: sums, from which the mean and its bounds are computed.


LOSSLESS_INPUTS = 32
LEAST_TO_STOP = 16
"""Minimum rows before a codec can be called too lossy."""


@dataclass
class LossTally:
    """The losses of one codec at one cut, or of one of its steps; ``is_share``: every loss is 0 or 1."""

    codec: str
    lossless: bool
    is_share: bool
    confidence: float
    step: float | None = None
    """The step of a calibrated codec."""
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
        """Add one input's header and payload; ``used``: whether any tensor used this codec."""
        self.inputs += 1
        self.nbytes += nbytes
        self.used |= used

    def take(self, rows: Sequence[ComparedRow]) -> None:
        """Add the rows of one input."""
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

    @property
    def most(self) -> int | None:
        """Maximum number of inputs: if nothing can be lost, only bytes are counted."""
        return LOSSLESS_INPUTS if self.lossless else None

    @property
    def mean_bytes(self) -> float:
        return self.nbytes / self.inputs

    @property
    def mean_loss(self) -> float:
        return self._loss / self.rows if self.rows else 0.0

    def state(self) -> dict[str, Any]:
        """Return JSON data for `restore`."""
        return {name: getattr(self, name) for name in ("step", *_SUMS)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        for name in _SUMS:
            setattr(self, name, state[name])
        self._measures = {name: (total, count) for name, (total, count) in state["_measures"].items()}

    def bounds(self) -> tuple[float, float]:
        """Return bounds of the loss, each with the confidence by itself; not below 0."""
        if self.lossless:
            return 0.0, 0.0
        if self.is_share:
            return share(round(self._loss), self.rows, self.confidence)
        low, high = mean(self.rows, self._loss, self._squares, self.confidence)
        return max(0.0, low), high

    def stop_if_worse_than(self, loss: float) -> None:
        """Stop taking inputs if the loss is surely above ``loss``."""
        if not self.lossless and self.rows >= LEAST_TO_STOP and self.bounds()[0] > loss:
            self.stopped = True

    def result(self) -> CodecLoss:
        """Return the table's entry. At least one input was sent."""
        low, high = self.bounds()
        return CodecLoss(
            codec=self.codec,
            lossless=self.lossless,
            n=self.rows,
            bytes_up=self.mean_bytes,
            loss=self.mean_loss,
            low=low,
            high=None if high == float("inf") else high,
            accuracy=self._right / self._labelled if self._labelled else None,
            measures={
                **{name: total / count for name, (total, count) in self._measures.items()},
                **({} if self.step is None else {"step": self.step}),
            },
            stopped="",
        )


_SUMS: Final = ("inputs", "nbytes", "rows", "stopped", "used", "_loss", "_squares", "_measures", "_labelled", "_right")
