"""A number that says how it was obtained. Nothing is invented: what was not measured is estimated, or null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["measured", "estimated", "unavailable"]
STATUSES: tuple[Status, ...] = ("measured", "estimated", "unavailable")


@dataclass(frozen=True, slots=True)
class Reading:
    """``value`` in the unit of the field that holds it; None exactly when ``unavailable``.

    ``note`` says by what it was measured, from what it was estimated, or why there is nothing.
    """

    value: float | None
    status: Status
    note: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: one of {', '.join(STATUSES)}, not {self.status!r}")
        if (self.value is None) != (self.status == "unavailable"):
            raise ValueError(f"a reading that is {self.status} with the value {self.value}")

    @classmethod
    def measured(cls, value: float, by: str) -> Reading:
        return cls(value, "measured", by)

    @classmethod
    def estimated(cls, value: float, source: str) -> Reading:
        return cls(value, "estimated", source)

    @classmethod
    def unavailable(cls, why: str) -> Reading:
        return cls(None, "unavailable", why)

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "status": self.status, "note": self.note}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reading:
        """Raises ValueError, KeyError or TypeError for what is no reading."""
        value = data["value"]
        return cls(None if value is None else float(value), data["status"], str(data.get("note", "")))
