"""Where models are loaded: in this process, or in worker processes with one device each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from cloud_server.config import AUTO, ModelEntry, ServerConfig
from cloud_server.fleet.on_devices import on_devices
from cloud_server.fleet.version import ModelInMemory
from cloud_server.models import Engine, ServedModel
from cloud_server.processes import Part, Pool, PooledModel, WorkerShare, payload_memory
from shared_hooks import devices
from shared_hooks.errors import ModelFailed, SpecError
from shared_hooks.models import pick_device
from shared_hooks.profiling.machine import kind
from shared_hooks.sharing import Holding, Owner, Shares, evictions

# Which models give up their weights when others are wanted and memory is full.
#
# First those not used for a minute. Then max-min fairness decides, as elsewhere (`shared_hooks.sharing`): a model
# counts for the one of its recent users who holds the least, and the user who holds the most is evicted first, so a
# user that keeps requesting other models pushes out its own. A user who has less and wants more waits for its turn. A
# model that was just loaded stays for a multiple of its loading time.


# Which model runs on which devices: on each of the server's, or on those that its entry names.


def devices_of(text: str) -> list[torch.device]:
    """Return the devices that ``text`` lists, such as "cuda:0,cuda:1"; one listed twice gets two copies of each model.

    Raises SpecError.
    """
    return [pick_device(name.strip()) for name in text.split(",")]


class PlacedModel(NamedTuple):
    """A model on a device: whole, or one ``part``: (its number from 0, how many there are)."""

    entry: ModelEntry
    device: torch.device
    part: tuple[int, int] | None = None


FULL = 0.8
"""With "auto", a model whose weights exceed this share of a device's free memory is divided into parts."""


def placed(entry: ModelEntry, server: str, *, divided: bool = False) -> list[PlacedModel]:
    """Return where to place a model on a server whose devices are ``server``.

    ``divided``: its weights are divided among processes in any case. Raises SpecError, also for devices that differ:
    the answer would depend on where a request runs.
    """
    text, parts = entry.device or server, bool(entry.parts)
    found = devices_of(text)
    if text == AUTO and (there := devices.count(found[0].type)) > 1:
        parts = parts or (not divided and _is_too_large(entry, found[0]))
        if parts:
            found = [torch.device(found[0].type, number) for number in range(there)]
            found = found[: len(entry.parts) + 1] if entry.parts not in ((), (AUTO,)) else found
    kinds = sorted({kind(device)["kind"] for device in found})
    if len(kinds) > 1:
        raise SpecError(
            f"{entry.spec.origin}: {entry.spec.model_id}: device: one model on {' and '.join(kinds)} would answer with "
            "other last bits from request to request; name devices of one kind"
        )
    if not parts:
        return [PlacedModel(entry, device) for device in found]
    wanted = max(2, len(found)) if entry.parts in ((), (AUTO,)) else len(entry.parts) + 1
    if len(found) != wanted:
        raise SpecError(
            f"{entry.spec.origin}: {entry.spec.model_id}: parts: {', '.join(entry.parts)} makes {wanted} parts"
            f"{' at least' * (AUTO in entry.parts)}, one for each device; device has {len(found)}: {text}"
        )
    count = len(found)
    return [PlacedModel(entry.piece(number, count), one, (number, count)) for number, one in enumerate(found)]


def _is_too_large(entry: ModelEntry, device: torch.device) -> bool:
    """Return whether a device has no room for the weights, and the spec has what is needed to load parts of them."""
    free = devices.free(device)
    if free is None or entry.only or entry.tails or entry.compile or entry.spec.example() is None:
        return False
    return entry.spec.weights_bytes() > FULL * free


T = TypeVar("T")

RECENT_SECONDS = 60.0
"""How long a use of a model counts."""
STAYS = 4.0
"""A loaded model stays for this multiple of its loading time ..."""
STAYS_SECONDS = 1.0
"""... and for at least this long."""
TURNS = 10.0
"""An account's turn lasts at least this multiple of the loading time."""


@dataclass(frozen=True)
class Resident(Generic[T]):
    """A model in memory. ``users``: when each account last used it; ``load_seconds``: how long loading took."""

    thing: T
    nbytes: Mapping[str, int]
    users: Mapping[str, float]
    arrived: float
    load_seconds: float

    def stays(self, now: float) -> bool:
        """Return whether it may not be evicted yet."""
        return now - self.arrived < max(STAYS_SECONDS, STAYS * self.load_seconds)

    @property
    def used(self) -> float:
        """When it was last used, or loaded."""
        return max(self.users.values(), default=self.arrived)

    def recent(self, now: float) -> list[str]:
        """Return the accounts that use it."""
        return [account for account, at in self.users.items() if now - at < RECENT_SECONDS]


