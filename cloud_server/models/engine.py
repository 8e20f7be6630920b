"""What the core needs of a model: its identity, what it accepts, and its tail. `ServedModel` is the engine of this
process; `cloud_server.processes` delegates to others.

After every request the model is unchanged: it is checked, and restored before another request is served
(`WeightsGuard`). A recipe lets no request write to the model's memory before the cut, and a rehearsal refuses models
that do so after it. The guard checks independently of both, in some microseconds: version counters and addresses of
parameters and buffers.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import xxhash
from torch import nn

from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing, ForwardMetrics, Parcel
from shared_hooks.errors import ServerUnavailable
from shared_hooks.generation import StepLink
from shared_hooks.generation.together import Ended, Outcome
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.metrics import (
    CACHED_LAYERS,
    FORWARD_READINGS,
    LAYER_READINGS,
    NOT_SAMPLED,
    LayerColumns,
    LayerTable,
    Reading,
)
from shared_hooks.modules import weights_hash
from shared_hooks.modules.manifest import Manifest
from shared_hooks.state import PythonState
from shared_hooks.state.agreed import TensorSamples
from shared_hooks.tensors import held
from shared_hooks.tensors.staging import room

# What was measured of a tail -> the fields of its reply; each distinct reading and each text is sent once.


STATUS = {
    "measured": split_pb2.Reading.MEASURED,
    "estimated": split_pb2.Reading.ESTIMATED,
    "unavailable": split_pb2.Reading.UNAVAILABLE,
}
MAX_NOTE = 500
"""Most characters of a note; a driver's error may be longer."""


class NumberedReadings:
    """Readings by number, from 1, as in a reply; 0 is `NOT_SAMPLED`."""

    def __init__(self, reply: split_pb2.ReplyHeader) -> None:
        self._reply = reply
        self._notes: dict[str, int] = {"": 0}
        self._numbers = {(NOT_SAMPLED.value, NOT_SAMPLED.status, NOT_SAMPLED.note): 0}

    def number(self, reading: Reading) -> int:
        values = reading.value, reading.status, reading.note
        known = self._numbers.get(values)
        if known is None:
            note = self._notes.get(reading.note)
            if note is None:
                text = reading.note.encode("utf-8", "replace").decode("utf-8")  # protobuf rejects lone surrogates
                self._reply.notes.append(text if len(text) <= MAX_NOTE else text[: MAX_NOTE - 4] + " ...")
                note = self._notes[reading.note] = len(self._notes)
            self._reply.readings.append(
                split_pb2.Reading(value=reading.value, status=STATUS[reading.status], note=note)
            )
            known = self._numbers[values] = len(self._numbers)
        return known


def put(reply: split_pb2.ReplyHeader, layers: LayerColumns, forward: ForwardMetrics | None) -> None:
    """Write a tail's metrics into its reply."""
    number = NumberedReadings(reply).number
    if count := len(layers):
        columns = reply.layers
        few = count <= CACHED_LAYERS  # long tables are not kept: inputs may decide how many layers run
        columns.table, columns.described = (_described if few else _described.__wrapped__)(layers.table)
        columns.inference_ns.extend(layers.inference_ns)
        columns.cpu_ns.extend(layers.cpu_ns or ())
        rows = {id(row): row for row in layers.readings}
        numbers = {key: [number(reading) for reading in row] for key, row in rows.items()}
        found = zip(*[numbers[id(row)] for row in layers.readings], strict=True)
        for name, column in zip(LAYER_READINGS, found, strict=True):
            same = column.count(column[0]) == len(column)
            getattr(columns, name).extend((column[:1] if column[0] else ()) if same else column)
    if forward is not None:
        reply.forward.CopyFrom(
            split_pb2.ForwardMetric(
                total_ns=forward.total_ns,
                layers_ns=forward.layers_ns,
                cpu_ns=forward.cpu_ns,
                **{name: number(getattr(forward, name)) for name in FORWARD_READINGS},
            )
        )


@functools.lru_cache(32)
def _described(table: LayerTable) -> tuple[int, bytes]:
    """Return a table's digest and description (`split_pb2.LayerTable`)."""
    outputs = [
        split_pb2.LayerOutputs(tensors=[split_pb2.TensorShape(dtype=one.dtype, shape=one.shape) for one in each])
        for each in table.outputs
    ]
    message = split_pb2.LayerTable(layer_id=table.ids, name=table.names, layer_type=table.types, outputs=outputs)
    described = message.SerializeToString()
    return xxhash.xxh3_64_intdigest(described), described


