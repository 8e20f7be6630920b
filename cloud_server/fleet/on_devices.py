"""One model on several devices: `Replicated`, a copy on each; `Parted`, a part of it on each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from cloud_server.models import (
    Computed,
    Engine,
    EngineSession,
    FileRead,
    Following,
    PartEnd,
    Progress,
    join_reply,
)
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing, Parcel
from shared_hooks.crossing import decode
from shared_hooks.errors import BadFrame, CutRefused, Disagreement, SessionLost, StepOutOfOrder
from shared_hooks.generation import StepReply
from shared_hooks.modules import INPUT
from shared_hooks.modules.manifest import Manifest
from shared_hooks.tail import payer


class _Several:
    """What any of the ``engines`` of one model on several devices can answer. Raises Disagreement if the
    models differ.
    """

    step_batching = None
    """None: steps are computed alone, because each session stays on its device."""
    batching = None
    """None: requests are computed alone."""
    residence = None

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.identity = replace(engines[0].identity, part=())
        for one in engines[1:]:
            if not one.identity.is_like(self.identity):
                text = "is not the same on each device: weights, plan or settings differ"
                raise Disagreement(f'model "{self.identity.model_id}" {text}')
        self._engines = tuple(engines)

    def manifest(self) -> Manifest:
        """As `Engine.manifest`."""
        return self._engines[0].manifest()

    def allocate(self, nbytes: int) -> memoryview:
        """Memory that all engines can read."""
        return self._engines[0].allocate(nbytes)

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        """As `Engine.admit_file`."""
        self._engines[0].admit_file(suffix, preprocess_digest, header, payload_bytes, max_bytes)

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        """As `Engine.read_file`."""
        return self._engines[0].read_file(suffix, header, payload, max_bytes)

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As `Engine.admit_step`."""
        self._engines[0].admit_step(header, payload_bytes, max_bytes)

    @property
    def profile_yields(self) -> bool:
        return self._engines[0].profile_yields


class Replicated(_Several):
    """Copies of a model: a request goes to the one with the fewest requests, a decoding session stays on one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._lock = threading.Lock()
        self._busy = [0] * len(engines)
        self._last = -1

    @property
    def busy(self) -> tuple[int, ...]:
        """The number of requests that each replica computes."""
        return tuple(self._busy)

    @contextmanager
    def _least(self, same: bool = False) -> Iterator[Engine]:
        """The replica with the fewest requests, for the block; among equals in turn. ``same``: always the same for each
        client.
        """
        count = len(self._engines)
        with self._lock:
            number = min(range(count), key=lambda one: (self._busy[one], (one - self._last - 1) % count))
            number = hash(payer.get()) % count if same else number
            self._busy[number] += 1
            self._last = number
        try:
            yield self._engines[number]
        finally:
            with self._lock:
                self._busy[number] -= 1

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As any replica's."""
        self._engines[0].admit(crossing, header, payload_bytes, max_bytes)

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        """Compute on the replica with the fewest requests; frames that refer to a client's last ones, on the one that
        keeps them.
        """
        with self._least(same=bool(crossing.books)) as engine:
            return engine.compute(crossing, header, payload, want_metrics, end)

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
        """Compute on the replica with the fewest requests."""
        with self._least() as engine:
            return engine.compute_file(suffix, header, payload, want_metrics, max_bytes, read, end)

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        """Open a session on the replica with the fewest requests, where it stays."""
        with self._least() as engine:
            return engine.open_session(cut, following)

    @contextmanager
    def observing(self, observers: tuple[str, ...]) -> Iterator[Callable[[], bytes]]:
        """Observe whichever replica computes in the block."""
        with ExitStack() as stack:
            found = [stack.enter_context(one.observing(observers)) for one in self._engines]
            yield lambda: max((each() for each in found), key=len)

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the profile of one replica, which counts as busy meanwhile."""
        with self._least() as engine:
            return engine.profile(warmup, repetitions, seconds, on_progress, codecs)


# Parts: each device computes up to its cut, the next one continues.


@dataclass
class _Report:
    """A further part's report on a step."""

    server: str
    cut: str
    reply: split_pb2.ReplyHeader
    session_bytes: int
    began_ns: int
    sent_bytes: int


_reports: ContextVar[list[_Report]] = ContextVar("isthmus_reports_of_parts")
"""The further parts' reports on the step that this thread makes."""


