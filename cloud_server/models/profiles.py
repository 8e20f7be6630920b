"""Profiles on request: the tail of every cut, measured by a worker, one at a time, and cached.

A measurement takes a worker's turn, and is charged to the caller. Between repetitions it lets requests of accounts with
less service run (not in a worker process, where other workers continue). After a profile the next one waits for as long
as it took, so that requests get at least half of the time.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from cloud_server.access import Caller, Quotas, granted
from cloud_server.limits import Limits
from cloud_server.models.engine import Engine, Leave, version_of
from cloud_server.scheduling import Payer, Task, Workers
from protos.isthmus.v1 import split_pb2
from shared_hooks.codecs import by_wire
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    IsthmusError,
    ModelFailed,
    ServerUnavailable,
    SpecError,
    UnknownModel,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.2
KEPT = 64
CLIENT = "profile"
"""The client name under which an account's profiles are scheduled."""
BURST_SECONDS = 60.0
"""The seconds of a minute's profile quota that may be used at once."""
DEFAULT_WARMUP, DEFAULT_REPETITIONS = 3, 20
"""The settings that a 0 in a request stands for."""


@dataclass(frozen=True)
class _Wanted:
    """The model and settings of a profile. Equal ones are measured once."""

    model_id: str
    weights_hash: str
    warmup: int
    repetitions: int
    seconds: float
    codecs: tuple[str, ...] = ()


