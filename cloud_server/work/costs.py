"""What a job takes, guessed from the last ones of the same kind."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable

LAST = 16
KEPT = 1024
ENOUGH = 3
"""Jobs after which a guess may be used to turn somebody away."""


class Costs:
    """Seconds by name, of the names used last. The longest of the last jobs does not count: it may have been the first
    at its cut, whose tail had to be worked out. One thread at a time.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, deque[float]] = OrderedDict()
        self._guess: dict[Hashable, float] = {}

    def add(self, name: Hashable, seconds: float) -> None:
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = deque(maxlen=LAST)
            if len(self._seen) > KEPT:
                del self._guess[self._seen.popitem(last=False)[0]]
        self._seen.move_to_end(name)
        seen.append(seconds)
        self._guess[name] = (sum(seen) - max(seen)) / (len(seen) - 1) if len(seen) > 1 else seconds

    def guess(self, name: Hashable) -> float | None:
        """None for one that nothing is known of."""
        return self._guess.get(name)

    def knows(self, name: Hashable) -> bool:
        """Whether enough jobs of it are known."""
        return len(self._seen.get(name, ())) >= ENOUGH
