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
        """Of replicas that serve the same, older versions of a model before newer ones."""
        ...

    def find(self, group: str, session: str) -> Place:
        """The replica where ``session`` belongs. Raises ServerUnavailable."""
        ...

    def all(self, group: str, metrics: bool) -> list[Place]:
        """Every replica that can be reached now."""
        ...


class Census:
    """What `Finder.all` said at the last look. ``moved``: called when replicas have come or gone."""

    def __init__(self, finder: Finder, moved: Callable[[], None], changed: Callable[[bool], None]) -> None:
        """``changed``: called with whether there is any replica at all, at each look."""
        self._finder = finder
        self._moved = moved
        self._changed = changed
        self._places: dict[str, list[Place]] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="isthmus-census", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def look(self) -> None:
        """Asks now."""
        places = {group: self._finder.all(group, metrics=False) for group in self._finder.groups}
        before = {place.replica for known in self._places.values() for place in known}
        # A group of which nothing is heard serves what it served: its next replica will.
        self._places = {group: found or self._places.get(group, []) for group, found in places.items()}
        now = {place.replica for found in places.values() for place in found}
        self._changed(any(places.values()))
        if before and now and now != before:
            self._moved()

    def metrics(self) -> Iterator[tuple[str, str]]:
        """(replica, its metrics), asked now."""
        for group in self._finder.groups:
            for place in self._finder.all(group, metrics=True):
                yield place.replica, place.metrics

    def models(self) -> set[str]:
        """Ids of all that are served."""
        return {id for known in self._places.values() for place in known for id, _ in place.models}

    def group(self, caller: Caller, model_id: str, weights: str = "") -> str:
        """The group that serves the model, in the version with these weights if there is one, else in the last.

        Raises UnknownModel where none does, or the caller may not use it; ServerUnavailable where not all are known.
        """
        allowed = granted(caller.policy.models, self.models())
        if model_id not in allowed:
            silent = [group for group in self._finder.groups if not self._places.get(group)]
            if silent:
                raise ServerUnavailable(f"no replica of {', '.join(silent)} is up yet: try again later")
            there = ", ".join(allowed)
            raise UnknownModel(f'no model "{model_id[:256]}" is served here; there is: {there}')
        serving = [
            (group, served)
            for group, known in self._places.items()
            if (served := {weights for place in known for id, weights in place.models if id == model_id})
        ]
        same = [group for group, served in serving if weights in served]
        return (same or [group for group, _ in serving])[-1]

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # a look that fails is one of many; who watches must not die of it
                log.exception("the replicas could not be looked at")
