"""The calls that a front hands on: how many there may be, who belongs elsewhere, and who is still under way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cloud_server.access import Caller
from cloud_server.cluster.census import Finder
from shared_hooks.errors import IsthmusError, ServerUnavailable
from shared_hooks.sharing import Holding, Party, Shares, giving_way

log = logging.getLogger(__name__)

TELL_BEATS: Final = 3
"""Heartbeats in which a client hears, with the next frame it gets, that it is to go."""


class ProxiedCall:
    """One call that is handed on, from before a replica is looked for until its client has all that came back."""

    def __init__(self, group: str, session: str, caller: Caller, beat: float | None, cancel: Callable[[], Any]) -> None:
        """``cancel`` ends the client's call, from any thread, and tells it nothing more."""
        self.group = group
        self.session = session
        self.party = Party(caller.account)
        self.beat = beat
        """How often its client hears something while it waits, in seconds; infinity: only answers. None: it cannot be
        asked to leave."""
        self.replica = ""
        self.call: Any = None
        self.since = time.monotonic()
        """When it began, or to send the frame that it sends now."""
        self.is_sending = False
        self.settled = True
        """Whether it was asked where it belongs since replicas came or went."""
        self.silences = 0
        """How often there was no answer to that."""
        self.leave: float | None = None
        """Since when its client is to be asked to leave: it then comes back at once."""
        self.reported = False
        self.refused: IsthmusError | None = None
        """Why it was ended here."""
        self._cancel = cancel

    @property
    def under_way(self) -> bool:
        """Whether its client waits for what it has asked for, where it is to go. Who got no frame to learn it from for
        some heartbeats has nothing under way.
        """
        if self.reported or self.beat is None or self.leave is None:
            return True
        return time.monotonic() < self.leave + TELL_BEATS * self.beat

    def holding(self, idle_seconds: float) -> Holding[ProxiedCall]:
        """The least useful: those whose client does not fetch what came, the longest first."""
        is_idle = self.is_sending and time.monotonic() - self.since > idle_seconds
        return Holding(self, self.party, 1, (not self.is_sending, self.since), is_idle)

    def end(self, error: IsthmusError) -> None:
        """From any thread."""
        self.refused = error
        if self.call is not None:
            self.call.cancel()

    def give_up(self, error: IsthmusError) -> None:
        """The same at once: who does not fetch what came does not hear why."""
        self.end(error)
        if self.is_sending:
            self._cancel()


class ProxiedCalls:
    """The proxied calls of one front. Any thread may call."""

    def __init__(self, finder: Finder, places: int, idle_seconds: float) -> None:
        """``places``: calls at a time, each of which holds a thread; beyond that calls of the account with the most are
        ended. ``idle_seconds``: of `Limits`.
        """
        self._finder = finder
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._stays: set[ProxiedCall] = set()
        self._places = Shares(places)

    def __len__(self) -> int:
        return len(self._stays)

    @contextmanager
    def place(self, stay: ProxiedCall) -> Iterator[None]:
        """One of those there are. Raises ServerUnavailable."""
        with self._lock:
            gone: list[ProxiedCall] | None = []
            if not self._places.has_room(1):
                holdings = [one.holding(self._idle_seconds) for one in self._stays]
                gone = giving_way(self._places, stay.party, 1, holdings)
            if gone is None:
                raise ServerUnavailable(
                    f"{len(self._stays)} calls are handed on here, as many as can be: try again later"
                )
            for one in gone:
                self._forget(one)
            self._stays.add(stay)
            self._places.add(stay.party, 1)
        for one in gone:
            log.info("a call of %s gives up its place", one.party.account, extra={"account": one.party.account})
            one.give_up(ServerUnavailable("its place was needed: its account has the most here, or it was idle"))
        try:
            yield
        finally:
            with self._lock:
                self._forget(stay)

    def _forget(self, stay: ProxiedCall) -> None:
        """Its place is free; the caller holds the lock."""
        if stay in self._stays:
            self._stays.remove(stay)
            self._places.remove(stay.party, 1)

    def rebalance(self, *, moved: bool) -> None:
        """At every look: when replicas have come or gone (``moved``), who belongs elsewhere is asked to leave, and
        comes back there. Where nobody says where that is, it is asked again at the next look, after all others.
        """
        with self._lock:
            stays = [one for one in self._stays if one.beat is not None and one.leave is None]
        for stay in stays:
            stay.settled = stay.settled and not moved
        silent: set[str] = set()
        for stay in sorted(stays, key=lambda one: one.silences):
            if stay.settled or not stay.replica or stay.group in silent:
                continue
            try:
                there = self._finder.find(stay.group, stay.session).replica
            except ServerUnavailable:
                stay.silences += 1
                silent.add(stay.group)  # it may take seconds to say nothing
                continue
            stay.settled = True
            if there != stay.replica:
                stay.leave = time.monotonic()

    def tell_all(self) -> None:
        """Every client is asked to leave, with the next frame it gets."""
        with self._lock:
            for stay in self._stays:
                if stay.leave is None:
                    stay.leave = time.monotonic()

    def under_way(self) -> bool:
        """Whether anybody waits for what he has asked for."""
        with self._lock:
            return any(stay.under_way for stay in self._stays)

    def end_all(self, error: IsthmusError) -> None:
        with self._lock:
            stays = list(self._stays)
        for stay in stays:
            stay.end(error)
