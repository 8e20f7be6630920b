"""What a row of the benchmark is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    """``quick``: fewer cuts and repeats, for a look. ``threads``: torch's threads on each side of the loopback rows."""

    quick: bool = False
    threads: int = 1
    say: Callable[[str], None] = print

    def repeats(self, full: int) -> int:
        return max(5, full // 4) if self.quick else full


@dataclass(frozen=True)
class Line:
    """One number of the table. ``limit``: the most it may be; None where there is nothing to reach."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        return None if self.limit is None else self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "reached": self.reached,
            "note": self.note,
        }


@dataclass(frozen=True)
class Row:
    """The result of one measurement. ``lines`` go into the table, ``details`` (numbers only, for JSON) do not."""

    lines: tuple[Line, ...]
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"lines": [line.as_dict() for line in self.lines], "details": self.details}
