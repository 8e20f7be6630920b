"""The calls in progress, over gRPC or REST, which end when their credentials expire."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from cloud_server.access import CallCredentials, Caller, Register
from shared_hooks.errors import IsthmusError, ServerUnavailable

log = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0
"""How long a call that must end has to receive the reason before it is cut."""


class _Guest:
    """An authenticated call."""

    def __init__(self, caller: Caller, shown: CallCredentials, cut: Callable[[], object]) -> None:
        self.caller = caller
        self.shown = shown
        self.cut = cut
        self.refused: IsthmusError | None = None
        """Why it must end."""
        self.notify: Callable[[IsthmusError], object] | None = None


class ActiveCalls:
    """The calls in progress of one server. ``register``: the known identities. Thread-safe."""

    def __init__(self, register: Register) -> None:
        self.register = register
        self._lock = threading.Lock()
        self._inside: dict[Hashable, _Guest] = {}

    def enter(self, call: Hashable, peer: str, shown: CallCredentials, cut: Callable[[], object]) -> Caller:
        """Authenticate a call, which is in progress until `left`. ``cut`` ends it at once, from any thread.

        Raises AccessRefused, usually NotAuthenticated.
        """
        with self._lock:  # both under one lock: the register is as old as what `look_again` finds
            caller = self.register.caller(peer, shown)
            self._inside[call] = _Guest(caller, shown, cut)
        return caller

    def left(self, call: Hashable) -> None:
        """Record that a call has ended; no effect if it was never authenticated."""
        with self._lock:
            self._inside.pop(call, None)

    def caller(self, call: Hashable) -> Caller | None:
        """Return the caller; None if the call is not in progress."""
        with self._lock:
            guest = self._inside.get(call)
        return None if guest is None else guest.caller

    def refused(self, call: Hashable) -> IsthmusError | None:
        """Return the error that ends the call, or None."""
        with self._lock:
            guest = self._inside.get(call)
        return None if guest is None else guest.refused

    def when_sent_away(self, call: Hashable, notify: Callable[[IsthmusError], object]) -> None:
        """Let ``notify`` end the call with an error, from any thread, when its credentials expire."""
        with self._lock:
            guest = self._inside.get(call)
            if guest is None:
                return
            guest.notify = notify
            refused = guest.refused
        if refused is not None:
            notify(refused)

    def look_again(self) -> None:
        """End the calls that would not be authenticated now, or not as the same identity."""
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
                guest.refused, notify = error, guest.notify
            if notify is not None:
                notify(error)
            leaving.append(guest)
        if leaving:
            timer = threading.Timer(LEAVE_SECONDS, lambda: self._cut(leaving))
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # no thread can be started: they have no time to leave by themselves
                self._cut(leaving)

    def _cut(self, leaving: list[_Guest]) -> None:
        """Cut those calls that are still in progress."""
        with self._lock:
            inside = set(self._inside.values())
        for guest in leaving:
            if guest in inside:
                guest.cut()


# Bounds calls that wait for their client, or for an event, and that no other limit bounds: each holds a thread.
#
# Every call gets a place. Where there are too many, the address that has most of them loses its oldest: a client that
# sends its request is done in a moment, so the calls that stay are those that send nothing.


class WaitingCall:
    """The place of one waiting call. ``error``: why it must end; None while it may stay."""

    def __init__(self, address: str, leave: Callable[[], object]) -> None:
        self.address = address
        self.error: IsthmusError | None = None
        self._leave = leave
        self.since: float | None = time.monotonic()
        """When it began to wait for its client; None while it waits for the server."""

    def send_away(self, error: IsthmusError) -> None:
        self.error = error
        self._leave()


class WaitingCalls:
    """At most ``most`` waiting calls, each at most ``seconds`` for its client's message. Thread-safe."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._lock = threading.Lock()
        self._places: dict[WaitingCall, None] = {}  # oldest first
        self._of: Counter[str] = Counter()

    @contextmanager
    def place(self, address: str, leave: Callable[[], object]) -> Iterator[WaitingCall]:
        """Hold a place while the call waits. ``leave`` ends it, from any thread, and must not block."""
        mine = self.enter(address, leave)
        try:
            yield mine
        finally:
            self.leave(mine)

    def enter(self, address: str, leave: Callable[[], object]) -> WaitingCall:
        """As `place`, without a block: `leave` must follow."""
        mine = WaitingCall(address, leave)
        gone = None
        with self._lock:
            if len(self._places) >= self._most:
                # counting one more for this address, so among equals the newcomer's own call is ended
                most = max(self._of, key=lambda name: self._of[name] + (name == address) / 2)
                gone = next(one for one in self._places if one.address == most)
                self._forget(gone)
            self._places[mine] = None
            self._of[address] += 1
        if gone is not None:
            gone.send_away(
                ServerUnavailable(f"{self._most} calls wait here, most of them of this address: the oldest is ended")
            )
        return mine

    def leave(self, place: WaitingCall) -> None:
        """Release the place. Idempotent."""
        with self._lock:
            self._forget(place)

    def sweep(self) -> None:
        """End the calls whose message does not come."""
        with self._lock:
            until = time.monotonic() - self._seconds
            late = [one for one in self._places if one.since is not None and one.since < until]
            for one in late:
                self._forget(one)
        for one in late:
            one.send_away(ServerUnavailable(f"no message came within {self._seconds:g} s"))

    def _forget(self, place: WaitingCall) -> None:
        if place in self._places:
            del self._places[place]
            self._of[place.address] -= 1
            if not self._of[place.address]:
                del self._of[place.address]

    def __len__(self) -> int:
        return len(self._places)
