"""What is known of one model and cut, free of shapes: how the tail treats each outermost call before the cut.

*Skipped*: what it gives hangs on private inputs; the tail has its form from the edge, and remote tensors. *Entered*: it
gives what can be worked out here (positions, masks); the tail runs it. Which of the two is found by running it on
remote tensors, once.
"""

from __future__ import annotations

from enum import Enum
from threading import Lock


class Kind(Enum):
    SKIPPED = "skipped"
    ENTERED = "entered"


class Template:
    """How the modules before a cut are replayed; shared by all sessions."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], Kind] = {}
        self._lock = Lock()

    def kind(self, path: str, count: int) -> Kind | None:
        """None for a call that was never tried."""
        return self._kinds.get((path, count))

    def learn(self, path: str, count: int, kind: Kind) -> None:
        """What is skipped once is skipped always: the edge tells what it gives."""
        with self._lock:
            if self._kinds.get((path, count)) is not Kind.SKIPPED:
                self._kinds[path, count] = kind
