"""Where models are loaded: in this process, or in worker processes, on one device each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from cloud_server.config import ModelEntry, ServerConfig
from cloud_server.fleet.room import placed
from cloud_server.fleet.version import Loaded
from cloud_server.models import Computed, End, Engine, EngineSession, FileRead, Following, Progress, ServedModel
from cloud_server.processes import Pool, PooledModel, Share, payload_memory
from shared_hooks import Crossing
from shared_hooks.errors import Disagreement, ModelFailed
from shared_hooks.modules.manifest import Manifest
from shared_hooks.tail import payer

# One model on several devices: an `Engine` that hands each request to the replica that has the fewest.


class Replicated:
    """``replicas``: engines of one model with the same weights. Raises Disagreement where they are not the same."""

    step_batching = None
    """Decoding sessions live on one replica each: a group would have to be of one."""
    batching = None
    """A request goes to whichever replica has the fewest, and is computed there alone."""
    residence = None

    def __init__(self, replicas: Sequence[Engine]) -> None:
        self.identity = replicas[0].identity
        for one in replicas[1:]:
            if not one.identity.is_like(self.identity):
                text = "is not the same on each device: weights, plan or settings differ"
                raise Disagreement(f'model "{self.identity.model_id}" {text}')
        self._replicas = tuple(replicas)
        self._lock = threading.Lock()
        self._busy = [0] * len(replicas)
        self._last = -1

    @property
    def busy(self) -> tuple[int, ...]:
        """Requests that each replica computes."""
        return tuple(self._busy)

    @contextmanager
    def _least(self, same: bool = False) -> Iterator[Engine]:
        """The replica with the fewest requests, for the block; of equals the next in turn. ``same``: for each client
        always the same.
        """
        count = len(self._replicas)
        with self._lock:
            number = min(range(count), key=lambda one: (self._busy[one], (one - self._last - 1) % count))
            number = hash(payer.get()) % count if same else number
            self._busy[number] += 1
            self._last = number
        try:
            yield self._replicas[number]
        finally:
            with self._lock:
                self._busy[number] -= 1

    def manifest(self) -> Manifest:
        """The manifest of the first; they are all alike."""
        return self._replicas[0].manifest()

    def allocate(self, nbytes: int) -> memoryview:
        """Memory that all replicas see."""
        return self._replicas[0].allocate(nbytes)

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As any of them."""
        self._replicas[0].admit(crossing, header, payload_bytes, max_bytes)

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: End | None = None
    ) -> Computed:
        """On the replica that has the fewest; frames that refer to a client's last ones on that which keeps them."""
        with self._least(same=bool(crossing.books)) as engine:
            return engine.compute(crossing, header, payload, want_metrics, end)

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        """As any of them."""
        self._replicas[0].admit_file(suffix, preprocess_digest, header, payload_bytes, max_bytes)

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        """As any of them."""
        return self._replicas[0].read_file(suffix, header, payload, max_bytes)

    def compute_file(
        self,
        suffix: str,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        max_bytes: int,
        read: FileRead | None = None,
    ) -> Computed:
        """On the replica that has the fewest."""
        with self._least() as engine:
            return engine.compute_file(suffix, header, payload, want_metrics, max_bytes, read)

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As any of them."""
        self._replicas[0].admit_step(header, payload_bytes, max_bytes)

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        """On the replica that has the fewest requests now, in turn where none has any; it stays there."""
        with self._least() as engine:
            return engine.open_session(cut, following)

    @contextmanager
    def observing(self, observers: tuple[str, ...]) -> Iterator[Callable[[], bytes]]:
        """Observers of whichever replica computes in the block: the others find nothing."""
        with ExitStack() as stack:
            found = [stack.enter_context(one.observing(observers)) for one in self._replicas]
            yield lambda: max((each() for each in found), key=len)

    @property
    def profile_gives_way(self) -> bool:
        return self._replicas[0].profile_gives_way

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The profile of one replica; it counts as busy meanwhile."""
        with self._least() as engine:
            return engine.profile(warmup, repetitions, seconds, on_progress, codecs)


class Host(Protocol):
    """One call at a time."""

    @property
    def all_at_once(self) -> bool:
        """Whether models that are loaded by one call also go together: their memory is free when the last goes."""
        ...

    def load(self, entries: Sequence[ModelEntry]) -> list[Loaded]:
        """Loads these models, warms them up, and waits for that; all or none. Raises what one of them fails by."""
        ...


