"""One request, and what became of it."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Final

REFUSALS: Final = frozenset(
    {"QuotaExceeded", "AccessRefused", "NotAuthenticated", "HookRefused", "ObserverRefused", "TooLarge"}
)
CONNECTION: Final = frozenset(
    {"ServerUnavailable", "Disagreement", "UnknownModel", "AccessRefused", "NotAuthenticated"}
)
"""Errors that the next request would have, too."""
ABANDONED: Final = "abandoned"
"""In place of an error: the run was ended while it was under way."""


@dataclass(frozen=True, slots=True)
class Shot:
    """``at``: seconds from the beginning at which it is to begin; places of its cut, its input and its client."""

    number: int
    at: float
    cut: int
    input: int
    client: int


@dataclass(slots=True)
class Ended:
    """How a shot ended. ``late_ns``: after its time, when the generator sent it. ``took_ns``: from the time at which it
    was to begin to the whole answer, or to the error. ``error``: a class's name; empty for an answer.
    """

    number: int
    late_ns: int
    took_ns: int
    error: str = ""
    put_offs: int = 0
    bytes_up: int = 0
    pending: int = -1
    workers: int = 0
    queue_ns: int = 0
    company: int = 1

    @property
    def refused(self) -> bool:
        """Whether the server would not have it, rather than lost it: by name, or put off until it was too late."""
        return self.error in REFUSALS or (self.error == "DeadlineExceeded" and self.put_offs > 0)

    def row(self) -> list[Any]:
        """For JSON."""
        return list(astuple(self))