class Parted(_Several):
    """An `Engine` of ``parts``: engines of one model, each with the weights from one cut to the next (`Identity.part`),
    in order. A request passes through the parts, so several can be in progress, one on each device.

    Raises Disagreement if the models differ, or a part does not begin where the previous one ends.
    """

    def __init__(self, parts: Sequence[Engine]) -> None:
        super().__init__(parts)
        for before, after in itertools.pairwise(parts):
            if before.identity.part[-1] != after.identity.part[0]:
                ends, begins = before.identity.part[-1], after.identity.part[0]
                raise Disagreement(
                    f'model "{self.identity.model_id}": a part ends at {ends}, the next begins at {begins}'
                )
        self._cuts = [INPUT, *(one.identity.part[0] for one in parts[1:])]
        self._begins = {name: at for at, one in enumerate(parts) for name in one.identity.part}
        self._ends = {name: at for at, one in reversed([*enumerate(parts)]) for name in one.identity.part}
        self._observing = threading.local()

    @property
    def cuts(self) -> tuple[str, ...]:
        """The cuts between the parts."""
        return tuple(self._cuts[1:])

    def _way(self, begin: str, last: str | None) -> range:
        """Return the numbers of the parts from the cut ``begin`` to ``last`` (None: the model's end). Raises
        CutRefused.
        """
        found = self._begins.get(begin), len(self._engines) - 1 if last is None else self._ends.get(last)
        for name, at in zip((begin, last), found, strict=True):
            if at is None:
                raise CutRefused(
                    f"the model is in {len(self._engines)} parts, cut after {', '.join(self.cuts)}, and its example "
                    f'has no cut "{name!s:.256}"'
                )
        first, end = found
        assert first is not None and end is not None
        return range(first, max(first, end) + 1)

    def _end(self, at: int, way: range, end: PartEnd | None) -> PartEnd | None:
        return PartEnd(self._cuts[at + 1]) if at + 1 < way.stop else end

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As the first part of the request."""
        self._engines[self._way(_begin(crossing), None).start].admit(crossing, header, payload_bytes, max_bytes)

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        """Compute part after part."""
        way = self._way(_begin(crossing), None if end is None else end.cut)
        engine, first = self._engines[way.start], self._end(way.start, way, end)
        self._observing.first = way.start
        return self._rest(way, engine.compute(crossing, header, payload, want_metrics, first), want_metrics, end)

    def _rest(self, way: range, computed: Computed, want_metrics: bool, end: PartEnd | None) -> Computed:
        """Continue the first part's result through the others."""
        reply = computed.reply
        for at in way[1:]:
            began, engine = time.perf_counter_ns(), self._engines[at]
            assert computed.cut is not None
            payload, crossing = _moved(engine, computed), decode(computed.cut[1])
            nbytes, header = computed.nbytes, computed.reply.header
            computed = engine.compute(crossing, header, payload, want_metrics, self._end(at, way, end))
            took = time.perf_counter_ns() - began
            computed.reply.observations = computed.reply.observations or self._observed(at)
            join_reply(reply, computed.reply, self._name(at), self._cuts[at], bytes_up=nbytes, took_ns=took)
        return replace(computed, reply=reply)

    def _name(self, at: int) -> str:
        return f"part {at + 1}"

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
        """Read the file in the first part, and compute part after part."""
        way = self._way(INPUT, None if end is None else end.cut)
        first, self._observing.first = self._end(0, way, end), 0
        computed = self._engines[0].compute_file(suffix, header, payload, want_metrics, max_bytes, read, first)
        return self._rest(way, computed, want_metrics, end)

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        """Open a session in each part from ``cut`` on. Raises as `Engine.open_session`."""
        way, onward = self._way(cut, None if following is None else following.cut), following is not None
        for at in reversed(way[1:]):
            link = _Between(self._engines[at], self._name(at), self._cuts[at], following)
            following = Following(self._cuts[at], link)
        session = self._engines[way.start].open_session(cut, following)
        return session if len(way) == 1 else _PartedSession(session, onward)

    @contextmanager
    def observing(self, observers: tuple[str, ...]) -> Iterator[Callable[[], bytes]]:
        """Observe the first part of a request; the others' findings are in their own reports."""
        with ExitStack() as stack:
            self._observing.found = [stack.enter_context(one.observing(observers)) for one in self._engines]
            stack.callback(self._observing.__dict__.clear)
            yield lambda: self._observed(self._observing.first)

    def _observed(self, at: int) -> bytes:
        found = getattr(self._observing, "found", None)
        return b"" if found is None else found[at]()

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the profile of the whole model on the first device, which reads the other weights from their files."""
        return self._engines[0].profile(warmup, repetitions, seconds, on_progress, codecs)


def _begin(crossing: Crossing) -> str:
    return crossing.name if crossing.layer_id >= 0 else INPUT


def _moved(engine: Engine, computed: Computed | Parcel) -> memoryview:
    """Return a payload in the memory of the next part."""
    memory, done = engine.allocate(computed.nbytes), 0
    for buffer in computed.buffers:
        if buffer.nbytes:
            memory[done : done + buffer.nbytes] = buffer.cast("B")
            done += buffer.nbytes
    return memory


class _PartedSession:
    """An `EngineSession` whose later parts have sessions of their own, behind a `_Between`."""

    def __init__(self, session: EngineSession, onward: bool) -> None:
        """``onward``: the caller asks the server that follows (`Computed.rest`)."""
        self._session = session
        self._onward = onward

    @property
    def lost(self) -> str:
        """Why the first part's session is gone; lost sessions of the others are rebuilt by it."""
        return self._session.lost

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """As `EngineSession.step`, through all parts."""
        computed = self._session.step(header, payload)
        if self._onward or computed.rest is None:
            return computed
        reports: list[_Report] = []
        token = _reports.set(reports)
        try:
            rest = computed.rest()
        finally:
            _reports.reset(token)
        reply, now, held = computed.reply, time.perf_counter_ns(), rest.session_bytes
        for one in reports:
            join_reply(reply, one.reply, one.server, one.cut, bytes_up=one.sent_bytes, took_ns=now - one.began_ns)
            held += one.session_bytes
        reply.durations.onward_ns = now - reports[0].began_ns if reports else 0  # each waits for the devices after it
        reply.header, reply.payload_bytes = rest.reply.header, rest.nbytes
        return replace(rest, reply=reply, session_bytes=held)

    def fork(self) -> EngineSession:
        """As `EngineSession.fork`."""
        return _PartedSession(self._session.fork(), self._onward)

    def close(self) -> None:
        """Close the first part's session, and so the others'."""
        self._session.close()


