"""The replicas that a front knows of, looked at every now and then: who is there, and what they serve."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloud_server.access import Caller, granted
from shared_hooks.errors import ServerUnavailable, UnknownModel

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Place:
    """Where a replica is, as it says itself; to be had only through Ray."""

    replica: str
    """Its name, different for every one that ever was."""
    address: str
    """HOST:PORT of its private port."""
    secret: str
    """What lets a front in there."""
    certificate: str
    """PEM; empty = in the clear, on loopback."""
    models: tuple[tuple[str, str], ...]
    """(id, hash of the weights)"""
    metrics: str = ""
    """In Prometheus's text format, where they were asked for."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Place:
        return cls(**{**said, "models": tuple((id, weights) for id, weights in said["models"])})


class Finder(Protocol):
    """Who knows where replicas are. Any thread may call."""

    @property
    def groups(self) -> Sequence[str]:
        """Groups of replicas that serve the same, older versions of a model before newer ones."""
        ...

    def find(self, group: str, session: str) -> Place:
        """The replica where ``session`` belongs. Raises ServerUnavailable."""
        ...

    def all(self, group: str, metrics: bool) -> list[Place]:
        """Every replica that can be reached now."""
        ...


class Census:
    """What `Finder.all` said at the last look."""

    def __init__(self, finder: Finder, looked: Callable[[bool, bool], None]) -> None:
        """``looked``: called at each look with whether there is any replica at all, and whether some came or went."""
        self._finder = finder
        self._looked = looked
        self._places: dict[str, list[Place]] = {}
        self._heard: frozenset[str] = frozenset()
        """The groups of which a replica answered."""
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="isthmus-census", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def look(self) -> None:
        """Asks now."""
        places = {group: self._finder.all(group, metrics=False) for group in self._finder.groups}
        before = self._replicas()
        self._heard = frozenset(group for group, found in places.items() if found)
        # A group of which nothing is heard serves what it served: its next replica will.
        self._places = {group: found or self._places.get(group, []) for group, found in places.items()}
        self._looked(bool(self._heard), bool(before) and self._replicas() != before)

    def metrics(self) -> Iterator[tuple[str, str]]:
        """(replica, its metrics), asked now."""
        for group in self._finder.groups:
            for place in self._finder.all(group, metrics=True):
                yield place.replica, place.metrics

    def groups(self, caller: Caller) -> list[str]:
        """Those that answer and serve what the caller may use. Raises ServerUnavailable where none of his answers."""
        wanted = [one for one in self._finder.groups if not (ids := self._models(one)) or _may(caller, ids)]
        found = [group for group in wanted if group in self._heard]
        if wanted and not found:
            raise ServerUnavailable("no replica answers: try again later")
        return found

    def any(self, caller: Caller) -> str:
        """One of them, for what every replica can say."""
        return (self.groups(caller) or self._finder.groups)[-1]

    def group(self, caller: Caller, model_id: str, weights: str = "") -> str:
        """The group that serves the model, in the version with these weights if there is one, else in the last.

        Raises UnknownModel where none does, or the caller may not use it; ServerUnavailable where not all are known.
        """
        allowed = _may(caller, {id for group in self._finder.groups for id in self._models(group)})
        if model_id not in allowed:
            if _may(caller, {model_id}) and not all(map(self._places.get, self._finder.groups)):
                raise ServerUnavailable(f"no replica of {model_id[:256]} is up yet: try again later")
            there = ", ".join(allowed)
            raise UnknownModel(f'no model "{model_id[:256]}" is served here; there is: {there}')
        serving = [
            (group, served)
            for group, known in self._places.items()
            if (served := {weights for place in known for id, weights in place.models if id == model_id})
        ]
        same = [group for group, served in serving if weights in served]
        return (same or [group for group, _ in serving])[-1]

    def _models(self, group: str) -> set[str]:
        """Ids of what it serves; none while nothing was ever heard of it."""
        return {id for place in self._places.get(group, []) for id, _ in place.models}

    def _replicas(self) -> set[str]:
        return {place.replica for known in self._places.values() for place in known}

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # a look that fails is one of many; who watches must not die of it
                log.exception("the replicas could not be looked at")


def _may(caller: Caller, ids: set[str]) -> list[str]:
    return granted(caller.policy.models, ids)
