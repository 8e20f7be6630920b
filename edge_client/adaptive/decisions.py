"""What ``--split auto`` decided, when, and on which numbers: kept, logged, and handed on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from edge_client.adaptive.controller import Choice
from edge_client.screen.text import number

log = logging.getLogger("edge_client.adaptive")

KEPT: Final = 4096
"""About 1.4 kB each; `--log-decisions` has all of them."""


class Decisions:
    """Decisions and events in the order of their coming; the oldest are forgotten. Any thread may add.

    A listener gets them one at a time and in the same order, so a slow listener delays the decisions.
    Each is a dictionary with ``seconds`` since the start and ``kind``: "choice" (one a request: ``candidate``,
    ``moved``, ``reason``, and the controller's numbers), "hedge", "gone", "back", "found", "probe", "allowed" (what the
    server lets this side use) or "refused" (a witness took a cut out of use).
    """

    def __init__(self, on_decision: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._began = time.monotonic()
        self._listeners = [] if on_decision is None else [on_decision]
        self._lock = threading.RLock()  # a listener may itself lead to an event

    @property
    def all(self) -> list[dict[str, Any]]:
        """Those of until now, the oldest first: a list of its own, for other threads go on adding."""
        with self._lock:
            return list(self._kept)

    @property
    def began(self) -> float:
        """The ``time.monotonic()`` from which ``seconds`` count."""
        return self._began

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        """``listener`` gets all that come from now on; what is returned came before."""
        with self._lock:
            self._listeners = [*self._listeners, listener]
            return list(self._kept)

    def forget(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """It gets no more."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one != listener]

    def choice(self, choice: Choice) -> None:
        """Where the next request runs."""
        level = logging.INFO if choice.moved else logging.DEBUG
        known: dict[str, Any] = {"candidate": choice.candidate.name}
        if choice.candidate.codec:
            known["codec"] = choice.candidate.codec
        known |= {"moved": choice.moved, "reason": choice.reason}
        self._add("choice", {**known, **choice.numbers}, level)

    def event(self, kind: str, level: int = logging.INFO, **known: Any) -> None:
        """Something that led, or may lead, to another choice."""
        self._add(kind, known, level)

    def _add(self, kind: str, known: dict[str, Any], level: int) -> None:
        finite = {name: _kept(value) for name, value in known.items()}
        with self._lock:
            entry = {"seconds": round(time.monotonic() - self._began, 4), "kind": kind, **finite}
            self._kept.append(entry)
            log.log(level, "%s: %s", kind, ", ".join(f"{name}={_shown(value)}" for name, value in known.items()))
            for listener in self._listeners:
                listener(entry)


def _kept(value: Any) -> Any:
    """Without digits that nobody measured, and what JSON has no number for."""
    if not isinstance(value, float):
        return value
    return None if value in (math.inf, -math.inf) else round(value, 6)


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