class ThisProcess:
    """A `Host`: models of this process, one for each of their devices."""

    all_at_once = False

    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def load(self, entries: Sequence[ModelEntry]) -> list[Loaded]:
        return [self._load(entry) for entry in entries]

    def _load(self, entry: ModelEntry) -> Loaded:
        config, limits = self._config, self._config.limits
        models = [
            ServedModel(entry, device, config.lifecycle, limits.rehearsals(), limits.files(), limits.max_frames_bytes)
            for device in placed(entry, config.device)
        ]
        nbytes: dict[str, int] = {}
        for one in models:
            nbytes[str(one.device)] = nbytes.get(str(one.device), 0) + one.nbytes

        def close(why: str) -> None:
            for one in models:
                one.close(why)

        def compiled() -> list[str]:
            tails = [one.compiled.standings() for one in models if one.compiled is not None]
            return [word for standings in tails for word, _ in standings.values()]

        def spot_checks() -> tuple[int, int]:
            found = [one.batching.batches for one in models]
            return sum(one.spot_checks for one in found), sum(bool(one.ended) for one in found)

        return Loaded(entry, one_of(models), close, nbytes, compiled, spot_checks)


class Processes:
    """A `Host`: a pool of worker processes for each device. Use as a context manager.

    Workers read the server's own ``words``. Models that are loaded later get workers of their own.
    """

    all_at_once = True

    def __init__(self, config: ServerConfig, words: Sequence[str]) -> None:
        self._config = config
        self._words = words
        self._memory = payload_memory(config.limits)
        self._lock = threading.Lock()
        self._pools: list[Pool] = []
        self._ended = 0
        self.on_warm: Callable[[bool], None] = lambda warm: None
        """Called with whether every pool has a warm worker, when that may have changed."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._known():
            pool.close()
        self._memory.close()

    def _known(self) -> list[Pool]:
        with self._lock:
            return list(self._pools)

    @property
    def deaths(self) -> int:
        """Workers that have ended unexpectedly."""
        return self._ended + sum(pool.crew.deaths for pool in self._known())

    @property
    def warm(self) -> bool:
        """Whether every model has a warm worker."""
        return all(pool.crew.warm for pool in self._known())

    def load(self, entries: Sequence[ModelEntry]) -> list[Loaded]:
        engines: dict[str, list[Engine]] = {entry.spec.model_id: [] for entry in entries}
        places: dict[tuple[str, int], list[str]] = {}
        for entry in entries:
            seen: dict[str, int] = {}
            for device in map(str, placed(entry, self._config.device)):
                places.setdefault((device, seen.get(device, 0)), []).append(entry.spec.model_id)
                seen[device] = seen.get(device, 0) + 1
        made: list[Pool] = []
        try:
            for (device, _), names in places.items():
                share = Share(device, tuple(names))
                made.append(
                    Pool(self._words, self._config.workers, self._config.limits, share=share, memory=self._memory)
                )
            self._start(made, engines)
        except BaseException:
            for pool in made:
                pool.close()
            raise
        with self._lock:
            self._pools += made
        for pool in made:
            pool.crew.on_warm = self._tell
        rest = {entry.spec.model_id for entry in entries}

        def close_of(name: str) -> Callable[[str], None]:
            def close(why: str) -> None:
                rest.discard(name)
                if not rest:
                    self._close(made)

            return close

        found = []
        for entry in entries:
            name = entry.spec.model_id
            found.append(Loaded(entry, one_of(engines[name]), close_of(name)))
        return found

    def _start(self, pools: Sequence[Pool], engines: dict[str, list[Engine]]) -> None:
        """All at a time: each takes seconds to load torch."""
        failures: list[BaseException] = []

        def start(pool: Pool) -> None:
            try:
                pool.start()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=start, args=(pool,)) for pool in pools]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        for pool in pools:
            for identity in pool.crew.identities:
                if identity.model_id not in engines:
                    raise ModelFailed(f'a worker has "{identity.model_id}" loaded, which it was not asked for')
                engines[identity.model_id].append(PooledModel(pool, identity, self._config.lifecycle))

    def _close(self, pools: Sequence[Pool]) -> None:
        with self._lock:
            self._pools = [pool for pool in self._pools if pool not in pools]
            self._ended += sum(pool.crew.deaths for pool in pools)
        for pool in pools:
            pool.close()
        self._tell(True)

    def _tell(self, _: bool) -> None:
        self.on_warm(self.warm)


def one_of(engines: Sequence[Engine]) -> Engine:
    """The engine of a model that is on so many devices."""
    return engines[0] if len(engines) == 1 else Replicated(engines)