def leave_out(reply: split_pb2.ReplyHeader, known: Collection[int]) -> None:
    """Leave out of a reply the tables of layers that its client has, by their digests."""
    for layers in (reply.layers, *[part.layers for part in reply.parts]):
        if layers.described and layers.table in known:  # clearing a field of an absent message would make it present
            layers.ClearField("described")


@dataclass(frozen=True)
class Identity:
    """What both sides must agree on: hexadecimal digests, and the settings that affect kernels."""

    model_id: str
    weights_hash: str
    structure_digest: str
    plan_digest: str = ""
    """Empty if the model has no example input to plan on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    """Versions and device, for messages only."""
    layers: int = 0
    """The number of layer calls in the plan; 0 without one."""
    cuts: int = 0
    """The number of layers and blocks of the plan after which it can be cut."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """`shared_hooks.profiling.machine.describe`: what a profile is compared with."""
    preprocess_digest: str = ""
    """How input files are read; empty if they cannot be."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """Inputs and outputs by name (`models.form`); empty if the model has no example."""
    packages: tuple[str, ...] = ()
    """The top-level packages of its modules' classes."""
    part: tuple[str, ...] = ()
    """If only a part's weights are loaded: the cuts at which the part may begin and end, in order."""

    @property
    def name(self) -> str:
        """The model id without its version."""
        return self.model_id.partition(":")[0]

    @property
    def version(self) -> str:
        """The model id's version: what follows the colon, or "1"."""
        return self.model_id.partition(":")[2] or "1"

    def is_like(self, other: Identity) -> bool:
        """Return whether clients of one are served by the other, apart from machine and device."""
        mine, theirs = (replace(one, about={}, machine={}, form={}, part=()) for one in (self, other))
        return mine == theirs


class PartEnd(NamedTuple):
    """Where a part ends that another server continues: the name of a layer or block, and the codec of what crosses
    there.
    """

    cut: str
    codec: str = "raw"


@dataclass(frozen=True)
class Computed:
    """The packed output of a tail, or what crosses a later cut, and its cost.

    The reply lacks only what the server knows of the request: id, load, time to receive and to wait.
    """

    reply: split_pb2.ReplyHeader
    buffers: tuple[memoryview, ...]
    """The payload, in order (`shared_hooks.Parcel`)."""
    session_bytes: int = 0
    """The bytes that a step's decoding session holds afterwards."""
    is_done: bool = True
    """Whether the step was made; otherwise it needs more data and comes again."""
    cut: tuple[str, bytes] | None = None
    """Digest and description of the later cut that its payload crosses; None: it is the model's answer."""
    rest: Callable[[], Computed] | None = None
    """Asks the next server for the rest of a step in the middle of a chain. Called once, in any thread."""

    @property
    def is_part(self) -> bool:
        """Whether the next server of a chain computes the rest."""
        return self.cut is not None or self.rest is not None

    @classmethod
    def of(
        cls,
        header: bytes,
        buffers: tuple[memoryview, ...],
        nbytes: int,
        *,
        decode_ns: int = 0,
        inject_ns: int = 0,
        compute_ns: int = 0,
        encode_ns: int = 0,
        layers: LayerColumns | None = None,
        forward: ForwardMetrics | None = None,
        transforms: Iterable[str] = (),
        session_bytes: int = 0,
        is_done: bool = True,
        batch_size: int = 0,
        compiled: bool = False,
        cut: tuple[str, bytes] | None = None,
    ) -> Computed:
        """``transforms``: modules whose output a Transform may have changed. ``batch_size``: requests or steps that
        were computed together. ``compiled``: a compiled tail was used, if it did not fail.
        """
        reply = split_pb2.ReplyHeader(
            header=header,
            payload_bytes=nbytes,
            transforms=transforms,
            batch_size=batch_size,
            compiled=compiled,
            durations=split_pb2.Durations(
                decode_ns=decode_ns, inject_ns=inject_ns, compute_ns=compute_ns, encode_ns=encode_ns
            ),
        )
        put(reply, layers or LayerColumns(), forward)
        return cls(reply, buffers, session_bytes, is_done, cut)

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return self.reply.payload_bytes