class _Between:
    """The sessions of the next part: a `shared_hooks.generation.Link`."""

    def __init__(self, engine: Engine, name: str, cut: str, following: Following | None) -> None:
        self._engine = engine
        self._name = name
        self._cut = cut
        self._following = following
        self._sessions: dict[int, tuple[EngineSession, int]] = {}
        """(session, number of its steps) by number."""

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None = None,
    ) -> StepReply:
        """As `Link.step`. Raises SessionLost and StepOutOfOrder, after which the previous part repeats all steps."""
        parcel, began = Parcel.of_tensors(header, tensors), time.perf_counter_ns()
        if number == 0 and session not in self._sessions:
            self._sessions[session] = self._opened(fork), 0
        known, steps = self._sessions.get(session, (None, 0))
        if known is None:
            raise SessionLost(f"{self._name} has no such session")
        if steps != number:
            raise StepOutOfOrder(f"{self._name}: step {number} came, and its next is {steps}")
        try:
            computed = known.step(parcel.header, _moved(self._engine, parcel))
            report = _Report(self._name, self._cut, computed.reply, computed.session_bytes, began, parcel.nbytes)
            _reports.get([]).append(report)
            if computed.rest is not None:
                computed = computed.rest()
                report.session_bytes = computed.session_bytes
        except SessionLost:
            self.close(session)
            raise
        if computed.is_done:
            self._sessions[session] = known, steps + 1
        data = bytearray().join(computed.buffers)
        found, answered = Parcel.tensors(computed.reply.header, data, len(data))
        if not isinstance(found, dict):
            raise BadFrame(f"{self._name} answered a step with {type(found).__name__}")
        return StepReply(found, answered, len(parcel.header) + parcel.nbytes, len(data))

    def _opened(self, fork: tuple[int, int] | None) -> EngineSession:
        if fork is None:
            return self._engine.open_session(self._cut, self._following)
        parent, steps = self._sessions.get(fork[0], (None, 0))
        if parent is None:
            raise SessionLost(f"{self._name} has no session to copy")
        if steps != fork[1]:
            raise StepOutOfOrder(f"{self._name}: a copy after {fork[1]} steps: it has done {steps}")
        return parent.fork()

    def close(self, session: int) -> None:
        """As `Link.close`."""
        known, _ = self._sessions.pop(session, (None, 0))
        if known is not None:
            known.close()


def on_devices(engines: Sequence[Engine], parted: bool) -> Engine:
    """Return one engine for a model that several devices have: copies of it, or its parts in order."""
    if len(engines) == 1:
        return engines[0]
    return Parted(engines) if parted else Replicated(engines)