def room_for(
    account: str, needed: Mapping[str, int], residents: Sequence[Resident[T]], limit: float, turn: float, now: float
) -> list[T] | None:
    """Return the models to evict so that ``account`` can have a model of so many bytes on each device, at most
    ``limit`` on one.

    None if that is impossible now. ``turn``: seconds.
    """
    gone: list[Resident[T]] = []
    for device, nbytes in needed.items():
        while True:
            here = [one for one in residents if one not in gone and one.nbytes.get(device)]
            short = sum(one.nbytes[device] for one in here) + nbytes - limit
            if short <= 0:
                break
            found = _next(account, device, nbytes, here, limit, turn, now)
            if not found:
                return None
            gone += found
    return [one.thing for one in gone]


def _next(
    account: str, device: str, nbytes: int, here: Sequence[Resident[T]], limit: float, turn: float, now: float
) -> list[Resident[T]]:
    """Return the models to evict next on a device; empty if none may be."""
    free = sorted((one for one in here if not one.stays(now)), key=lambda one: one.used)
    unused = [one for one in free if not one.recent(now)]
    if unused:
        return unused[:1]
    holders, shares = _holders(here, device, now), Shares(limit)
    for one in here:
        shares.add(holders[id(one)], one.nbytes[device])
    for own in (False, True):  # evicts its own models only where no other user holds more
        holdings = [
            Holding(one, holders[id(one)], one.nbytes[device], (one.used,), own and holders[id(one)].account == account)
            for one in free
        ]
        found = evictions(shares, Owner(account), nbytes, holdings)
        if found:
            return found
    mine = shares.account(account)
    over = [
        one
        for one in free
        if now - one.arrived >= max(turn, TURNS * one.load_seconds) and mine < shares.account(holders[id(one)].account)
    ]
    return sorted(over, key=lambda one: one.arrived)[:1]


def _holders(here: Sequence[Resident[T]], device: str, now: float) -> dict[int, Owner]:
    """Return the account that each model counts for: of its recent users the one with the least, so that sharing costs
    nothing.
    """
    holds: Counter[str] = Counter()
    found = {}
    for one in sorted(here, key=lambda one: len(one.recent(now))):
        account = min(sorted(one.recent(now)), key=holds.__getitem__, default="")
        holds[account] += one.nbytes[device]
        found[id(one)] = Owner(account)
    return found


class Host(Protocol):
    """Loads models. One call at a time."""

    @property
    def all_at_once(self) -> bool:
        """Whether models loaded by one call can only be freed together."""
        ...

    def load(self, entries: Sequence[ModelEntry]) -> list[ModelInMemory]:
        """Load these models and wait until they are warm; all or none. Raises the error of one that fails."""
        ...


class ThisProcess:
    """A `Host` that loads models in this process, one for each of their devices."""

    all_at_once = False

    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def load(self, entries: Sequence[ModelEntry]) -> list[ModelInMemory]:
        return [self._load(entry) for entry in entries]

    def _load(self, entry: ModelEntry) -> ModelInMemory:
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

        return ModelInMemory(entry, on_devices(models, bool(there[0].part)), close, nbytes, compiled, spot_checks)


class Processes:
    """A `Host` with a pool of worker processes for each device. Use it as a context manager.

    Workers parse the server's own ``words``. Models loaded later get workers of their own.
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
        """The number of workers that ended unexpectedly."""
        return self._ended + sum(pool.crew.deaths for pool in self._known())

    @property
    def warm(self) -> bool:
        """Whether every model has a warm worker."""
        return all(pool.crew.warm for pool in self._known())

    def load(self, entries: Sequence[ModelEntry]) -> list[ModelInMemory]:
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
                share = WorkerShare(device, tuple(names), tuple(names.values()))
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
            pool.crew.on_warm = self._report_warm
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
            found.append(ModelInMemory(entry, on_devices(engines[name], name in parted), close_of(name)))
        return found

    def _start(self, pools: Sequence[Pool], engines: dict[str, list[Engine]]) -> None:
        """Start pools concurrently, because each takes seconds to load torch."""
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
        self._report_warm(True)

    def _report_warm(self, _: bool) -> None:
        self.on_warm(self.warm)