def join_reply(
    own: split_pb2.ReplyHeader,
    rest: split_pb2.ReplyHeader,
    server: str,
    cut: str,
    *,
    bytes_up: int,
    took_ns: int,
    sends: int = 1,
) -> None:
    """Add the report and answer of the next part, which ``server`` computed from ``cut`` on, to this part's report.

    ``took_ns``: since the request was passed on.
    """
    own.header, own.payload_bytes = rest.header, rest.payload_bytes
    own.batch_size, own.compiled = max(own.batch_size, rest.batch_size), own.compiled or rest.compiled
    own.durations.onward_ns += took_ns
    part = own.parts.add(server=server, cut=cut, bytes_up=bytes_up, sends=sends)
    for name in ("durations", "forward", "layers", "load"):
        if rest.HasField(name):
            getattr(part, name).CopyFrom(getattr(rest, name))
    for name in ("notes", "readings", "transforms"):
        getattr(part, name).extend(getattr(rest, name))
    part.observations = rest.observations
    own.parts.extend(rest.parts)


class FileRead(NamedTuple):
    """An input file as the model's (args, kwargs), and the time it took to read."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ns: int


CPU = torch.device("cpu")
SPARE_BYTES = 64 << 10
"""The memory that an answer may keep alive beyond twice its own size."""


def owned(parcel: Parcel) -> tuple[memoryview, ...]:
    """Return the bytes of an answer, copied if a small view would keep a large memory alive until the client
    has them.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in parcel.keep}
    if sum(storages.values()) <= 2 * parcel.nbytes + SPARE_BYTES:
        return parcel.buffers
    return tuple(memoryview(bytes(buffer)) for buffer in parcel.buffers)


def room_for(nbytes: int, device: torch.device = CPU) -> memoryview:
    """Uninitialised memory for one payload in this process, on its way to ``device``. Raises ServerUnavailable."""
    try:
        return memoryview(room(nbytes, device).numpy())  # type: ignore[arg-type]
    except (MemoryError, RuntimeError) as error:  # torch reports out of memory as RuntimeError
        raise ServerUnavailable(f"no memory for {nbytes} bytes: {error}") from error


FILE = "cloud-only-file"
"""Takes the place of a cut's name if an input file is sent and the whole model runs here."""

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what comes next)."""


class Following(NamedTuple):
    """The part of a generation behind this server's: where it begins, and the link to the server that computes it."""

    cut: str
    link: StepLink


class EngineSession(Protocol):
    """A decoding session, in the process of its model. `step` and `fork` are called by one thread at a time."""

    @property
    def lost(self) -> str:
        """Why the session is gone; empty while it is usable."""
        ...

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """Compute the next step from a complete payload.

        Raises an IsthmusError, after which the session is as before; and SessionLost.
        """
        ...

    def fork(self) -> EngineSession:
        """Return a copy. Raises an IsthmusError."""
        ...

    def close(self) -> None:
        """Free its memory; never blocks for long. Thread-safe, except during a step."""
        ...


class Begun(Protocol):
    """An unpacked step. Call `run` once, then `end`, both in the thread that began it."""

    def run(self) -> None:
        """Compute the step. Raises what `EngineSession.step` does."""
        ...

    def end(self, outcome: Outcome[None]) -> Computed:
        """Return the packed result of `run`. Raises its error."""
        ...


class StepBatching(Protocol):
    """Steps of several decoding sessions of one model, computed together."""

    def begin(self, session: EngineSession, header: bytes, payload: memoryview) -> Begun:
        """Return the next step of a session, as `EngineSession.step` takes it. Raises an IsthmusError."""
        ...

    def run(self, calls: Sequence[Callable[[], None]], ended: Ended) -> list[Outcome[None]]:
        """Return the outcome of each call of a `Begun.run`, in order; ``ended``: see `Lockstep.run`."""
        ...


inexact: ContextVar[bool] = ContextVar("isthmus_inexact", default=False)
"""Whether the request that this thread computes accepts last bits other than the model's own."""

Leave = Callable[[], None]
"""Removes what was put in a queue; no effect if it is not there any more."""


class Residence(Protocol):
    """Whether a model's weights are in memory, and which requests wait for them."""

    def enter(self, account: str, put: Callable[[], Leave], cut: str = "") -> Leave:
        """Call ``put`` as soon as the weights are in memory and ``cut`` may be served, possibly at once. Never blocks.

        The weights stay until the returned function is called. Raises the reason if the model will not come back.
        """
        ...


