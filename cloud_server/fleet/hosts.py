"""Where models are loaded: in this process, or in worker processes, on one device each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from cloud_server.config import ModelEntry, ServerConfig
from cloud_server.fleet.on_devices import on_devices
from cloud_server.fleet.room import placed
from cloud_server.fleet.version import Loaded
from cloud_server.models import Engine, ServedModel
from cloud_server.processes import Part, Pool, PooledModel, Share, payload_memory
from shared_hooks.errors import ModelFailed


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
        there, bounds = placed(entry, config.device), (limits.rehearsals(), limits.files(), limits.max_frames_bytes)
        models = [ServedModel(one.entry, one.device, config.lifecycle, *bounds) for one in there]
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

        return Loaded(entry, on_devices(models, bool(there[0].part)), close, nbytes, compiled, spot_checks)


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
        places: dict[tuple[str, int], dict[str, Part | None]] = {}
        parted: set[str] = set()
        for entry in entries:
            name, seen = entry.spec.model_id, Counter[str]()
            for one in placed(entry, self._config.device, divided=self._config.tensor_parallel > 1):
                device = str(one.device)
                places.setdefault((device, seen[device]), {})[name] = one.part
                parted |= {name} if one.part else set()
                seen[device] += 1
        made: list[Pool] = []
        try:
            for (device, _), names in places.items():
                share = Share(device, tuple(names), tuple(names.values()))
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
            found.append(Loaded(entry, on_devices(engines[name], name in parted), close_of(name)))
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
