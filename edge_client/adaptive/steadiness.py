"""Whether what is better is enough better, for long enough, to move to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared_hooks.errors import SpecError

SECOND: Final = 1_000_000_000
CALM_AFTER: Final = 10 * SECOND
"""Moves so long ago no longer make the next one harder."""
CLEAR: Final = 0.2
"""A gain that needs no repetition when a sudden change has just been seen."""


@dataclass(frozen=True)
class Steady:
    """When to move: a ``gain`` (0.10 = 10 % better) through ``decisions`` or ``seconds``, whichever is over first; at
    once where the held candidate is impossible or ``worse`` times as bad as the best. Every move doubles the gain that
    the next one needs (up to half), until a sudden change is seen or no move was made for some seconds.
    """

    gain: float = 0.10
    decisions: int = 3
    seconds: float = 0.5
    worse: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.gain < 1 or self.decisions < 1 or self.seconds < 0 or self.worse <= 1:
            raise SpecError(f"{self}: expected 0 <= gain < 1, decisions >= 1, seconds >= 0, worse > 1")


class Steadiness:
    """What the next move needs, by the moves before. Times are nanoseconds."""

    def __init__(self, steady: Steady) -> None:
        self._steady = steady
        self.is_shaken = False
        """Whether a sudden change was seen since the last choice."""
        self._better: tuple[int, int] | None = None  # since when, and in how many decisions, something else was better
        self._moves: list[int] = []  # when, since the last sudden change

    def gives_way(self, now: int, held: float, best: float) -> bool:
        """Whether what is held is replaced by another, by the scores of both: less is better."""
        if best >= held:
            self._better = None
            return False
        steady = self._steady
        if held >= steady.worse * best:
            return True
        self._moves = [when for when in self._moves if now - when < CALM_AFTER]
        needed = max(steady.gain, min(0.5, steady.gain * 2 ** len(self._moves)))
        if best > (1 - needed) * held:
            self._better = None
            return False
        if self.is_shaken and best <= (1 - CLEAR) * held:  # two observations, or a late request, have already said so
            return True
        since, count = self._better or (now, 0)
        self._better = since, count + 1
        return count + 1 >= steady.decisions or now - since >= steady.seconds * SECOND

    def chosen(self, now: int, *, moved: bool) -> None:
        """A choice was made; ``moved``: from one candidate to another."""
        if moved:
            self._moves.append(now)
            self._better = None
        self.is_shaken = False

    def shaken(self) -> None:
        """A sudden change was seen: earlier moves make the next one no harder."""
        self._moves.clear()
        self.is_shaken = True