@dataclass(frozen=True)
class BatchKey:
    """Requests with an equal ``key`` may share a batch. ``rows``: of this request."""

    key: Hashable
    rows: int


class BegunTail(Protocol):
    """A request's unpacked frontier. Call one of `end` and `alone`, in the thread that began it."""

    @property
    def is_made(self) -> bool:
        """Whether `Batching.run` has computed it."""
        ...

    @property
    def own_ns(self) -> int:
        """The nanoseconds spent on this request alone, until it had reached the others' cut."""
        ...

    def end(self) -> Computed:
        """Return its part of the batch, packed."""
        ...

    def alone(self) -> Computed:
        """Return the result of `Engine.compute`."""
        ...


class Batching(Protocol):
    """Requests of several clients at one cut of one model, computed as one batch."""

    def batch_key(self, crossing: Crossing, end: PartEnd | None = None) -> BatchKey | None:
        """Return the batch key of requests at this cut (for middle parts, with ``end``); a quick lookup.

        None if its requests are computed alone, or `learn` was not called.
        """
        ...

    def learn(self, crossing: Crossing, end: PartEnd | None = None) -> bool:
        """Find out whether its requests may be batched, unless that is known: plans and runs the model. Returns whether
        it did.
        """
        ...

    def compatible_keys(self, key: Hashable, waiting: Callable[[Hashable], int], most: int) -> Sequence[Hashable]:
        """Return other batch keys worth joining with these: requests that were cut earlier run on to the later cut.
        Quick.

        ``waiting``: the number of rows of a key; ``most``: of a batch.
        """
        ...

    def begin(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> BegunTail:
        """Unpack a complete payload, as `Engine.compute` takes it. Raises an IsthmusError."""
        ...

    def run(self, begun: Sequence[BegunTail]) -> None:
        """Compute one tail for several requests of one batch key.

        After an error none is computed. CutRefused and InputMismatch mean that they cannot be joined.
        """
        ...

    def doubt(self, begun: BegunTail, reason: str) -> None:
        """Called if a batch failed although each request alone did not: requests like this one are computed alone for a
        while.
        """
        ...


class Engine(Protocol):
    """The tail of one model. Thread-safe."""

    @property
    def identity(self) -> Identity: ...

    @property
    def residence(self) -> Residence | None:
        """None if the weights are always in memory."""
        ...

    @property
    def step_batching(self) -> StepBatching | None:
        """None if each step is computed alone."""
        ...

    @property
    def batching(self) -> Batching | None:
        """None if each request is computed alone."""
        ...

    def manifest(self) -> Manifest:
        """Return what the digests of `identity` are made of. Raises an IsthmusError."""

    def allocate(self, nbytes: int) -> memoryview:
        """Uninitialised memory for one payload, freed with its last reference. Raises ServerUnavailable."""

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Check what a request announces, before anything is allocated for it. Raises an IsthmusError."""

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        """Run the tail on a complete payload, which it may keep and write to; with ``end``, up to that later cut.

        Raises an IsthmusError.
        """

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        """As `admit`, for a request whose payload is an input file."""

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        """Read a file before a worker is needed for it; None if `compute_file` is to read it. Raises as that."""

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
        """Read the file, unless it is given as ``read``, and run the whole model; with ``end``, up to that cut.

        Raises an IsthmusError, InputMismatch for an unusable file.
        """

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As `admit`, for a step of a decoding session."""

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        """Return a new decoding session behind the layer called ``cut``. Raises UnknownLayer, CutRefused."""
        ...

    def observing(self, observers: tuple[str, ...]) -> AbstractContextManager[Callable[[], bytes]]:
        """Observe what this thread computes in the block. Yields a function that returns the findings so far,
        as bytes.
        """

    @property
    def profile_yields(self) -> bool:
        """Whether ``on_progress`` of `profile` may compute other requests in this thread."""
        ...

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return this side's profile (`shared_hooks.profiling.profile`), measured now, with the decoding of ``codecs``.

        An error raised by ``on_progress`` ends it. Raises CutRefused for a model without an example.
        """


# The versions of a model.


AnyEngine = TypeVar("AnyEngine", bound=Engine)


def newest_first(names: Iterable[str], name: str) -> list[str]:
    """Ids "NAME:VERSION" of the versions of a model: 10 is newer than 9, and the one without a version is the
    oldest.
    """
    found = [one for one in names if one.partition(":")[0] == name]

    def parts(one: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", one[len(name) :])]

    return sorted(found, key=parts, reverse=True)


def version_of(engines: Mapping[str, AnyEngine], name: str, weights_hash: str = "") -> AnyEngine | None:
    """Return the engine with this model id. For a name alone: the newest version with these weights, or the newest."""
    if ":" in name:
        return engines.get(name)
    found = [engines[one] for one in newest_first(engines, name)]
    return next((one for one in found if one.identity.weights_hash == weights_hash), found[0] if found else None)


# A tail's output as the bytes of an answer.


def packed(lifecycle: Lifecycle, output: Any, end: PartEnd | None = None, **facts: Any) -> Computed:
    """Pack an output, or with ``end`` what crosses there. ``facts``: arguments of `Computed.of`, but for packing."""
    started = time.perf_counter_ns()
    lifecycle.emit(Stage.BEFORE_ENCODE, value=output)
    if end is None:
        parcel = Parcel.of_value(output)
    else:
        parcel = output.pack(end.codec)
        facts["cut"] = output.crossing.digest, output.crossing.to_bytes()
    lifecycle.emit(Stage.AFTER_ENCODE, nbytes=parcel.nbytes)
    buffers = owned(parcel)
    return Computed.of(parcel.header, buffers, parcel.nbytes, encode_ns=time.perf_counter_ns() - started, **facts)


log = logging.getLogger("cloud_server")


class WeightsGuard:
    """Detects changes of one model's weights, and restores them. Thread-safe.

    ``load`` builds the model again, after which ``mended`` is called. ``mapped``: the weights stay in their files,
    where looking at elements would keep pages in memory.
    """

    def __init__(
        self,
        identity: Identity,
        model: nn.Module,
        load: Callable[[], nn.Module],
        mended: Callable[[], None] = lambda: None,
        *,
        mapped: bool = False,
    ) -> None:
        self._model_id = identity.model_id
        self._model = model
        self._load = load
        self._on_mended = mended
        self._mapped = mapped
        self._hash = identity.weights_hash
        self._lock = threading.Lock()
        self.mended = 0
        """How often the model was restored: results from before must not be continued."""
        weights = [*model.parameters(), *model.buffers()]
        self._tensors = list(map(held, weights))
        # other objects that the model keeps are not in a weights file
        known = set(map(id, weights))
        others = {id(one): one for one in PythonState(model).tensors() if id(one) not in known}
        self._copies = [(one, one.clone()) for one in others.values() if one.layout == torch.strided]
        self._tensors += [one for one, _ in self._copies]
        self._kinds = list(map(type, self._tensors))
        self._look()

    def _look(self) -> None:
        plain = (tensor for tensor in self._tensors if type(tensor) in (torch.Tensor, nn.Parameter))
        self._samples = TensorSamples(() if self._mapped else plain)
        self._seen, self._bits = self._now(), self._samples.now()

    def _now(self) -> list[tuple[int, int, type]]:
        return [
            (-1 if tensor.is_inference() else tensor._version, tensor.data_ptr(), type(tensor))
            for tensor in self._tensors
        ]

    def _is_same(self) -> bool:
        return self._now() == self._seen and self._samples.now() == self._bits

    def check(self) -> None:
        """Raise ServerUnavailable if the model had changed: the last results are unreliable, and the request may be
        repeated. Call it after every request.
        """
        if self.mend():
            raise ServerUnavailable(f'model "{self._model_id}" had changed in memory and was loaded again; ask again')

    def mend(self) -> bool:
        """Restore the model if it has changed; returns whether it had."""
        if self._is_same():
            return False
        with self._lock:
            if self._is_same():
                return False
            log.critical(
                "model %s changed while it served: out of service, its weights are loaded again", self._model_id
            )
            self._restore()
            self.mended += 1
            self._on_mended()
        return True

    def _restore(self) -> None:
        fresh = self._load()
        with torch.no_grad():
            for mine, kind in zip(self._tensors, self._kinds, strict=True):
                mine.__class__ = kind
            own = self._tensors[: len(self._tensors) - len(self._copies)]
            for mine, theirs in zip(own, [*fresh.parameters(), *fresh.buffers()], strict=True):
                mine.data = theirs.data
            for mine, copy in self._copies:
                mine.data = copy.clone()
        self._look()
        if weights_hash(self._model) != self._hash:
            log.critical("model %s: the loaded weights are not those it was announced with", self._model_id)
            self._seen = []  # matches nothing from now on: no request is served any more