class Profiles:
    """Profiles by model and settings."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        limits: Limits,
        workers: Workers,
        quotas: Quotas,
        onward: Callable[[split_pb2.ProfileRequest], Iterator[split_pb2.ProfileReply]],
    ) -> None:
        """``onward``: requests a profile from the next servers of chains."""
        self._onward = onward
        self._engines = engines
        self._limits = limits
        self._workers = workers
        self._quotas = quotas
        self._one = threading.Lock()  # held by the measuring thread
        self._lock = threading.Lock()  # held while places or kept profiles are read
        self._waiting: Counter[str] = Counter()
        self._kept: OrderedDict[_Wanted, bytes] = OrderedDict()
        # set while no worker measures: a worker whose client has left may still be measuring
        self._over = threading.Event()
        self._over.set()
        self._rests_until = 0.0

    def stream(
        self, request: split_pb2.ProfileRequest, caller: Caller, wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[split_pb2.ProfileReply]:
        """Progress, then the profile, for ``caller``. Ends if ``wanted()`` is False, or with what that raises.

        Raises AccessRefused, UnknownModel, SpecError for settings beyond the limits, CutRefused for a model without an
        example, ModelFailed for what the model raises, ServerUnavailable if too many wait already, and QuotaExceeded.
        """
        engine, settings = self._check(request, caller)
        if request.next:
            with self._place(caller):
                yield from takewhile(lambda _: wanted(), self._onward(request))
            return
        data = None if request.fresh else self._known(settings)
        if data is None:
            with self._place(caller):
                while not self._one.acquire(timeout=WAIT_SECONDS):
                    if not wanted():
                        return
                    yield _progress(0, 0, "waiting for another profile")
                try:
                    data = None if request.fresh else self._known(settings)  # a profile that was waited for may serve
                    if data is None:
                        data = yield from self._measure(engine, settings, caller, wanted)
                        self._keep(settings, data)
                finally:
                    self._one.release()
        yield split_pb2.ProfileReply(profile=data)

    def _known(self, settings: _Wanted) -> bytes | None:
        with self._lock:
            return self._kept.get(settings)

    def _keep(self, settings: _Wanted, data: bytes) -> None:
        with self._lock:
            self._kept[settings] = data
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[None]:
        """Count the caller among those that wait for a profile. Raises ServerUnavailable if there are too many,
        QuotaExceeded.
        """
        limits, account = self._limits, caller.account
        with self._lock:
            if self._waiting[account] >= limits.max_profiles_per_account:
                most = limits.max_profiles_per_account
                raise ServerUnavailable(
                    f"{account} waits for {most} profiles, the limit of one account (max_profiles_per_account)"
                )
            if sum(self._waiting.values()) >= limits.max_profiles:
                raise ServerUnavailable(
                    f"{limits.max_profiles} profiles are being waited for, which is the limit (max_profiles)"
                )
            self._quotas.take(caller, [("measured profiles", limits.profiles_per_minute, 1)], BURST_SECONDS)
            self._waiting[account] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[account] -= 1
                self._waiting += Counter()  # drops those at 0

    def _check(self, request: split_pb2.ProfileRequest, caller: Caller) -> tuple[Engine, _Wanted]:
        if not caller.policy.profile:
            raise AccessRefused(
                f'identity "{caller.identity}" may not ask for profiles here; '
                "plan, and --split auto, take one from a file, too (--cloud-profile)"
            )
        known = dict(self._engines.items())
        served = granted(caller.policy.models, known)
        engine = version_of({name: known[name] for name in served}, request.model_id, request.weights_hash)
        if engine is None:
            there = ", ".join(served)
            raise UnknownModel(f"no model {request.model_id[:256]!r} is served here; there is: {there}")
        limits = self._limits
        if not 0 <= request.seconds <= limits.max_profile_seconds:  # rejects NaN, too
            most = limits.max_profile_seconds
            raise SpecError(f"seconds: expected 0 to {most:g}, which is this server's limit, found {request.seconds:g}")
        for name in ("warmup", "repetitions"):
            if getattr(request, name) > limits.max_profile_repetitions:
                raise SpecError(
                    f"{name}: expected at most {limits.max_profile_repetitions}, which is this server's limit, "
                    f"found {getattr(request, name)}"
                )
        return engine, _Wanted(
            engine.identity.model_id,
            engine.identity.weights_hash,
            request.warmup or DEFAULT_WARMUP,
            request.repetitions or min(DEFAULT_REPETITIONS, limits.max_profile_repetitions),
            request.seconds or min(20.0, limits.max_profile_seconds),
            tuple(
                name for name in map(str, request.codecs) if by_wire(name) is not None
            ),  # a newer client may know other fields
        )

    def _measure(
        self, engine: Engine, settings: _Wanted, caller: Caller, wanted: Callable[[], bool]
    ) -> Generator[split_pb2.ProfileReply, None, bytes]:
        """Yields progress while a worker measures; returns the profile's bytes."""
        news: queue.SimpleQueue[split_pb2.ProfileReply | bytes | IsthmusError] = queue.SimpleQueue()
        left, held = threading.Event(), queue.SimpleQueue[Leave]()
        while not self._over.wait(WAIT_SECONDS):
            if not wanted():
                raise Cancelled("this profile is no longer waited for")
            yield _progress(0, 0, "waiting for another profile")
        while time.monotonic() < self._rests_until:
            if not wanted():
                raise Cancelled("this profile is no longer waited for")
            yield _progress(0, 0, "waiting: requests have their turn after a profile")
            time.sleep(max(0.0, min(WAIT_SECONDS, self._rests_until - time.monotonic())))

        payer = Payer(caller.account, CLIENT, caller.policy.weight)
        reported: tuple[int, int, str] | None = None

        def on_progress(done: int, total: int, what: str) -> None:
            nonlocal reported
            if engine.profile_yields:
                self._workers.yield_to_others(payer)
            if left.is_set():
                raise Cancelled("this profile is no longer waited for")
            if (done, total, what) != reported:
                reported = done, total, what
                news.put(_progress(done, total, what))

        def measure() -> bool:
            began = time.monotonic()
            try:
                on_progress(0, 0, "starting")
                made = engine.profile(
                    settings.warmup, settings.repetitions, settings.seconds, on_progress, settings.codecs
                )
                news.put(json.dumps(made, allow_nan=False).encode())
            except IsthmusError as error:
                news.put(error)
            except BaseException as error:  # a worker survives any failure
                who = {"account": "profiles"}  # at most one at a time, of any client
                log.warning("profile of %s", settings.model_id, exc_info=error, extra=who)
                news.put(ModelFailed(f"{type(error).__name__}: {error}"))
            finally:
                self._rests_until = 2 * time.monotonic() - began
                self._over.set()
                held.get()()  # lets the weights be evicted
            return False

        put, residence = partial(self._workers.scheduler.add, Task(measure, payer)), engine.residence
        self._over.clear()
        try:
            held.put(put() if residence is None else residence.enter(caller.account, put))
        except BaseException:
            self._over.set()
            raise
        try:
            while True:
                try:
                    item = news.get(timeout=WAIT_SECONDS)
                except queue.Empty:
                    if not wanted():
                        raise Cancelled("this profile is no longer waited for") from None
                    continue
                if isinstance(item, IsthmusError):
                    raise item
                if isinstance(item, bytes):
                    return item
                yield item
        finally:
            left.set()


def _progress(done: int, total: int, what: str) -> split_pb2.ProfileReply:
    return split_pb2.ProfileReply(progress=split_pb2.ProfileProgress(done=done, total=total, what=what))
