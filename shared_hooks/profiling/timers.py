"""The head or the tail of one cut, run once and timed, as a request runs it on that side; repeated by `profiler`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shared_hooks.codecs.basis import Basis, Book, Frames
from shared_hooks.crossing import Crossing, EarlyOutput, Parcel, decode
from shared_hooks.models.example import to_device
from shared_hooks.profiling.inspection import Ledger
from shared_hooks.tensors import copied, tensors_in
from shared_hooks.wrapped import WrappedModel

KEEP_BYTES = 512 << 20
"""Frontiers that the cloud's side keeps between repetitions; beyond, the head runs again, outside the timing."""


@dataclass(frozen=True)
class TimedRun:
    """A head or a tail, once. Nanoseconds by stage, of processor time in all threads, and the request's bytes."""

    stages: Mapping[str, int]
    cpu_ns: int
    wire_bytes: int
    codecs: Mapping[str, TimedCodec] = field(default_factory=dict)


class TimedCodec(NamedTuple):
    """The same frontier with another codec, once: encoded on the edge, decoded on the cloud."""

    ns: int
    wire_bytes: int


class Inputs:
    """A model's inputs, fresh for every run: a model may write into them."""

    def __init__(self, wrapped: WrappedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.device = wrapped.device
        host = torch.device("cpu")
        self._call = (to_device(args, host), to_device(dict(kwargs), host))

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies where a client has them: on the CPU."""
        return copied(*self._call)

    def place(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moved to the model's device; this belongs to a request's time."""
        if self.device.type == "cpu":
            return args, kwargs
        return to_device(args, self.device), to_device(kwargs, self.device)


def cut_of(layer_id: int) -> int | str:
    """A cut as `WrappedModel.forward` takes it."""
    return "input" if layer_id < 0 else layer_id


def wait_for(device: torch.device) -> None:
    """Until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def collect(wrapped: WrappedModel) -> None:
    """As both sides do with every request, where metrics are on; the cloud counts it as encoding."""
    if wrapped.metrics_enabled:
        wrapped.get_layer_metrics()
        wrapped.get_forward_metrics()


def knows(crossing: Crossing, codec: str) -> bool:
    """Whether a codec has what it needs to know of the cut, and of no frame before."""
    return codec != Frames.name and (codec != Basis.name or bool(crossing.books))


class HeadTimer:
    """``head``: input to frontier. ``encode``: frontier to header and payload."""

    def __init__(
        self,
        wrapped: WrappedModel,
        inputs: Inputs,
        codec: str,
        books: Mapping[str, tuple[Book | None, ...]] | None = None,
    ) -> None:
        """``books``: by the name of a cut, what the codec "basis" sends its pieces by."""
        self.wrapped = wrapped
        self.inputs = inputs
        self.codec = codec
        self._books = books or {}
        self._with_books: dict[str, Crossing] = {}

    def run(self, layer_id: int, codecs: Sequence[str] = ()) -> TimedRun:
        """``codecs``: the same frontier is also encoded with these, as far as they have what they need to know."""
        args, kwargs = self.inputs.fresh()
        cpu, started = time.process_time_ns(), time.perf_counter_ns()
        args, kwargs = self.inputs.place(args, kwargs)
        early = self.wrapped.head(cut_of(layer_id), *args, **kwargs)
        wait_for(self.inputs.device)
        collect(self.wrapped)
        computed = time.perf_counter_ns()
        early = self._with_own(early)
        parcel = self.packed(early)
        packed = time.perf_counter_ns()
        spent = time.process_time_ns() - cpu
        return TimedRun(
            {"head": computed - started, "encode": packed - computed},
            spent,
            len(parcel.header) + parcel.nbytes,
            {name: self._encoded(early, name) for name in codecs if knows(early.crossing, name)},
        )

    def frontier(self, layer_id: int) -> EarlyOutput:
        """The frontier of the same inputs, with the books of its cut."""
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        return self._with_own(self.wrapped.head(cut_of(layer_id), *args, **kwargs))

    def _with_own(self, early: EarlyOutput) -> EarlyOutput:
        """As it is where there are no books, or other pieces cross than when these were learnt."""
        crossing = early.crossing
        books = self._books.get(crossing.layer_name)
        if books is None or len(books) != len(crossing.grains):
            return early
        known = self._with_books.get(crossing.digest)
        if known is None:
            known = self._with_books[crossing.digest] = crossing.with_books(books)
        return replace(early, crossing=known)

    def packed(self, early: EarlyOutput, codec: str | None = None) -> Parcel:
        """As the client packs it: the description's bytes are asked for with every request."""
        early.crossing.to_bytes()
        return early.pack(codec=codec or self.codec)

    def _encoded(self, early: EarlyOutput, codec: str) -> TimedCodec:
        started = time.perf_counter_ns()
        parcel = self.packed(early, codec)
        return TimedCodec(time.perf_counter_ns() - started, len(parcel.header) + parcel.nbytes)

    def memory_peak(self, layer_id: int) -> int:
        """The most bytes of tensors alive at a time: inputs included, weights not."""
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        if self.inputs.device.type == "cuda":
            own = sum(tensor.numel() * tensor.itemsize for tensor in tensors_in((args, kwargs)))
            before = torch.cuda.memory_allocated(self.inputs.device) - own
            torch.cuda.reset_peak_memory_stats(self.inputs.device)
            self.packed(self.wrapped.head(cut_of(layer_id), *args, **kwargs))
            return torch.cuda.max_memory_allocated(self.inputs.device) - before
        model = self.wrapped.model
        with Ledger([*model.parameters(), *model.buffers()], list(tensors_in((args, kwargs)))) as ledger:
            self.packed(self.wrapped.head(cut_of(layer_id), *args, **kwargs))
        return int(ledger.peak_so_far)


class TailTimer:
    """``decode``, ``inject``, ``compute``, ``encode``: the frontier's bytes to the answer's, as the server does it.

    A server always runs with metrics; ``metrics``: they are collected for the client, too.
    """

    def __init__(self, wrapped: WrappedModel, inputs: Inputs, codec: str, *, metrics: bool = False) -> None:
        self.metrics = metrics
        self.wrapped = wrapped
        self.inputs = inputs
        self.codec = codec
        self._kept: dict[int, tuple[Crossing, bytes, bytes]] = {}
        self._coded: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        self._bytes = 0

    def run(self, layer_id: int, codecs: Sequence[str] = ()) -> TimedRun:
        """``codecs``: the same frontier is also decoded from these."""
        crossing, header, data = self._request(layer_id)
        payload = _writable(data)
        cpu, started = time.process_time_ns(), time.perf_counter_ns()
        early = EarlyOutput.unpack(crossing, header, payload, payload.nbytes + crossing.payload_bytes, disposable=True)
        decoded = time.perf_counter_ns()
        output = self.wrapped.tail(early)
        returned = time.perf_counter_ns()
        wait_for(self.inputs.device)
        computed = time.perf_counter_ns()
        durations = self.wrapped.durations()
        Parcel.of_value(output)
        if self.metrics:
            collect(self.wrapped)
        encoded = time.perf_counter_ns()
        stages = {
            "decode": decoded - started,
            "inject": durations["inject"],
            "compute": durations["compute"] + computed - returned,
            "encode": encoded - computed,
        }
        spent = time.process_time_ns() - cpu
        return TimedRun(
            stages,
            spent,
            len(header) + len(data),
            {name: self._decoded(layer_id, name) for name in codecs if knows(crossing, name)},
        )

    def _decoded(self, layer_id: int, codec: str) -> TimedCodec:
        crossing, header, data = self._request(layer_id)
        coded = self._coded.get((layer_id, codec))
        if coded is None:
            early = EarlyOutput.unpack(crossing, header, _writable(data), len(data) + crossing.payload_bytes)
            parcel = early.pack(codec)
            coded = parcel.header, b"".join(parcel.buffers)
            if self._bytes + parcel.nbytes <= KEEP_BYTES:
                self._bytes += parcel.nbytes
                self._coded[layer_id, codec] = coded
        payload = _writable(coded[1])
        most = payload.nbytes + crossing.payload_bytes
        started = time.perf_counter_ns()
        EarlyOutput.unpack(crossing, coded[0], payload, most, disposable=True)
        return TimedCodec(time.perf_counter_ns() - started, len(coded[0]) + len(coded[1]))

    def _request(self, layer_id: int) -> tuple[Crossing, bytes, bytes]:
        """What a client would send: the cut's description read from bytes, as from a stranger."""
        kept = self._kept.get(layer_id)
        if kept is not None:
            return kept
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        early = self.wrapped.head(cut_of(layer_id), *args, **kwargs)
        parcel = early.pack(codec=self.codec)
        made = decode(early.crossing.to_bytes()), parcel.header, b"".join(parcel.buffers)
        if self._bytes + parcel.nbytes <= KEEP_BYTES:
            self._bytes += parcel.nbytes
            self._kept[layer_id] = made
        return made


def _writable(data: bytes) -> memoryview:
    """As it lies when it was received."""
    return memoryview(torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()) if data else memoryview(b"")  # type: ignore[arg-type]
