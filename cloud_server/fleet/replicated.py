"""One model on several devices: an `Engine` that hands each request to the replica that has the fewest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cloud_server.models import Computed, Engine, EngineSession, FileRead, Progress
from shared_hooks import Crossing
from shared_hooks.errors import Disagreement
from shared_hooks.modules.manifest import Manifest
from shared_hooks.tail import payer


class Replicated:
    """``replicas``: engines of one model with the same weights. Raises Disagreement where they are not the same."""

    company = None
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

    def compute(self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool) -> Computed:
        """On the replica that has the fewest; frames that refer to a client's last ones on that which keeps them."""
        with self._least(same=bool(crossing.books)) as engine:
            return engine.compute(crossing, header, payload, want_metrics)

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

    def open_session(self, cut: str) -> EngineSession:
        """On the replica that has the fewest requests now, in turn where none has any; it stays there."""
        with self._least() as engine:
            return engine.open_session(cut)

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
