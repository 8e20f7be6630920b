"""What one identity may do, and how much of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """None = whatever the server has; 0 = without a bound of its own, within the server's limits."""

    models: tuple[str, ...] | None = None
    cuts: tuple[str, ...] | None = None
    """Names of layers, "input", and "cloud-only-file"."""
    observers: tuple[str, ...] | None = None
    profile: bool = True
    probe: bool = True
    max_in_flight: int = 0
    """Requests that are received, waiting or running at a time."""
    max_bytes: int = 0
    """Payload bytes of these."""
    requests_per_minute: int = 0
    bytes_per_minute: int = 0
    """Payload bytes received."""
    weight: float = 1.0
    """Its share of the workers while others wait, too: 2 gets twice as much as 1."""
    manage: bool = False
    """Whether it may load and unload the models that it may use, and that the server's files name."""


EVERYTHING = Policy()


def granted(allowed: tuple[str, ...] | None, there: Iterable[str]) -> list[str]:
    """Those of ``there`` that a policy's list allows, in order of their names."""
    return sorted(name for name in there if allowed is None or name in allowed)
