"""The engine of this process: a torch model with its hooks."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import nn

from cloud_server.config import ModelEntry, WarmUp
from cloud_server.limits import FileLimits, Limits
from cloud_server.models.admission import Form, buffers_kept, check_file, check_frontier, check_step, form_of
from cloud_server.models.batching import BatchedTails
from cloud_server.models.decoding import DecodingTails
from cloud_server.models.engine import (
    FILE,
    Computed,
    EngineSession,
    FileRead,
    Following,
    Identity,
    PartEnd,
    Progress,
    StepBatching,
    WeightsGuard,
    inexact,
    packed,
    room_for,
)
from shared_hooks import Crossing, EarlyOutput, Parcel, Plan, RehearsalLimits, WrappedModel, devices
from shared_hooks.batching import Batches
from shared_hooks.codecs.basis import References, Ring
from shared_hooks.compiling import CompiledTails
from shared_hooks.errors import (
    CutRefused,
    Disagreement,
    IsthmusError,
    ModelFailed,
    PlanMismatch,
    SpecError,
    TooLarge,
    UnknownLayer,
)
from shared_hooks.forward import Allowance, CallKind, interruptible
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.models import ModelSpec
from shared_hooks.models.inputs import IMAGE_SUFFIXES, Inputs, to_device
from shared_hooks.modules import INPUT
from shared_hooks.modules.manifest import Manifest
from shared_hooks.observers import named, transforms
from shared_hooks.planning import OnlyPart
from shared_hooks.profiling.machine import describe, kind
from shared_hooks.profiling.profile import to_json
from shared_hooks.profiling.profiler import ProfileOptions, profile_cloud
from shared_hooks.sharing import Owner, SharedCache
from shared_hooks.state import PythonState
from shared_hooks.tail import Substitutes, payer
from shared_hooks.tensors import View, flatten, held, tensors_in, unflatten
from shared_hooks.tensors.staging import wait

# Tails that run before a model serves: recipes are built, kernels chosen and memory touched, outside of any request.
#
# Each is the tail of the spec's example, from a head that runs here, too. What the model writes to its own memory
# meanwhile is restored, and hooks are not called, for no request is served.


def warm_up(wrapped: WrappedModel, plan: Plan, example: Inputs, wanted: WarmUp, origin: str) -> list[EarlyOutput]:
    """Run the tails that ``wanted`` names, on ``plan``'s ``example`` and in its batch sizes; returns their heads'
    outputs.

    If none is named, the tail of the last cut runs. Raises SpecError, beginning with ``origin``, for an impossible cut
    or size.
    """
    lifecycle, state = wrapped.lifecycle, PythonState(wrapped.model)
    wrapped.lifecycle = Lifecycle("cloud")
    heads: list[EarlyOutput] = []
    try:
        with buffers_kept(wrapped.model), devices.forked():
            for size in wanted.batch_sizes or (0,):
                for cut in wanted.cuts or _last(plan):
                    args, kwargs = sized(example, size)  # a model may write to its inputs
                    early = wrapped.head(cut, *args, **kwargs)
                    wrapped.tail(early)
                    heads.append(early)
    except Exception as error:  # a model may raise anything for a size that it does not accept
        if wanted == WarmUp() and isinstance(error, IsthmusError):
            return heads  # no request is affected; a client that cuts there gets the same error
        why = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
        raise SpecError(f"{origin}: warm_up: {why}") from error
    finally:
        state.restore()
        wrapped.lifecycle = lifecycle
    return heads


def _last(plan: Plan) -> Iterator[str]:
    """Yield the last cut before which no value is read from data, since such a path may be specific to this input."""
    for one in reversed(plan.cuts):
        if one.can_split:
            if not plan.cutting(one.name)[1].reads:
                yield one.name
            return


def sized(example: Inputs, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a copy of the example with ``size`` rows (0: unchanged): every tensor with as many rows as the first is
    repeated or truncated.
    """
    structure, tensors = flatten(example)
    rows = next((one.shape[0] for one in tensors if one.dim()), 0)
    args, kwargs = unflatten(structure, [_rows(one, rows, size) for one in tensors])
    return args, kwargs


