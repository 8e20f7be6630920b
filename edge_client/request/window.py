"""How many requests of a run are under way: as few as keep the way to the server, and the server, busy.

A request that meets nobody on its way takes what the fastest took. What later ones take beyond that they spend in
queues: on this side, in the network's buffers or at the server, which need not be told apart. So of ``n`` under way
``n * (1 - fastest / took)`` wait somewhere. While less than one does, and this side had to wait for an answer, one more
may be under way (until the pipe was full once, twice as many); where more than `TOO_MANY` do, half of those fewer. More
would make answers late and nothing faster. What was begun before a change says nothing of it.
"""

from __future__ import annotations

from typing import Final

ENOUGH: Final = 1
TOO_MANY: Final = 3
RENEWED: Final = 4096
"""Answers after which the fastest is measured anew, with few under way: another path may be slower for good."""


class Window:
    """From ``least`` to ``most``. One thread calls."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self._least = least
        self._most = max(least, most)
        self._fastest: float | None = None
        self._of = ""
        self._left = RENEWED
        self._unaware = 0
        """Answers still to come to what was begun before the last change."""
        self._has_met_end = False

    def answered(self, split: str, took_ns: int, under_way: int, waited: bool) -> None:
        """A request, begun as the last of so many under way, has taken ``took_ns`` from its packed frontier to the
        last byte of its answer.

        ``split``: where it was cut; another cut is measured anew. ``waited``: the answer was not there, with no place
        left.
        """
        if took_ns <= 0:  # nothing was sent
            return
        self._left -= 1
        if split != self._of or not self._left:
            self.size, self._of, self._fastest, self._left = self._least, split, None, RENEWED
            self._unaware, self._has_met_end = 0, False
        fastest = self._fastest = took_ns if self._fastest is None else min(self._fastest, took_ns)
        self._unaware -= 1
        waiting = under_way * (1 - fastest / took_ns)
        if self._unaware >= 0 or under_way < self.size:
            return
        if waiting > TOO_MANY:
            if under_way <= self._least:  # so few do not wait for each other: all is slower than it was
                self._fastest = took_ns
            self._has_met_end = True
            self._change(round(under_way - waiting / 2))
        elif waited and waiting < ENOUGH:
            self._change(self.size + (1 if self._has_met_end else self.size))

    def _change(self, size: int) -> None:
        self._unaware = self.size
        self.size = max(self._least, min(self._most, size))
