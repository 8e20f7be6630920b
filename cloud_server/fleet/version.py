"""One model with one set of weights, as clients agreed on it: an `Engine` whose weights can be evicted and loaded
again.

Requests wait here, outside of any worker, for weights that are being loaded; those in progress keep them in memory. A
version that was unloaded or replaced refuses new requests by name. With the same weights it may come back as the same
version, so that open streams continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cloud_server.config import ModelEntry
from cloud_server.models import Computed, Engine, EngineSession, FileRead, Following, Leave, PartEnd, Progress, room_for
from cloud_server.models.admission import check_file, check_frontier, check_step
from cloud_server.models.engine import Batching, StepBatching
from cloud_server.processes import Trials
from shared_hooks import Crossing
from shared_hooks.errors import IsthmusError, ServerUnavailable
from shared_hooks.modules.manifest import Manifest

# What keeps weights in memory: requests queued while the weights are loaded, or waiting for them.


@dataclass(frozen=True)
class ModelInMemory:
    """A model in memory. ``nbytes``: of its weights, by device. ``close`` frees them, with the reason for decoding
    sessions.
    """

    entry: ModelEntry
    engine: Engine
    close: Callable[[str], None] = lambda why: None
    nbytes: Mapping[str, int] = field(default_factory=dict)
    compiled: Callable[[], Iterable[str]] = tuple
    """The states of its compiled tails (`shared_hooks.compiling.Standing`), one word for each."""
    spot_checks: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """The number of batches of which a part was also computed alone, and of copies that make no batches any more for
    it.
    """


class Home:
    """Weights in memory, and the number of requests that need them."""

    def __init__(self, loaded: ModelInMemory) -> None:
        self.loaded = loaded
        self.pins = 0


class Keeper(Protocol):
    """Owns weights that requests keep in memory. Thread-safe."""

    def unpin(self, home: Home) -> None:
        """A request that needed the weights is over."""
        ...


def unpinned(home: Home) -> bool:
    """Return whether no request needs these weights."""
    return not home.pins


class PinnedRequest:
    """A request that keeps weights in memory until `leave`, which takes effect once."""

    def __init__(self, keeper: Keeper, home: Home | None, put: Callable[[], Leave]) -> None:
        self._keeper = keeper
        self._home = home
        try:
            self._leave = put()
        except BaseException:
            if home is not None:
                keeper.unpin(home)
            raise

    @classmethod
    def entered(cls, keeper: Keeper, home: Home | None, put: Callable[[], Leave]) -> Leave:
        """Start it with ``put``; the keeper has counted it already."""
        return cls(keeper, home, put).leave

    def leave(self) -> None:
        self._leave()
        home, self._home = self._home, None
        if home is not None:
            self._keeper.unpin(home)


class DeferredRequest:
    """A request that is started later, by `go`, and may be cancelled before or after."""

    def __init__(self, before: Leave | None = None) -> None:
        """``before``: called if it is cancelled while it still waits."""
        self.before = before
        self._lock = threading.Lock()
        self._left = False
        self._leave: Leave | None = None

    def go(self, put: Callable[[], Leave], instead: Callable[[], Leave] | None = None) -> bool:
        """Start it, unless it was cancelled; returns whether it was started.

        ``instead`` replaces ``put`` if that raises: the error is then reported when the request is computed.
        """
        with self._lock:
            if self._left:
                return False
        try:
            leave = put()
        except IsthmusError:
            if instead is None:
                raise
            leave = instead()
        with self._lock:
            self._leave, is_left = leave, bool(self._left)
        if is_left:
            leave()
        return True

    def leave(self) -> None:
        if self.before is not None:
            self.before()
        with self._lock:
            self._left, leave = True, self._leave
        if leave is not None:
            leave()


AGAIN_SECONDS = 5.0
"""After a failure to load, the interval until the next attempt."""
ACCOUNTS = 1024
"""The number of accounts whose last use is remembered."""


class Version:
    """An `Engine` and its `Residence`. Thread-safe."""

    def __init__(
        self,
        loaded: ModelInMemory,
        wanted: Callable[[Version, str], None] = lambda version, account: None,
        gone: Callable[[], object] = lambda: None,
        trials: Trials | None = None,
    ) -> None:
        """``wanted`` is called, and must not block, with the account that needs weights which are not in memory;
        ``gone`` after weights were freed. ``trials`` tries a cut before it is served.
        """
        self._gone = gone
        self._trials = trials
        self.identity = loaded.engine.identity
        self.entry = loaded.entry
        self.nbytes = loaded.nbytes
        self.residence = self
        self.used: dict[str, float] = {}
        """When each account last used it (time.monotonic)."""
        self.arrived = time.monotonic()
        self.load_seconds = 0.0
        """How long loading took, the last time."""
        self._failed_at = 0.0
        self._wanted = wanted
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._home: Home | None = Home(loaded)
        self._parked: dict[DeferredRequest, Callable[[], Leave]] = {}
        self._leaving = False
        self._ended: Callable[[], IsthmusError] | None = None
        self._failed: IsthmusError | None = None
        self._manifest: Manifest | None = None

    # Residency

    @property
    def is_resident(self) -> bool:
        """Whether its weights are in memory and not being evicted."""
        return self._home is not None and not self._leaving

    @property
    def compiled(self) -> list[str]:
        """The states of its compiled tails, one word for each; empty without weights."""
        home = self._home
        return [] if home is None else list(home.loaded.compiled())

    @property
    def spot_checks(self) -> tuple[int, int]:
        """The number of batches of which a part was also computed alone, and of copies of the model that make no
        batches any more because of that, since its weights were loaded.
        """
        home = self._home
        return (0, 0) if home is None else home.loaded.spot_checks()

    @property
    def waiting(self) -> int:
        """The number of requests that wait for its weights."""
        return len(self._parked)

    def enter(self, account: str, put: Callable[[], Leave], cut: str = "") -> Leave:
        """As `Residence.enter`."""
        if cut and self._trials is not None:
            deferred = DeferredRequest()
            go = partial(deferred.go, partial(self.enter, account, put), put)
            if self._trials.wait(self.identity, cut, max(self.nbytes.values(), default=0), go):
                return deferred.leave
        with self._lock:
            home = self._home
            if home is None and self._ended is not None:
                raise self._ended()
            now = time.monotonic()
            if home is None and self._failed is not None and now - self._failed_at < AGAIN_SECONDS:
                raise self._absence()
            if len(self.used) > ACCOUNTS:
                self.used.clear()
            self.used[account] = now
            if home is None or (self._leaving and self._ended is None):
                parked = DeferredRequest()
                parked.before = partial(self._unpark, parked)
                self._parked[parked] = put
            else:
                parked = None
                home.pins += 1
        if parked is None:
            return PinnedRequest.entered(self, home, put)
        self._wanted(self, account)
        return parked.leave

    def arrive(self, loaded: ModelInMemory, why: str = "") -> None:
        """Use new weights: waiting requests continue.

        Previous weights are freed once nothing needs them; decoding sessions are then lost, with the reason ``why``.
        """
        with self._lock:
            before, self._home = self._home, Home(loaded)
            self.entry, self.nbytes = loaded.entry, loaded.nbytes
            self._ended = self._failed = None
            self._leaving, self.arrived = False, time.monotonic()
        self._admit()
        if before is not None:
            threading.Thread(target=self._close, args=(before, why), name="isthmus-closing", daemon=True).start()

    def fail(self, error: IsthmusError) -> None:
        """Loading failed: waiting requests get the error, and the next request tries again."""
        with self._lock:
            self._failed, self._failed_at = error, time.monotonic()
        self._admit()

    def _admit(self) -> None:
        with self._lock:
            home = self._home
            parked, self._parked = self._parked, {}
            if home is not None:
                home.pins += len(parked)
        for one, put in parked.items():  # without weights it is queued to get the reason
            if not one.go(partial(PinnedRequest.entered, self, home, put)) and home is not None:
                self.unpin(home)

    def end(self, why: Callable[[], IsthmusError], reported: str) -> None:
        """Refuse new requests with the error that ``why`` makes.

        Those in progress continue; then the weights are freed, and decoding sessions are lost with the reason
        ``reported``.
        """
        with self._lock:
            self._ended = why
        self._admit()
        threading.Thread(target=self.leave, args=(reported,), name="isthmus-closing", daemon=True).start()

    def leave(self, why: str, seconds: float | None = None) -> bool:
        """Free the weights once nothing needs them, within ``seconds``; returns whether they were freed.

        New requests wait meanwhile; decoding sessions are lost with the reason ``why``.
        """
        self._remember()
        with self._lock:
            home, self._leaving = self._home, True
            if home is None:
                self._leaving = False
                return True
            gone = self._changed.wait_for(partial(self._is_free, home), seconds)
            if not gone or self._home is not home:
                self._leaving = False
            else:
                self._home, self._leaving = None, False
        if not gone or self._home is not None:  # the model was loaded again meanwhile
            self._admit()
            return False
        home.loaded.close(why)
        del home
        self._gone()
        return True

    @property
    def is_ended(self) -> bool:
        """Whether new requests are refused."""
        return self._ended is not None

    def _is_free(self, home: Home) -> bool:
        """Return whether nothing needs these weights, or others have replaced them."""
        return not home.pins or self._home is not home

    def _remember(self) -> None:
        """Keep what clients may ask for while the weights are not in memory."""
        if self._ended is None and self._manifest is None:
            try:
                self._manifest = self._engine().manifest()
            except IsthmusError:
                pass  # requests get the error that the model is not loaded

    def _close(self, home: Home, why: str) -> None:
        with self._lock:
            self._changed.wait_for(partial(unpinned, home))
        home.loaded.close(why)
        del home
        self._gone()

    def unpin(self, home: Home) -> None:
        """A request that needed the weights is over."""
        with self._lock:
            home.pins -= 1
            self._changed.notify_all()

    def _unpark(self, parked: DeferredRequest) -> None:
        with self._lock:
            self._parked.pop(parked, None)

    def _absence(self) -> IsthmusError:
        """Return why it cannot compute now."""
        if self._ended is not None:
            return self._ended()
        if self._failed is not None:
            return type(self._failed)(f'model "{self.identity.model_id}" could not be loaded again: {self._failed}')
        return ServerUnavailable(f'model "{self.identity.model_id}" is not in memory just now; ask again')

    def _engine(self) -> Engine:
        home = self._home
        if home is None:
            raise self._absence()
        return home.loaded.engine

    # The engine

    @property
    def step_batching(self) -> StepBatching | None:
        home = self._home
        return None if home is None else home.loaded.engine.step_batching

    @property
    def batching(self) -> Batching | None:
        home = self._home
        if home is None or (self._trials is not None and self._trials.refuses(self.identity)):
            return None  # alone, each request is refused or computed by its own cut
        return home.loaded.engine.batching

    def manifest(self) -> Manifest:
        """Return the facts behind its digests, also without weights in memory."""
        return self._manifest if self._manifest is not None else self._engine().manifest()

    def allocate(self, nbytes: int) -> memoryview:
        home = self._home
        return room_for(nbytes) if home is None else home.loaded.engine.allocate(nbytes)

    def _admitting(self) -> Engine | None:
        """Return the engine that checks a request; None if only what needs no model can be checked. Raises if requests
        are refused.
        """
        if self._ended is not None:
            raise self._ended()
        home = self._home
        return None if home is None else home.loaded.engine

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        engine = self._admitting()
        if engine is None:
            check_frontier(crossing, header, payload_bytes, max_bytes)
        else:
            engine.admit(crossing, header, payload_bytes, max_bytes)
        if self._trials is not None:
            self._trials.check(self.identity, crossing.layer_name, along=bool(crossing.later))

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        self._admitting()
        check_file(self.identity, suffix, preprocess_digest, header, payload_bytes, max_bytes)

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        self._admitting()
        check_step(header, payload_bytes, max_bytes)

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        if self._trials is not None:
            self._trials.check(self.identity, crossing.layer_name, along=bool(crossing.later))
        return self._engine().compute(crossing, header, payload, want_metrics, end)

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        home = self._home
        return None if home is None else home.loaded.engine.read_file(suffix, header, payload, max_bytes)

    def compute_file(
        self,
        suffix: str,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        max_bytes: int,
        read: FileRead | None = None,
        end: PartEnd | None = None,
    ) -> Computed:
        return self._engine().compute_file(suffix, header, payload, want_metrics, max_bytes, read, end)

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        return self._engine().open_session(cut, following)

    def observing(self, observers: tuple[str, ...]) -> AbstractContextManager[Callable[[], bytes]]:
        return self._engine().observing(observers)

    @property
    def profile_yields(self) -> bool:
        return self._engine().profile_yields

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        return self._engine().profile(warmup, repetitions, seconds, on_progress, codecs)
