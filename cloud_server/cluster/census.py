"""The replicas that a front knows of, and what they serve; checked periodically."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloud_server.access import Caller, granted
from shared_hooks.errors import ServerUnavailable, UnknownModel, logged

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True)
class ReplicaPlace:
    """Where a replica is, as it reports through Ray."""

    replica: str
    """Its name, never used again."""
    address: str
    """HOST:PORT of its private port."""
    secret: str
    """The secret of its fronts."""
    certificate: str
    """PEM; empty: unencrypted, on loopback."""
    models: tuple[tuple[str, str], ...]
    """(id, hash of the weights)"""
    metrics: str = ""
    """In Prometheus's text format, if requested."""

    @classmethod
    def of(cls, reported: Mapping[str, Any]) -> ReplicaPlace:
        return cls(**{**reported, "models": tuple((id, weights) for id, weights in reported["models"])})


class ReplicaFinder(Protocol):
    """Finds replicas. Thread-safe."""

    @property
    def groups(self) -> Sequence[str]:
        """Groups of replicas that serve the same, older versions of a model first."""
        ...

    def find(self, group: str, session: str) -> ReplicaPlace:
        """Return the replica for ``session``. Raises ServerUnavailable."""
        ...

    def all(self, group: str, metrics: bool) -> list[ReplicaPlace]:
        """Return all replicas that can be reached now."""
        ...


class Census:
    """The result of the last `ReplicaFinder.all`."""

    def __init__(self, finder: ReplicaFinder, looked: Callable[[bool, bool], None]) -> None:
        """``looked``: called after each check with whether there is any replica, and whether some came or went."""
        self._finder = finder
        self._looked = looked
        self._places: dict[str, list[ReplicaPlace]] = {}
        self._answering: frozenset[str] = frozenset()
        """The groups of which a replica has answered."""
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="isthmus-census", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def look(self) -> None:
        """Check now."""
        places = {group: self._finder.all(group, metrics=False) for group in self._finder.groups}
        before = self._replicas()
        self._answering = frozenset(group for group, found in places.items() if found)
        # A group that does not answer is assumed to serve what it served: its next replica will.
        self._places = {group: found or self._places.get(group, []) for group, found in places.items()}
        self._looked(bool(self._answering), bool(before) and self._replicas() != before)

    def metrics(self) -> Iterator[tuple[str, str]]:
        """(replica, its metrics), requested now."""
        for group in self._finder.groups:
            for place in self._finder.all(group, metrics=True):
                yield place.replica, place.metrics

    def groups(self, caller: Caller) -> list[str]:
        """Return the groups that answer and serve what the caller may use. Raises ServerUnavailable if none of them
        answers.
        """
        wanted = [one for one in self._finder.groups if not (ids := self._models(one)) or _may(caller, ids)]
        found = [group for group in wanted if group in self._answering]
        if wanted and not found:
            raise ServerUnavailable("no replica answers: try again later")
        return found

    def any(self, caller: Caller) -> str:
        """Return one of these groups, for what every replica can answer."""
        return (self.groups(caller) or self._finder.groups)[-1]

    def group(self, caller: Caller, model_id: str, weights: str = "") -> str:
        """Return the group that serves the model, in the version with these weights or else in the last one.

        Raises UnknownModel if there is none, or the caller may not use it; ServerUnavailable if not all groups are
        known.
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
        """Return the ids of what it serves; empty if it has never answered."""
        return {id for place in self._places.get(group, []) for id, _ in place.models}

    def _replicas(self) -> set[str]:
        return {place.replica for known in self._places.values() for place in known}

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with logged(log, "looking at the replicas"):
                self.look()


def _may(caller: Caller, ids: set[str]) -> list[str]:
    return granted(caller.policy.models, ids)
