"""The calls that are being served, by gRPC or REST, ended when their credentials no longer hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

from cloud_server.access import Caller, Credentials, Register
from shared_hooks.errors import IsthmusError, ServerUnavailable

log = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0
"""For who is sent away to hear why; then the call is cut."""


class _Guest:
    """A call that was let in."""

    def __init__(self, caller: Caller, shown: Credentials, cut: Callable[[], object]) -> None:
        self.caller = caller
        self.shown = shown
        self.cut = cut
        self.refused: IsthmusError | None = None
        """Why it is sent away."""
        self.tell: Callable[[IsthmusError], object] | None = None


class ActiveCalls:
    """The active calls of one server. ``register``: who is let in. Any thread may call."""

    def __init__(self, register: Register) -> None:
        self.register = register
        self._lock = threading.Lock()
        self._inside: dict[Hashable, _Guest] = {}

    def enter(self, call: Hashable, peer: str, shown: Credentials, cut: Callable[[], object]) -> Caller:
        """Who shows these credentials; inside until `left`. ``cut`` ends the call at once, from any thread.

        Raises AccessRefused, mostly NotAuthenticated.
        """
        with self._lock:  # for both: what the register says is as old as what `look_again` finds
            caller = self.register.caller(peer, shown)
            self._inside[call] = _Guest(caller, shown, cut)
        return caller

    def left(self, call: Hashable) -> None:
        """It has ended; may be said of one that was never let in."""
        with self._lock:
            self._inside.pop(call, None)

    def caller(self, call: Hashable) -> Caller | None:
        """None where it is not inside (any more)."""
        with self._lock:
            guest = self._inside.get(call)
        return None if guest is None else guest.caller

    def refused(self, call: Hashable) -> IsthmusError | None:
        """What it is sent away with."""
        with self._lock:
            guest = self._inside.get(call)
        return None if guest is None else guest.refused

    def when_sent_away(self, call: Hashable, tell: Callable[[IsthmusError], object]) -> None:
        """``tell`` ends the call with an error, from any thread: for who may no longer stay."""
        with self._lock:
            guest = self._inside.get(call)
            if guest is None:
                return
            guest.tell = tell
            refused = guest.refused
        if refused is not None:
            tell(refused)

    def look_again(self) -> None:
        """Sends those away who would not be let in now, or not as who they are."""
        with self._lock:
            inside = [guest for guest in self._inside.values() if guest.refused is None]
        leaving = []
        for guest in inside:
            try:
                now = self.register.caller(guest.caller.peer, guest.shown)
                if now == guest.caller:
                    continue
                error: IsthmusError = ServerUnavailable(f'what "{now.identity}" may do was changed; start again')
            except IsthmusError as refused:
                error = refused
            log.info("%s is sent away: %s", guest.caller.account, error)
            with self._lock:
                guest.refused, tell = error, guest.tell
            if tell is not None:
                tell(error)
            leaving.append(guest)
        if leaving:
            timer = threading.Timer(LEAVE_SECONDS, lambda: self._cut(leaving))
            timer.daemon = True
            timer.start()

    def _cut(self, leaving: list[_Guest]) -> None:
        """Those of them that are still inside."""
        with self._lock:
            inside = set(self._inside.values())
        for guest in leaving:
            if guest in inside:
                guest.cut()
