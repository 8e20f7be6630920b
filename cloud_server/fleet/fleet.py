"""The models of a server by name: loaded, reloaded and unloaded while it serves.

A new model is loaded and warm before it is announced; the one that it replaces finishes its requests. Only what the
operator's own files name can be loaded: clients cannot send code or paths. Changes are made one at a time.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cloud_server.config import ModelEntry
from cloud_server.fleet.hosts import Host, Resident, room_for
from cloud_server.fleet.version import ModelInMemory, Version
from cloud_server.limits import NEVER, Limits
from cloud_server.models import Identity, newest_first
from cloud_server.processes import Trials
from shared_hooks.errors import Disagreement, IsthmusError, ModelFailed, ServerUnavailable, SpecError, UnknownModel

# Evicted models that are wanted again: loaded one after the other, by one thread.
#
# The one whose loads have taken the least time comes first. After each load the thread rests as long as the load
# took, so at most half of the time is spent on loading.

log = logging.getLogger("cloud_server")

LOOK_SECONDS = 0.1
"""The interval of checks for room while requests wait."""
ACCOUNTS = 1024
"""The number of accounts whose loads are counted; beyond it the counts restart."""


class Returning:
    """Loads evicted models again in a thread. ``bring(version, account)`` loads one; returns False if it must wait."""

    def __init__(self, bring: Callable[[Version, str], bool]) -> None:
        self._bring = bring
        self._changed = threading.Condition()
        self._wanted: dict[Version, str] = {}
        """(model, the account that asked first) in the order of the requests."""
        self._seconds: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, version: Version, account: str) -> None:
        """Request that a model is loaded, as long as a request waits for it."""
        with self._changed:
            self._wanted.setdefault(version, account)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="isthmus-returning", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop loading; waits for the model being loaded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._wait():
            for version, account in self._order():
                began = time.monotonic()
                try:
                    done = not version.waiting or self._bring(version, account)
                except BaseException as error:  # this thread serves all clients
                    log.error("loading a model again", exc_info=error)
                    done = False
                if done:
                    self._done(version, account, time.monotonic() - began)
                    self._rest(time.monotonic() - began)
                    break
            else:
                self._rest(LOOK_SECONDS)

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            return not self._closed

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _order(self) -> list[tuple[Version, str]]:
        with self._changed:
            return sorted(self._wanted.items(), key=lambda item: self._seconds[item[1]])

    def _done(self, version: Version, account: str, seconds: float) -> None:
        with self._changed:
            del self._wanted[version]
            if version.waiting and not version.is_resident and not self._closed:
                self._wanted[version] = account  # wanted again meanwhile
            if len(self._seconds) > ACCOUNTS:
                self._seconds.clear()
            self._seconds[account] += seconds  # type: ignore[assignment]


# What changes between two looks at the operator's files, and what clients are sent about it.

Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Reloaded:
    """The names of models that a reload changed."""

    loaded: tuple[str, ...]
    unloaded: tuple[str, ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        named = (("loaded", self.loaded), ("unloaded", self.unloaded), ("as they were", self.kept))
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in named if names) or "no models"


def stamp(entry: ModelEntry) -> Stamp:
    """Return a stamp of a model's files, which changes if one is replaced or written to."""
    found = []
    for path in (*entry.spec.weights, *([entry.spec.selection] if entry.spec.selection else [])):
        try:
            seen = path.stat()
        except OSError:
            continue  # loading it reports more
        found.append((str(path), seen.st_ino, seen.st_size, seen.st_mtime_ns))
    return tuple(found)


def name_of(entry: ModelEntry) -> str:
    """Return the model's name without its version."""
    return entry.spec.model_id.partition(":")[0]


def freeze() -> None:
    """Exclude the loaded models from garbage collection, which would otherwise traverse all of them for every client's
    lists. What was loaded before and is not needed any more is freed.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def unloaded(name: str) -> IsthmusError:
    """Return the error of requests for an unloaded model."""
    return UnknownModel(f'model "{name}" was unloaded on this server; ask again when it is back')


def replaced(mine: Identity, theirs: Identity) -> IsthmusError:
    """Return the error for a client of a model that was replaced."""
    what = "weights" if mine.weights_hash != theirs.weights_hash else "structure, plan or settings"
    digests = f': client "{mine.weights_hash}", server "{theirs.weights_hash}"' if what == "weights" else ""
    return Disagreement(
        f'model "{mine.model_id}" was replaced on this server: client and server differ in {what}{digests}'
    )


EVICT_SECONDS = 10.0
"""How long to wait for a model's requests before its eviction is given up."""


