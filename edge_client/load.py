"""How busy a server says that it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """How busy the server is: requests waiting or running, workers, and the recent mean wait for one (ns)."""

    pending: int = 0
    workers: int = 1
    queue_ns: float = 0.0