def _rows(tensor: torch.Tensor, known: int, wanted: int) -> torch.Tensor:
    if not wanted or not known or not tensor.dim() or tensor.shape[0] != known:
        return tensor.clone()
    return tensor.repeat(-(-wanted // known), *[1] * (tensor.dim() - 1))[:wanted].clone()


# `KeptFrames`: the symbols of frames that clients refer to (codec "frames"), kept per client, within a bound.

MOST_ELEMENTS = 1 << 28
"""Most elements of the inputs that a part between two cuts is planned on, if the model has no example."""
MOST = 65_536
"""Most tensors of cuts, of all clients together."""

SHARE = 8

Key = tuple[Owner, str, int]


class KeptFrames:
    """Clients' last frames, bounded by ``most_bytes``. Thread-safe.

    Beyond the bound the client that holds the most loses what it has not used for longest. One tensor's frames take at
    most a `SHARE` of it. The newest is never evicted, however large it is.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_of_one = most_bytes // SHARE
        self._kept: SharedCache[Key, Ring] = SharedCache(MOST, most_bytes)
        self._lock = threading.Lock()

    def of(self, owner: Owner, cut_digest: str) -> Callable[[int], References]:
        """Return the kept frames of one client and cut, by the number of the piece."""
        return lambda piece: _Piece(self, (owner, cut_digest, piece))

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def get(self, key: Key, number: int) -> torch.Tensor | None:
        with self._lock:
            ring = self._kept.get(key, key[0])
            return None if ring is None else ring.get(number)

    def put(self, key: Key, number: int, symbols: torch.Tensor, reference: int) -> None:
        with self._lock:
            ring = self._kept.get(key, key[0]) or Ring(self._most_of_one)
            ring.put(number, symbols, reference)
            self._kept.put(key, ring, ring.nbytes, key[0])


@dataclass(frozen=True, slots=True)
class _Piece:
    """The `References` of one piece."""

    frames: KeptFrames
    key: Key
    number: int = 0

    def get(self, number: int) -> torch.Tensor | None:
        return self.frames.get(self.key, number)

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        self.frames.put(self.key, number, symbols, reference)

    def latest(self) -> int:
        return 0


# A model's plan, memory and machine, for clients that ask for them.


def check_plan(plan: Plan, crossing: Crossing, *, branches: bool) -> None:
    """Check that a request's cut is what this side would make of it, on inputs like the plan's.

    ``branches``: data may decide on the path. Raises Disagreement, and CutRefused if this side would not cut there.
    """
    if crossing.plan_digest != plan.digest:
        if branches:
            return  # another path through the model, chosen by this input's data: its layers differ
        raise Disagreement(
            "plan: on inputs of these shapes the client's model ran other operations or layers than this side's, "
            "and it does not branch on data: the code differs"
        )
    try:
        cut = plan.place_at(crossing.layer_id, crossing.layer_name)
    except UnknownLayer as error:
        raise Disagreement(f"the request's cut: {error}") from error
    name = crossing.name
    if crossing.later:
        try:
            mine = plan.cutting(list(crossing.calls))[1]
        except UnknownLayer as error:
            raise Disagreement(f"the request's cut: {error}") from error
        more = crossing.payload_bytes - mine.payload_bytes
        if mine.later != crossing.later or more < 0 or (more > 0 and not branches):
            raise Disagreement(f"after {name} other operations are left to this side by the request than by its plan")
        return
    if cut < 0 and name != "input":
        raise Disagreement(f'the request is cut before the first layer, and calls that "{name:.80}"')
    plan.cutting(cut)  # raises CutRefused for a cut that this side refuses
    here = plan.frontier_bytes(cut)
    # A client that knows more paths through the model than this plan also sends what those read, but never less;
    # before the first layer, a client that does not know the model sends all inputs.
    may_be_more = branches or cut < 0
    if crossing.payload_bytes < here or (crossing.payload_bytes > here and not may_be_more):
        raise Disagreement(
            f"after {name} {here} bytes cross by this side's plan, {crossing.payload_bytes} by the request"
        )


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of its parameters and buffers; shared storage counts once."""
    weights = map(held, (*model.parameters(), *model.buffers()))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in weights}
    return sum(one.nbytes() for one in storages.values())


Made = TypeVar("Made")


class Shards(Protocol):
    """The processes among which weights are divided (`torch.distributed`), including this one."""

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def once(self, make: Callable[[], Made]) -> Made:
        """Call ``make`` in the first process; returns its result in all of them."""
        ...


class _Whole:
    """The whole model as clients have it, while only a share of its weights is served."""

    def __init__(self, spec: ModelSpec) -> None:
        """The weights stay in their files, or are loaded temporarily if the model changes them on loading."""
        try:
            model, weights = spec.load_mapped()
        except SpecError:
            model, weights = spec.load_model(), None
        wrapped = WrappedModel(model)
        self._hash, self._digest = wrapped.weights_hash(), wrapped.structure_digest()
        self._environment, self.facts = wrapped.environment(), wrapped.manifest(None)
        if weights is not None:
            weights.release()

    def weights_hash(self) -> str:
        return self._hash

    def structure_digest(self) -> str:
        return self._digest

    def environment(self) -> dict[str, str]:
        return self._environment


def _cannot_reload() -> NoReturn:
    """End this process, and so all processes with shares of the model: one alone cannot reload its share."""
    raise SystemExit("a model that is divided among processes had changed in memory")


def about(device: torch.device) -> dict[str, str]:
    """Versions, device and kind of machine, for messages, logs, and clients that compare answers."""
    where = platform.machine() if devices.is_host(device) else devices.name_of(device)
    return {"python": platform.python_version(), "device": f"{device} ({where})", **kind(device)}


def _part_of(entry: ModelEntry, device: torch.device) -> OnlyPart | None:
    """Return the part to load, if only a part of the weights is to be loaded. Raises SpecError."""
    if not entry.only and entry.share is None:
        return None
    if entry.spec.example() is None:
        where = f"{entry.spec.origin}: {'parts' if entry.share else 'only'}"
        raise SpecError(f"{where}: needs an example input in the spec, to find the weights that a part reads")
    first, last, *_ = *entry.only, None, None
    return OnlyPart(*entry.spec.load_mapped(), first, last, device=device, share=entry.share)


class ServedModel:
    """An `engine.ComposeProject`: builds the model of an entry, plans its example, runs its tails."""

    def __init__(
        self,
        entry: ModelEntry,
        device: torch.device,
        lifecycle: Lifecycle | None = None,
        rehearsals: RehearsalLimits | None = None,
        files: FileLimits | None = None,
        frames_bytes: int = Limits.max_frames_bytes,
        *,
        shards: Shards | None = None,
    ) -> None:
        """``shards``: the processes among which the weights are divided; each constructs this object at the same time.
        ``rehearsals`` limits the preparation of tails for clients' cuts, ``files`` input files, ``frames_bytes`` the
        memory for clients' last frames.

        Raises SpecError if the model cannot be built, and ModelFailed if it cannot run its own example.
        """
        self._files = files or FileLimits()
        self._frames = KeptFrames(frames_bytes)
        self._example_elements = 0
        self._lifecycle = Lifecycle("cloud") if lifecycle is None else lifecycle
        self._lifecycle.emit(Stage.BEFORE_MODEL_LOAD, model_id=entry.spec.model_id)
        self.device = self._device = device
        self._spec = entry.spec
        self.only = _part_of(entry, device)
        """The part whose weights are in memory; None: all are."""
        self._shards = shards
        if shards is not None:
            model = entry.spec.load_shard(shards.size)
        else:
            model = entry.spec.load_model(device) if self.only is None else self.only.model
        self._wrapped = WrappedModel(
            model, lifecycle=self._lifecycle, rehearsals=rehearsals, isolated=True, loads=self.only
        )
        self._form: Form = {}
        self._heads: list[EarlyOutput] = []
        self._plan = self._plan_example(entry) if shards is None else None
        # Only a model that reads values from its data can take more than one path.
        self._branches = self._plan is not None and any(op.kind is CallKind.VALUE for op in self._plan.trace.ops)
        described = self._wrapped if shards is None else shards.once(partial(_Whole, entry.spec))
        self.identity = Identity(
            model_id=entry.spec.model_id,
            weights_hash=described.weights_hash(),
            structure_digest=described.structure_digest(),
            plan_digest=self._plan.digest if self._plan else "",
            environment=described.environment(),
            about=about(device),
            layers=len(self._plan.layers) if self._plan else 0,
            cuts=len(self._plan.cuts) if self._plan else 0,
            preprocess_digest=entry.spec.preprocess_digest(),
            machine=describe(device),
            form=self._form,
            packages=tuple(sorted({type(one).__module__.partition(".")[0] for one in model.modules()})),
            part=() if self.only is None else self.only.names,
        )
        self.nbytes = bytes_of(model) if self.only is None else self.only.weights.loaded
        """The bytes of its parameters and buffers in memory."""
        only, spec = self.only, entry.spec
        load = partial(spec.load_model, device) if only is None else lambda: only.again(*spec.load_mapped())
        if isinstance(described, _Whole):
            load, self._manifest = _cannot_reload, described.facts
        self._guard = WeightsGuard(self.identity, model, load, self._wrapped.renew, mapped=only is not None)
        most = self._most = (rehearsals or RehearsalLimits()).held_bytes
        self._decoding = DecodingTails(self._wrapped, device, self._guard, entry.decoding, most, self._bringing)
        self.compiled: CompiledTails | None = None
        """Tails compiled by torch.compile; None if that was not requested."""
        if entry.compile:
            self.compiled = CompiledTails(self._wrapped, rounding=entry.compile == "rounding")
            for early in self._heads:
                self.compiled.add(early)
        self._heads = []
        batches = Batches(self._wrapped, partial(entry.spec.example, device))
        self.batching = BatchedTails(
            batches, device, self._guard, self._lifecycle, self._unpacked, self._part, self._reading
        )
        if self.only is not None:
            self.only.release()
        self._lifecycle.emit(
            Stage.AFTER_MODEL_LOAD, model_id=entry.spec.model_id, wrapped=self._wrapped, identity=self.identity
        )

    @cached_property
    def _manifest(self) -> Manifest:
        return self._wrapped.manifest(self._plan)

    def manifest(self) -> Manifest:
        """Return the facts behind the digests, as of loading."""
        return self._manifest

    def _plan_example(self, entry: ModelEntry) -> Plan | None:
        example = entry.spec.example(self._device)
        if example is None:
            if entry.warm_up != WarmUp() or entry.compile or entry.tails:
                wanted = "compile" if entry.compile else "tails" if entry.tails else "warm_up"
                raise SpecError(f"{entry.spec.origin}: {entry.spec.model_id}: {wanted}: its spec has no example to run")
            return None
        args, kwargs = example
        self._example_elements = sum(tensor.numel() for tensor in tensors_in(example))
        try:
            plan = self._wrapped.plan(*args, **kwargs)
            self._form = form_of(plan, self._wrapped, args, kwargs, entry.tails)
            where = f"{entry.spec.origin}: {entry.spec.model_id}"
            with self._reading():
                self._heads = warm_up(self._wrapped, plan, example, entry.warm_up, where)
            return plan
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(
                f"{entry.spec.origin}: the model fails on its example: {type(error).__name__}: {error}"
            ) from error

    residence = None
    """None: its weights are in memory as long as it exists."""

    def close(self, why: str) -> None:
        """Drop its decoding sessions with the reason ``why``, and remove its hooks."""
        self._decoding.close(why)
        if self.compiled is not None:
            self.compiled.close()
        self.batching.batches.close()
        self._wrapped.detach()

    @property
    def step_batching(self) -> StepBatching:
        """Computes steps of its sessions together."""
        return self._decoding

    def allocate(self, nbytes: int) -> memoryview:
        """Return one buffer, whose pages are allocated as bytes arrive."""
        return room_for(nbytes, self._device)

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Check that header, cut and plan agree on the payload. Raises BadFrame, TooLarge or Disagreement."""
        check_frontier(crossing, header, payload_bytes, max_bytes)
        self.check_cut(crossing)

    def check_cut(self, crossing: Crossing) -> None:
        """Raise Disagreement if a client's cut is not what this side has planned for inputs like the example.

        No rehearsal is needed for that.
        """
        if self._plan is not None and crossing.signature == self._plan.signature:
            check_plan(self._plan, crossing, branches=self._branches)

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        """Run the tail on one payload, in whose memory it may work; with ``end``, up to that later cut.

        Raises ModelFailed with the model's error as cause.
        """
        substitutes = None if end else self._substitutes(crossing, header, payload, want_metrics)
        return self._part(*self._unpacked(crossing, header, payload, end), want_metrics, end, substitutes)

    def _check_part(self, begin: str, end: PartEnd | Following | None) -> None:
        """Raise CutRefused if the weights of a part are not loaded here."""
        if self._shards is not None:
            raise CutRefused(
                f'model "{self.identity.model_id}" is divided among {self._shards.size} processes '
                "(--tensor-parallel): it continues generations (generate, chat, serve), and computes no other requests"
            )
        if self.only is not None:
            self.only.check(begin, None if end is None else end.cut)

    def _substitutes(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool
    ) -> Substitutes | None:
        """Compiled modules for this request's tail, if it accepts other last bits. Nothing is measured inside them."""
        if self.compiled is None or want_metrics or not inexact.get():
            return None
        if self._guard.mended:
            self.compiled.give_up("the model had changed in memory")
        return self.compiled.of(crossing, header, payload)

    def _unpacked(
        self, crossing: Crossing, header: bytes, payload: memoryview, end: PartEnd | None = None
    ) -> tuple[EarlyOutput, int]:
        """Return the frontier, and the nanoseconds that unpacking took."""
        if end is not None:
            self._check_inputs(crossing)
        self._check_part(crossing.name if crossing.layer_id >= 0 else INPUT, end)
        self.check_cut(crossing)  # it may have been admitted while the model was not loaded
        self._lifecycle.emit(Stage.BEFORE_DECODE, nbytes=payload.nbytes)
        started = time.perf_counter_ns()
        bound = crossing.bound_to(self._frames.of(payer.get(), crossing.digest)) if crossing.books else None
        most = payload.nbytes + crossing.payload_bytes
        early = EarlyOutput.unpack(crossing, header, payload, most, disposable=True, bound=bound)
        self._lifecycle.emit(Stage.AFTER_DECODE, value=early)
        return early, time.perf_counter_ns() - started

    def _part(
        self,
        early: EarlyOutput,
        decode_ns: int,
        want_metrics: bool,
        end: PartEnd | None,
        substitutes: Substitutes | None = None,
    ) -> Computed:
        if end is None:
            run = partial(self._wrapped.tail, early, substitutes=substitutes)
        else:
            run = partial(self._wrapped.forward, early, start=early.layer_id, end=end.cut)
        return self._run(run, decode_ns, want_metrics, end, compiled=substitutes is not None)

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        """Check that both sides read files alike, and that the payload is one file.

        Raises BadFrame, TooLarge, InputMismatch or Disagreement.
        """
        check_file(self.identity, suffix, preprocess_digest, header, payload_bytes, max_bytes)

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        """Decode an image in another process; None for files of tensors, which need no decoding."""
        if suffix.lower() not in IMAGE_SUFFIXES or not self._spec.reads_images:
            return None
        return self._read(suffix, header, payload, max_bytes)

    def _read(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead:
        started = time.perf_counter_ns()
        _, (data,) = Parcel.tensors(header, payload, max_bytes)
        with interruptible():
            args, kwargs = self._spec.preprocess_bytes(suffix, data.numpy().tobytes(), max_bytes, self._files.pixels)
        self._check_elements(args, kwargs)
        return FileRead(args, kwargs, time.perf_counter_ns() - started)

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
        """Run the whole model on an input file, or up to ``end``; reading the file counts as decoding."""
        self._check_part(INPUT, end)
        self._lifecycle.emit(Stage.BEFORE_DECODE, nbytes=payload.nbytes)
        args, kwargs, read_ns = read or self._read(suffix, header, payload, max_bytes)
        started = time.perf_counter_ns()
        args, kwargs = to_device(args, self._device), to_device(kwargs, self._device)
        self._lifecycle.emit(Stage.AFTER_DECODE, value=(args, kwargs))
        # inputs may have any name: one may be called "end"
        run = partial(self._whole if end is None else partial(self._wrapped.head, end.cut), *args, **kwargs)
        decode_ns = read_ns + time.perf_counter_ns() - started
        return self._run(run, decode_ns, want_metrics, end, of_file=True)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole model on a file, from which its Python may read numbers that determine sizes."""
        if self._plan is not None and not self._branches:
            return self._wrapped.whole(*args, **kwargs)
        with Allowance(self._most, "on this file the model takes", alive=True) as allowance:
            output = self._wrapped.whole(*args, **kwargs)
        if allowance.failure is not None:  # the model's own code has caught it
            raise allowance.failure
        return output

    def _check_elements(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TooLarge for inputs much larger than the model's example; without one, their bytes are limited."""
        known, found = self._example_elements, sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
        if not known:
            return
        most = known * self._files.examples
        if found > most:
            raise TooLarge(
                f"the file's tensors have {found} elements, the model's example {known}; "
                f"{self._files.examples} times as many are taken (max_file_examples)"
            )

    def _check_inputs(self, crossing: Crossing) -> None:
        """Raise TooLarge if a middle part would be planned on inputs much larger than the model's example."""
        known = self._example_elements or MOST_ELEMENTS // self._files.examples
        found = sum(View(form.shape, form.stride, 0).end for form in crossing.inputs)
        if found > known * self._files.examples:
            raise TooLarge(
                f"the inputs of this cut have {found} elements; a part between two cuts is planned on at most "
                f"{known * self._files.examples} ({self._files.examples} times the example's: max_file_examples)"
            )

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Check that header and payload agree on the bytes. Raises BadFrame or TooLarge."""
        check_step(header, payload_bytes, max_bytes)

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        """Open a decoding session behind the layer ``cut``. Raises UnknownLayer, and CutRefused with the reason."""
        if self._shards is not None:
            self._check_block(cut)
        else:
            self._check_part(cut, following)
        return self._decoding.open(cut, following)

    def _check_block(self, cut: str) -> None:
        """Raise CutRefused for a cut inside a block, where each process has only a part of what crosses."""
        assert self._shards is not None
        where = f'model "{self.identity.model_id}" is divided among {self._shards.size} processes (--tensor-parallel)'
        above, _, name = cut.rpartition(".")
        if not (name.isdigit() and isinstance(dict(self._wrapped.model.named_modules()).get(above), nn.ModuleList)):
            raise CutRefused(f"{where}: it is cut after whole blocks, such as model.layers.3, and {cut[:256]} is none")

    def _run(
        self,
        run: Callable[[], Any],
        decode_ns: int,
        want_metrics: bool,
        end: PartEnd | None,
        *,
        of_file: bool = False,
        compiled: bool = False,
    ) -> Computed:
        """Call ``run``, measure and pack its result: the output, or with ``end`` what crosses there.

        ``of_file``: the model runs from its beginning.
        """
        try:
            if of_file:
                self._lifecycle.emit(Stage.BEFORE_TAIL, split=FILE)
            self._wrapped.measure(want_metrics)
            with transforms.during(self._wrapped) as changed, self._bringing():
                output = run()
                names = changed()
            returned = time.perf_counter_ns()
            wait(self._device)  # until here the kernels are only launched
        except PlanMismatch:
            self._guard.mend()  # may report that this very request wrote: the client then plans again
            raise
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._wrapped.measure(True)
            self._guard.check()
        computed = time.perf_counter_ns()
        durations = self._wrapped.durations()  # before further hooks, which may run the model
        layers, forward = self._wrapped.last_records()() if want_metrics else (None, None)
        if of_file:
            self._lifecycle.emit(Stage.AFTER_TAIL, split=FILE, output=output)
        return packed(
            self._lifecycle,
            output,
            end,
            decode_ns=decode_ns,
            inject_ns=durations.get("inject", 0),
            compute_ns=(durations.get("compute") or durations.get("whole") or durations.get("head", 0))
            + computed
            - returned,
            layers=layers,
            forward=forward,
            transforms=names,
            compiled=compiled,
        )

    @contextmanager
    def observing(self, observers: tuple[str, ...]) -> Iterator[Callable[[], bytes]]:
        """Observe the tails that this thread runs in the block."""
        with named.observing(self._wrapped, named.check(observers)) as found:
            yield lambda: named.to_bytes(found())

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context around runs of the whole model, which read the weights of other parts and free them
        afterwards.
        """
        return nullcontext() if self.only is None else self.only.reading()

    def _bringing(self) -> AbstractContextManager[object]:
        """Return a context around runs of a part that data may lead to the weights of others."""
        return self.only.bringing() if self.only is not None and self._branches else nullcontext()

    profile_yields = True
    """Between two repetitions this thread is free."""

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Measure the tails of the spec's example (`shared_hooks.profiling`)."""
        if self._shards is not None:
            self._check_part(INPUT, None)
        example = self._spec.example(self._device)
        if example is None:
            raise CutRefused(f'model "{self.identity.model_id}" has no example input to profile: its spec names none')
        options = ProfileOptions(warmup=warmup, repetitions=repetitions, seconds=seconds, codecs=tuple(codecs))
        with self._reading():
            made = profile_cloud(self._wrapped, self.identity.model_id, *example, options, on_progress=on_progress)
        return to_json(made)