class Fleet(Mapping[str, Version]):
    """Models by name. Thread-safe."""

    def __init__(
        self,
        host: Host,
        entries: Sequence[ModelEntry],
        read: Callable[[], Sequence[ModelEntry]] | None = None,
        settle: Callable[[], object] = gc.collect,
        limits: Limits | None = None,
        trials: Trials | None = None,
    ) -> None:
        """Load ``entries``.

        ``read`` returns what the operator's files say now. ``settle`` is called after models have come or gone.
        ``limits`` bound the memory of their weights. ``trials`` tries cuts before they are served. Raises the error of
        a model that fails.
        """
        self._trials = trials
        limits = limits or Limits()
        self._most, self._turn = limits.max_model_bytes, limits.model_turn_seconds
        if host.all_at_once and self._most < NEVER:
            raise SpecError("limits.max_model_bytes: not with worker processes, each of which has all of its models")
        self._returning = Returning(self._bring)
        self._settle = settle
        self._host = host
        self._read = read
        self._changing = threading.Lock()
        self._named: dict[str, Version] = {}  # never modified, but replaced
        self._versions: weakref.WeakSet[Version] = weakref.WeakSet()
        self._stamps: dict[str, Stamp] = {}
        self._states: dict[str, tuple[str, str]] = {}
        self.loads: Counter[str] = Counter()
        """How often each model was loaded."""
        self.evictions: Counter[str] = Counter()
        """How often each model was evicted."""
        names = [entry.spec.model_id for entry in entries]
        for name, count in Counter(names).items():
            if count > 1:
                raise SpecError(f'models: two are called "{name}"')
        self._load(entries)

    # As a mapping: the served models

    def __getitem__(self, name: str) -> Version:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    @property
    def identities(self) -> list[Identity]:
        """The identities of the served models."""
        return [version.identity for version in self._named.values()]

    def states(self) -> dict[str, tuple[str, str]]:
        """(READY, LOADING or UNAVAILABLE, why) of each model that was ever served."""
        named = self._named
        return {**self._states, **{name: ("READY", "") for name in named if name not in self._states}}

    # Changes

    @contextmanager
    def _changes(self, wait: bool = False) -> Iterator[None]:
        if not self._changing.acquire(blocking=wait):
            raise ServerUnavailable("another change of the models is under way; ask again when it is over")
        try:
            yield
        finally:
            self._changing.release()
            self._settle()

    def load(self, name: str) -> None:
        """Load, or reload, the model of this name as in the operator's files.

        Raises UnknownModel, ServerUnavailable during another change, and the model's error.
        """
        with self._changes():
            found = [entry for entry in self._wanted() if name in (entry.spec.model_id, name_of(entry))]
            if not found:
                raise UnknownModel(f'no model "{name[:128]}" is in the server\'s files')
            self._load(found)

    def unload(self, name: str) -> None:
        """Unload a model: new requests are refused, those in progress are answered.

        Raises UnknownModel, and ServerUnavailable during another change.
        """
        with self._changes():
            found = [name] if name in self._named else newest_first(self._named, name)
            if not found:
                raise UnknownModel(f'no model "{name[:128]}" is served here')
            for one in found:
                self._unload(one)

    def reload(self) -> Reloaded:
        """Make the served models those of the operator's files.

        New entries, and those that have changed or whose files have, are loaded; those that are gone are unloaded. An
        error of reading or of a model is raised, and everything stays as before.
        """
        with self._changes(wait=True):
            entries = {entry.spec.model_id: entry for entry in self._wanted()}
            changed = [entry for name, entry in entries.items() if self._has_changed(name, entry)]
            if changed and self._host.all_at_once:
                changed = list(entries.values())
            self._load(changed)
            gone = [name for name in self._named if name not in entries]
            for name in gone:
                self._unload(name)
            loaded = tuple(entry.spec.model_id for entry in changed)
            return Reloaded(loaded, tuple(gone), tuple(name for name in entries if name not in loaded))

    def _wanted(self) -> Sequence[ModelEntry]:
        if self._read is None:
            raise SpecError("models: this server has no files from which it could load others")
        return self._read()

    def _has_changed(self, name: str, entry: ModelEntry) -> bool:
        version = self._named.get(name)
        return version is None or version.entry != entry or self._stamps[name] != stamp(entry)

    def _load(self, entries: Sequence[ModelEntry]) -> None:
        if not entries:
            return
        names = [entry.spec.model_id for entry in entries]
        # taken before reading, so that a change meanwhile is seen as one
        stamps = {entry.spec.model_id: stamp(entry) for entry in entries}
        began, states = time.monotonic(), self._states
        self._states = {**states, **{name: ("LOADING", "") for name in names if name not in self._named}}
        # with a memory bound, one after the other: at most one of them is in excess at a time
        groups = [[entry] for entry in entries] if self._most < NEVER else [entries]
        try:
            for group in groups:
                self._load_group(group)
        except BaseException as error:
            self._states = {
                **states,
                **{name: ("UNAVAILABLE", str(error)) for name in names if name not in self._named},
            }
            raise
        self._stamps |= stamps
        self._states = {name: state for name, state in states.items() if name not in names}
        log.info("%s loaded and warm after %.1f s", ", ".join(names), time.monotonic() - began)

    def _load_group(self, entries: Sequence[ModelEntry]) -> None:
        began = time.monotonic()
        for one in self._host.load(entries):
            self._check_size(one)
            self._take(one)
            version = self._named[one.entry.spec.model_id]
            version.load_seconds = (time.monotonic() - began) / len(entries)
            self._shed(version)

    def _check_size(self, loaded: ModelInMemory) -> None:
        """Raise SpecError for a model that exceeds the limit even alone."""
        for device, nbytes in loaded.nbytes.items():
            if nbytes > self._most:
                name = loaded.entry.spec.model_id
                loaded.close("it was too large")
                most = f"max_model_bytes is {self._most}"
                raise SpecError(f'models: the weights of "{name}" take {nbytes} bytes on {device}; {most}')

    def _shed(self, newest: Version) -> None:
        """Evict the least recently used models to make room for one that the operator has loaded."""
        for device in newest.nbytes:
            while sum(one.nbytes.get(device, 0) for one in self._residents()) > self._most:
                others = [one for one in self._residents() if one is not newest and one.nbytes.get(device)]
                oldest = sorted(others, key=lambda one: max(dict(one.used).values(), default=0.0))
                if not any(self._evict(one) for one in oldest):
                    log.warning("weights on %s take more than max_model_bytes: all are in use", device)
                    break

    def _residents(self) -> list[Version]:
        return [version for version in self._named.values() if version.is_resident]

    def _evict(self, version: Version) -> bool:
        name = version.identity.model_id
        if not version.leave(f'model "{name}" gave way to another (max_model_bytes)', EVICT_SECONDS):
            return False
        self.evictions[name] += 1
        log.info("%s gave way to another (max_model_bytes)", name)
        return True

    def _bring(self, version: Version, account: str) -> bool:
        """Load the weights of an evicted model again if there is room; returns False if it must wait."""
        with self._changes(wait=True):
            if version.is_resident or version.is_ended:
                return True
            residents = [
                Resident(one, one.nbytes, dict(one.used), one.arrived, one.load_seconds) for one in self._residents()
            ]
            gone = room_for(account, version.nbytes, residents, self._most, self._turn, time.monotonic())
            if gone is None or not all(self._evict(one) for one in gone):
                return False
            began, name = time.monotonic(), version.identity.model_id
            try:
                (loaded,) = self._host.load([version.entry])
                self._check_size(loaded)
            except Exception as error:  # a model's own code may raise anything
                log.error("%s could not be loaded again: %s: %s", name, type(error).__name__, error)
                version.fail(
                    error if isinstance(error, IsthmusError) else ModelFailed(f"{type(error).__name__}: {error}")
                )
                return True
            self._take(loaded)
            self._named[name].load_seconds = time.monotonic() - began
            log.info("%s is back after %.1f s", name, time.monotonic() - began)
            return True

    def close(self) -> None:
        """Stop loading models."""
        self._returning.close()

    def _take(self, loaded: ModelInMemory) -> None:
        """Serve a loaded model under its name from now on."""
        identity = loaded.engine.identity
        name = identity.model_id
        self.loads[name] += 1
        current = self._named.get(name)
        known = next((one for one in self._versions if one.identity.is_like(identity)), None)
        if known is None:
            known = Version(loaded, self._returning.want, self._settle, self._trials)
            self._versions.add(known)
        else:
            known.arrive(loaded, f'model "{name}" was loaded again')
        self._named = {**self._named, name: known}
        if current is not None and current is not known:
            current.end(lambda: replaced(current.identity, identity), f'model "{name}" was replaced')

    def _unload(self, name: str) -> None:
        version = self._named[name]
        self._named = {other: one for other, one in self._named.items() if other != name}
        self._states = {**self._states, name: ("UNAVAILABLE", "unloaded")}
        version.end(lambda: unloaded(name), f'model "{name}" was unloaded')
        log.info("%s unloaded", name)
