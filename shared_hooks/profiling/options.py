"""How long and how often a profiler measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared_hooks import codecs
from shared_hooks.codecs.basis import Book
from shared_hooks.errors import SpecError


@dataclass(frozen=True)
class ProfileOptions:
    """``seconds``: the budget; one repetition is made in any case. ``pause``: seconds to rest before each measurement,
    as a request's process does while it waits for the network: caches have cooled, threads sleep, a CPU quota is
    refilled. Without it, heads of a small model measured half of what requests then took. ``metrics``: as requests take
    that ask for layer metrics; the edge then measures them, and both sides collect them. Raises SpecError for numbers
    out of range.
    """

    warmup: int = 3
    repetitions: int = 20
    seconds: float = 20.0
    codec: str = "raw"
    pause: float = 0.005
    metrics: bool = False
    codecs: tuple[str, ...] = ()
    """Measured beside ``codec``, on the frontiers that its rounds make."""
    books: Mapping[str, tuple[Book | None, ...]] = field(default_factory=dict, repr=False)
    """By the name of a cut, what the codec "basis" sends its pieces by; beside another codec it is measured only there.
    """

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("repetitions", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"{name}={value!r}: must be a whole number of at least {least}")
        if not 0 < self.seconds < math.inf:
            raise SpecError(f"seconds={self.seconds}: must be more than 0")
        if not 0 <= self.pause < math.inf:
            raise SpecError(f"pause={self.pause}: must be 0 or more")
        for name in (self.codec, *self.codecs):
            codecs.check(name)
