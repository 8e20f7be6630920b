"""Run the head or the tail of one cut once, timed as a request runs it on that side; `profiler` repeats it.

One more forward is inspected instead of timed (`inspect`): the memory of its tensors, and its multiplications, by
layer. A dispatch mode sees every tensor that operations return, and keeps a ledger of live storages. It is exact for
tensors; a kernel's temporary memory is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shared_hooks import devices
from shared_hooks.codecs import CODECS
from shared_hooks.codecs.basis import Basis, Book, Frames
from shared_hooks.codecs.learned import LearnedCodec
from shared_hooks.crossing import Crossing, EarlyOutput, Parcel, decode
from shared_hooks.errors import CutRefused
from shared_hooks.metrics import SEARCHING, LayerMetrics, Reading, Sampler, TensorShape, Track, gpu_of
from shared_hooks.metrics.sampler import sampler
from shared_hooks.models.inputs import to_device
from shared_hooks.modules import ModuleInfo, attach, fast_path_off, running
from shared_hooks.profiling.profile import Quartiles, middle_half
from shared_hooks.tensors import copied, dtype_name, tensors_in
from shared_hooks.wrapped import WrappedModel

NOTE = "bytes of tensors alive in one forward: inputs included, weights not, kernels' scratch space not seen"


@dataclass
class Inspected:
    """A layer call. Bytes of live storages at its end (``allocated``), their maximum in the call (``peak``), and since
    the forward began (``peak_so_far``).
    """

    module_type: str
    outputs: tuple[TensorShape, ...] = ()
    allocated: int = 0
    peak: int = 0
    peak_so_far: int = 0
    features: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """Inspection of a forward; ``peak``: of the whole forward."""

    layers: tuple[Inspected, ...]
    peak: int


class StorageMode(TorchDispatchMode):
    """Live storages except those in ``known``; and multiply-accumulates of the operations that torch can count."""

    def __init__(self, known: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in known if _plain(tensor)}
        self.macs = 0.0
        self.add(inputs)
        self.peak = self.peak_so_far = self.held()

    def held(self) -> int:
        """Return the live bytes."""
        for key in [key for key, (storage, _) in self.alive.items() if storage.expired()]:
            del self.alive[key]
        return sum(nbytes for _, nbytes in self.alive.values())

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Add tensors that are not in the ledger yet."""
        for tensor in tensors:
            if not _plain(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def begin(self) -> None:
        """Begin a module's call: its own peak starts here."""
        self.peak = self.held()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(list(tensors_in(result)) if not isinstance(result, torch.Tensor) else [result])
        held = self.held()
        self.peak = max(self.peak, held)
        self.peak_so_far = max(self.peak_so_far, held)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            try:
                self.macs += count(*args, **kwargs, out_val=result) / 2
            except Exception:  # torch's formula does not support this form of the call: not counted
                pass
        return result


class Inspector:
    """Runs in place of a session (`attach.Runner`), numbers layers by the same rule, and reads the ledger."""

    is_bare = False

    def __init__(self, modules: Mapping[nn.Module, ModuleInfo], ledger: StorageMode) -> None:
        self.modules = modules
        self.ledger = ledger
        self.layers: list[Inspected] = []
        self.parents: list[bool] = []  # of every running module: does it have a hooked child?
        self.failure: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        info = self.modules.get(module)
        if info is None:
            return forward(*args, **kwargs)
        if self.parents:
            self.parents[-1] = True
        self.parents.append(False)
        ledger = self.ledger
        ledger.begin()
        macs = ledger.macs
        try:
            output = forward(*args, **kwargs)
        finally:
            has_child = self.parents.pop()
        if not has_child:
            inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(output))
            features = {
                "input_elements": float(sum(tensor.numel() for tensor in inputs)),
                "output_elements": float(sum(tensor.numel() for tensor in outputs)),
                "parameters": float(sum(weight.numel() for weight in module.parameters())),
            }
            if ledger.macs > macs:
                features["macs"] = ledger.macs - macs
            shapes = tuple(TensorShape(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in outputs)
            layer = Inspected(info.module_type, shapes, ledger.held(), ledger.peak, ledger.peak_so_far, features)
            self.layers.append(layer)
        return output


def inspect(
    model: nn.Module, modules: Mapping[nn.Module, ModuleInfo], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inspection:
    """Run the whole model once and inspect it. Raises what the model raises."""
    ledger = StorageMode([*model.parameters(), *model.buffers()], list(tensors_in((args, kwargs))))
    inspector = Inspector(modules, ledger)
    token = running.set(inspector)
    for module in modules:
        attach.attach(module)
    try:
        with torch.no_grad(), fast_path_off(), ledger:
            model(*args, **kwargs)
    finally:
        running.reset(token)
        for module in modules:
            attach.detach(module)
    if inspector.failure is not None:
        raise inspector.failure
    return Inspection(tuple(inspector.layers), ledger.peak_so_far)


def weights_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, each storage once."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _plain(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _plain(tensor: torch.Tensor) -> bool:
    """Return whether it has one storage; sparse and nested tensors and some subclasses do not."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    try:
        return tensor.untyped_storage().nbytes() >= 0
    except (NotImplementedError, RuntimeError):
        return False


# What a client does around a head: decodes the answer before, and reads the next input.
#
# It is done before every measurement on the edge, and not only to time it: in a request the head begins with caches,
# clocks and a CPU quota as these leave them. Heads of a small model on a quarter of a core, measured by themselves,
# took a third of their time after reading an input.


class Around:
    """Work before a measurement. ``answer``: header and payload of one. ``prepare`` reads and preprocesses ``path``;
    None: inputs are tensors.
    """

    def __init__(
        self, answer: tuple[bytes, bytes], path: Path | None, prepare: Callable[[Path], object] | None
    ) -> None:
        self.path = path
        self._answer = answer
        self._prepare = prepare
        self.finish_ns: list[int] = []
        self.prepare_ns: list[int] = []

    def run(self) -> None:
        """Run it. Raises what reading the input raises."""
        started = time.perf_counter_ns()
        Parcel.to_value(*self._answer)
        finished = time.perf_counter_ns()
        self.finish_ns.append(finished - started)
        if self._prepare is not None and self.path is not None:
            self._prepare(self.path)
            self.prepare_ns.append(time.perf_counter_ns() - finished)


KEEP_BYTES = 512 << 20
"""Maximum bytes of frontiers that the cloud's side keeps between repetitions; beyond it, heads run again, untimed."""


@dataclass(frozen=True)
class TimedRun:
    """One run of a head or a tail: nanoseconds by stage, processor time of all threads, and the request's bytes."""

    stages: Mapping[str, int]
    cpu_ns: int
    wire_bytes: int
    codecs: Mapping[str, TimedCodec] = field(default_factory=dict)


class TimedCodec(NamedTuple):
    """The same frontier with another codec, once: encoded on the edge, decoded on the cloud."""

    ns: int
    wire_bytes: int


class Inputs:
    """A model's inputs, copied for every run, as a model may write to them."""

    def __init__(self, wrapped: WrappedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.device = wrapped.device
        host = torch.device("cpu")
        self._call = (to_device(args, host), to_device(dict(kwargs), host))

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies on the CPU, where a client has them."""
        return copied(*self._call)

    def place(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move inputs to the model's device, which is part of a request's time."""
        if self.device.type == "cpu":
            return args, kwargs
        return to_device(args, self.device), to_device(kwargs, self.device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    devices.synchronize(device)


def collect(wrapped: WrappedModel) -> None:
    """Collect metrics, if enabled, as both sides do in every request; the cloud counts it as encoding."""
    if wrapped.metrics_enabled:
        wrapped.get_layer_metrics()
        wrapped.get_forward_metrics()


def knows(crossing: Crossing, codec: str) -> bool:
    """Return whether a codec can encode the cut, without any earlier frame."""
    own = CODECS.get(codec)
    if isinstance(own, LearnedCodec):
        return own.file.cut == crossing.name
    return codec != Frames.name and (codec != Basis.name or bool(crossing.books))


class HeadTimer:
    """Times heads. ``head``: input to frontier. ``encode``: frontier to header and payload."""

    def __init__(
        self,
        wrapped: WrappedModel,
        inputs: Inputs,
        codec: str,
        books: Mapping[str, tuple[Book | None, ...]] | None = None,
    ) -> None:
        """``books``: by cut, the books of the codec "basis" for its pieces."""
        self.wrapped = wrapped
        self.inputs = inputs
        self.codec = codec
        self._books = books or {}
        self._with_books: dict[str, Crossing] = {}

    def run(self, cut: int | str, codecs: Sequence[str] = ()) -> TimedRun:
        """Run a head. ``codecs``: also encode its frontier with these, if they can encode it."""
        args, kwargs = self.inputs.fresh()
        cpu, started = time.process_time_ns(), time.perf_counter_ns()
        args, kwargs = self.inputs.place(args, kwargs)
        early = self.wrapped.head(cut, *args, **kwargs)
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

    def frontier(self, cut: int | str) -> EarlyOutput:
        """Return the frontier of the same inputs, with the books of its cut."""
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        return self._with_own(self.wrapped.head(cut, *args, **kwargs))

    def _with_own(self, early: EarlyOutput) -> EarlyOutput:
        """Add the cut's books, unless there are none, or other pieces cross than they were calibrated for."""
        crossing = early.crossing
        books = self._books.get(crossing.name)
        if books is None or len(books) != len(crossing.grains):
            return early
        known = self._with_books.get(crossing.digest)
        if known is None:
            known = self._with_books[crossing.digest] = crossing.with_books(books)
        return replace(early, crossing=known)

    def packed(self, early: EarlyOutput, codec: str | None = None) -> Parcel:
        """Pack as the client does, which serialises the description with every request."""
        early.crossing.to_bytes()
        return early.pack(codec=codec or self.codec)

    def _encoded(self, early: EarlyOutput, codec: str) -> TimedCodec:
        started = time.perf_counter_ns()
        parcel = self.packed(early, codec)
        return TimedCodec(time.perf_counter_ns() - started, len(parcel.header) + parcel.nbytes)

    def memory_peak(self, cut: int | str) -> int:
        """Return the maximum bytes of live tensors, including inputs, without weights."""
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        if devices.counts_memory(self.inputs.device):
            own = sum(tensor.numel() * tensor.itemsize for tensor in tensors_in((args, kwargs)))
            before = devices.allocated(self.inputs.device).held - own
            devices.reset_peak(self.inputs.device)
            self.packed(self.wrapped.head(cut, *args, **kwargs))
            return devices.allocated(self.inputs.device).peak - before
        model = self.wrapped.model
        with StorageMode([*model.parameters(), *model.buffers()], list(tensors_in((args, kwargs)))) as ledger:
            self.packed(self.wrapped.head(cut, *args, **kwargs))
        return int(ledger.peak_so_far)


class TailTimer:
    """Times tails: ``decode``, ``inject``, ``compute``, ``encode``, from the frontier's bytes to the answer's.

    A server always runs with metrics; ``metrics``: they are also collected for the client.
    """

    def __init__(self, wrapped: WrappedModel, inputs: Inputs, codec: str, *, metrics: bool = False) -> None:
        self.metrics = metrics
        self.wrapped = wrapped
        self.inputs = inputs
        self.codec = codec
        self._kept: dict[int | str, tuple[Crossing, bytes, bytes]] = {}
        self._coded: dict[tuple[int | str, str], tuple[bytes, bytes]] = {}
        self._bytes = 0

    def run(self, cut: int | str, codecs: Sequence[str] = ()) -> TimedRun:
        """Run a tail. ``codecs``: also decode the frontier from these."""
        crossing, header, data = self._request(cut)
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
            {name: self._decoded(cut, name) for name in codecs if knows(crossing, name)},
        )

    def _decoded(self, cut: int | str, codec: str) -> TimedCodec:
        crossing, header, data = self._request(cut)
        coded = self._coded.get((cut, codec))
        if coded is None:
            early = EarlyOutput.unpack(crossing, header, _writable(data), len(data) + crossing.payload_bytes)
            parcel = early.pack(codec)
            coded = parcel.header, b"".join(parcel.buffers)
            if self._bytes + parcel.nbytes <= KEEP_BYTES:
                self._bytes += parcel.nbytes
                self._coded[cut, codec] = coded
        payload = _writable(coded[1])
        most = payload.nbytes + crossing.payload_bytes
        started = time.perf_counter_ns()
        EarlyOutput.unpack(crossing, coded[0], payload, most, disposable=True)
        return TimedCodec(time.perf_counter_ns() - started, len(coded[0]) + len(coded[1]))

    def _request(self, cut: int | str) -> tuple[Crossing, bytes, bytes]:
        """Return a client's request: the cut's description is read from bytes, as if untrusted."""
        kept = self._kept.get(cut)
        if kept is not None:
            return kept
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        early = self.wrapped.head(cut, *args, **kwargs)
        parcel = early.pack(codec=self.codec)
        made = decode(early.crossing.to_bytes()), parcel.header, b"".join(parcel.buffers)
        if self._bytes + parcel.nbytes <= KEEP_BYTES:
            self._bytes += parcel.nbytes
            self._kept[cut] = made
        return made


def _writable(data: bytes) -> memoryview:
    """Return the data in writable memory, as received data is."""
    return memoryview(torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()) if data else memoryview(b"")  # type: ignore[arg-type]


# Energy of work that is repeated until the sensors see it; and the share of other work by its time.


SEARCH_S = 10.0
IDLE_S = 1.0
LEAST_S = 0.2
LEAST_PERIODS = 5


class PowerMeters:
    """This machine's energy meters, for a model on ``device``. Without meters nothing is repeated, and every reading
    says why there are none.
    """

    def __init__(self, device: torch.device, source: Sampler = sampler) -> None:
        self._gpu = gpu_of(device)
        self._sampler = source
        self._watts: float | None = None
        self.missing = self._search()
        """Why there are no readings; None if there are."""

    def _search(self) -> Reading | None:
        until = time.monotonic() + SEARCH_S
        while True:
            track = self._track(time.perf_counter_ns())
            if isinstance(track, Track):
                return None
            if track is not SEARCHING or time.monotonic() > until:
                return track
            time.sleep(0.01)

    def _track(self, start_ns: int) -> Track | Reading:
        self._sampler.touch(self._gpu)
        return self._sampler.window(start_ns, self._gpu).energy

    def idle(self) -> Reading:
        """Return watts at idle, over `IDLE_S`."""
        if self.missing is not None:
            return self.missing
        started = time.perf_counter_ns()
        time.sleep(IDLE_S)
        ended = time.perf_counter_ns()
        grown = self._grown(started, ended)
        if grown.value is None:
            return grown
        return Reading(grown.value / (ended - started) * 1e9, grown.status, grown.note)

    def repeat(self, run: Callable[[], object], what: str) -> Reading:
        """Return joules of one ``run``, over as many as the sensors need. The first call sets the power for `share`."""
        if self.missing is not None:
            return self.missing
        track = self._track(time.perf_counter_ns())
        period = track.period_ns / 1e9 if isinstance(track, Track) else 0.0
        count, started, ended = 0, time.perf_counter_ns(), 0
        while ended - started < max(LEAST_S, LEAST_PERIODS * period) * 1e9:
            run()
            count, ended = count + 1, time.perf_counter_ns()
        grown = self._grown(started, ended)
        if grown.value is None:
            return grown
        if self._watts is None:
            self._watts = grown.value / (ended - started) * 1e9
        return Reading(grown.value / count, grown.status, f"{grown.note}; over {count} {what}")

    def share(self, ns: float) -> Reading:
        """Return joules of ``ns`` nanoseconds of work at the mean power of the first repeated run."""
        if self.missing is not None:
            return self.missing
        if self._watts is None:
            return Reading.unavailable("no mean power was measured")
        return Reading.estimated(self._watts * ns / 1e9, f"its time at {self._watts:.3g} W mean power")

    def _grown(self, start: int, stop: int) -> Reading:
        """Return joules between two times, read once a sample after ``stop`` has arrived, or is overdue."""
        until = time.monotonic() + SEARCH_S
        while True:
            track = self._track(start)
            if isinstance(track, Reading):
                return track
            if (track.times and track.times[-1] >= stop) or time.monotonic() > until:
                return track.growth(start, stop)
            time.sleep(track.period_ns / 4e9)


def mean_reading(readings: Sequence[Reading]) -> Reading:
    """Return the mean of readings of the same quantity; measured if all of them are, unavailable if none has a
    value.
    """
    values = [reading.value for reading in readings if reading.value is not None]
    if not values:
        return readings[-1]
    note = next(reading.note for reading in reversed(readings) if reading.value is not None)
    value = sum(values) / len(values)
    if any(reading.status != "measured" for reading in readings):
        return Reading.estimated(value, note)
    return Reading.measured(value, note)


# Whole forwards with layer metrics: per layer median and quartiles, and the time outside of layers.


@dataclass(frozen=True)
class WholeLayer:
    """One layer over all repetitions."""

    inference: Quartiles
    cpu: Quartiles | None
    energy: Reading
    mean_power: Reading


@dataclass(frozen=True)
class WholeTimes:
    """Times of whole forwards, from placing the inputs to the output. ``outside``: total less the layers, of each
    forward; on the edge it includes collecting metrics, which a forward with metrics does before it returns.
    """

    total: Quartiles
    bare: Quartiles
    outside: Quartiles
    layers: tuple[WholeLayer, ...]

    def until(self, layer_id: int) -> float:
        """Return the sum of the median times of the layers up to one, in nanoseconds; 0 for the cut "input"."""
        return sum(layer.inference.median for layer in self.layers[: layer_id + 1])


class WholeForwards:
    """Runs whole forwards one by one, with or without metrics. ``names``: the plan's layers; forwards with others are
    dropped.

    ``collects``: collecting metrics counts, if the model's own setting enables them.
    """

    def __init__(self, wrapped: WrappedModel, inputs: Inputs, names: Sequence[str], *, collects: bool = False) -> None:
        self._wrapped = wrapped
        self._inputs = inputs
        self._names = list(names)
        self._collects = collects
        self._forwards: list[tuple[int, list[LayerMetrics]]] = []
        self._bare: list[int] = []

    def run_bare(self) -> None:
        """Run one forward as a request does. Raises what the model raises."""
        args, kwargs = self._inputs.fresh()
        started = time.perf_counter_ns()
        args, kwargs = self._inputs.place(args, kwargs)
        self._wrapped.forward(*args, **kwargs)
        wait_for(self._inputs.device)
        if self._collects:
            collect(self._wrapped)
        self._bare.append(time.perf_counter_ns() - started)

    def run(self) -> None:
        """Run one forward with layer metrics, whatever the model's own setting is. Raises what the model raises."""
        wrapped = self._wrapped
        before = wrapped.metrics_enabled
        wrapped.metrics_enabled = True
        args, kwargs = self._inputs.fresh()
        try:
            started = time.perf_counter_ns()
            args, kwargs = self._inputs.place(args, kwargs)
            wrapped.forward(*args, **kwargs)
            wait_for(self._inputs.device)
            if self._collects and before:
                collect(wrapped)
            total = time.perf_counter_ns() - started
            layers = wrapped.get_layer_metrics()
        finally:
            wrapped.metrics_enabled = before
        if [layer.name for layer in layers] == self._names:
            self._forwards.append((total, layers))

    def take(self) -> WholeTimes:
        """Return the times of the forwards since the last call.

        Raises CutRefused for a model that never took the planned path.
        """
        forwards, self._forwards = self._forwards, []
        bare, self._bare = self._bare, []
        if not forwards:
            raise CutRefused("the model takes another path through its layers each time it runs on the same input")
        forwards.sort(key=lambda forward: forward[0])
        totals = [total for total, _ in forwards]
        columns = list(zip(*(layers for _, layers in forwards), strict=True))
        return WholeTimes(
            _of(totals),
            Quartiles.of(bare or totals),
            _of([total - sum(layer.inference_ns for layer in layers) for total, layers in forwards]),
            tuple(_layer(column) for column in columns),
        )


def _of(values: Sequence[float]) -> Quartiles:
    """Return quartiles of forwards in the order of their totals. The middle half is that of the forwards, so the
    middles of the layers and of the outside add up to the whole's.
    """
    return replace(Quartiles.of(values), middle=fmean(middle_half(values)))


def _layer(column: Sequence[LayerMetrics]) -> WholeLayer:
    cpu = [layer.cpu_ns for layer in column if layer.cpu_ns is not None]
    return WholeLayer(
        _of([layer.inference_ns for layer in column]),
        Quartiles.of(cpu) if len(cpu) == len(column) else None,
        mean_reading([layer.energy for layer in column]),
        mean_reading([layer.mean_power for layer in column]),
    )
