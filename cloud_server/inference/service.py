"""What is served over the Open Inference Protocol, and how a request is answered, for gRPC and HTTP alike."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from cloud_server.access import Caller, granted
from cloud_server.core import Core
from cloud_server.fleet import Fleet
from cloud_server.inference.sending import (
    NAMES,
    WEIGHTS,
    InferenceResult,
    NamedElements,
    Query,
    Sending,
    Value,
    described,
    fits,
    sending,
)
from cloud_server.models import Engine, newest_first, version_of
from cloud_server.streams import InFrame
from protos.frames import ChunkFrame, HeadedReply, HeadedRequest
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel
from shared_hooks.crossing import leaves
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    InputMismatch,
    IsthmusError,
    ModelFailed,
    ServerUnavailable,
    TooLarge,
    UnknownModel,
    by_name,
    near,
)
from shared_hooks.lifecycle import Event
from shared_hooks.sharing import Holding, Owner, Shares, evictions
from shared_hooks.tensors import dtype_named
from shared_hooks.version import __version__

# Memory of messages that arrive and leave in one piece: bodies of HTTP requests, and answers until they are fetched.
#
# The native protocol moves both in chunks, which are counted where they are kept. Here a whole message lies in the
# transport's memory while a slow client sends or fetches it. Beyond the bound, requests of the account that holds the
# most are evicted (`sharing`).


class Hold:
    """The memory that one call holds, until the end of the block. ``leave`` ends the call from any thread, without
    blocking.
    """

    def __init__(self, held: HeldBytes, owner: Owner, leave: Callable[[], object]) -> None:
        self.owner = owner
        self.leave = leave
        self.nbytes = 0
        self.since = time.monotonic()
        self._held = held

    def more(self, nbytes: int) -> None:
        """Hold more memory. Raises TooLarge, or ServerUnavailable without room."""
        self._held.take(self, nbytes)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the memory."""
        self._held.give_back(self)


class HeldBytes:
    """At most ``limit`` bytes held by all calls. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._shares = Shares(limit)
        self._holds: dict[Hold, None] = {}

    def hold(self, owner: Owner, leave: Callable[[], object]) -> Hold:
        """Return a `Hold` that holds nothing yet."""
        return Hold(self, owner, leave)

    @property
    def nbytes(self) -> int:
        return self._shares.total

    def take(self, hold: Hold, nbytes: int) -> None:
        limit = int(self._shares.limit)
        if nbytes > limit:
            raise TooLarge(f"{nbytes} bytes in one message; at most {limit} are taken (max_inference_bytes)")
        gone: list[Hold] = []
        with self._lock:
            if not self._shares.has_room(nbytes):
                others = [Holding(one, one.owner, one.nbytes, (one.since,)) for one in self._holds if one is not hold]
                found = evictions(self._shares, hold.owner, nbytes, others)
                if found is None:
                    raise ServerUnavailable(
                        f"messages of {self._shares.total} bytes arrive or wait to be fetched; max_inference_bytes is "
                        f"{limit}: try again later"
                    )
                gone = found
                for one in gone:
                    self._forget(one)
            self._shares.add(hold.owner, nbytes)
            hold.nbytes += nbytes
            self._holds[hold] = None
        for one in gone:
            one.leave()

    def give_back(self, hold: Hold) -> None:
        with self._lock:
            self._forget(hold)

    def _forget(self, hold: Hold) -> None:
        if hold in self._holds:
            del self._holds[hold]
            self._shares.remove(hold.owner, hold.nbytes)
            hold.nbytes = 0


# One request of the Open Inference Protocol, as a stream of its own in this process.
#
# It has one of the server's places (`max_clients`), waits for its account's turn before its message is read, and is
# then a request like any other: it uses the native protocol's frames, without the wire.

T = TypeVar("T")

MOST_MS = 2**32 - 1
INLINE_BYTES = 64 << 10
_SECRET = secrets.token_hex(8)
_ids = itertools.count(1)


class InferenceCall:
    """One request of ``caller``, as a context manager: entered for a place, left when its answer was fetched.

    ``on_drop`` ends the transport's call, from any thread, without blocking. Raises ServerUnavailable without a place.
    """

    def __init__(self, core: Core, caller: Caller, on_drop: Callable[[], object]) -> None:
        self.caller = caller
        self._core = core
        self._session = core.open(caller, brief=True)
        self._session.on_drop = on_drop
        self._id = next(_ids)
        # one connection is one client, as in the native protocol, under a name that other clients of its account
        # cannot guess
        self._client = f"inference {caller.peer} {_SECRET}"
        self._frames = self._session.frames()
        self._answered = False

    def __enter__(self) -> InferenceCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        key = (*self.owner, self._id)
        if self._answered and kind is None:
            self._session.finish()
            for _ in self._frames:  # so that hooks see that the answer was sent
                pass
        self._core.requests.cancel(key)
        self._core.requests.forget([key])
        self._session.disconnect()

    @property
    def owner(self) -> Owner:
        """The account and client that memory held for it is charged to."""
        return Owner(self.caller.account, self._client)

    def refuse(self, error: IsthmusError) -> None:
        """End it with an error. Thread-safe."""
        self._session.end(error)

    def gone(self) -> None:
        """The client left. Thread-safe; does not block."""
        self._session.gone()

    def read(self, reading: Callable[[], T]) -> T:
        """Parse a message in its account's turn, and charge the account for it (`streams.probe.Pace`)."""
        self._session.wait_turn()
        began = time.thread_time()
        try:
            with self._session.turn:
                return reading()
        finally:
            self._session.spent(time.thread_time() - began)

    def answer(self, sending: Sending, deadline_seconds: float | None) -> tuple[split_pb2.ReplyHeader, memoryview]:
        """Return the reply and its payload. Raises the request's error."""
        began = time.thread_time()
        self._send(sending, deadline_seconds)
        self._session.spent(time.thread_time() - began)
        return self._receive()

    def _send(self, sending: Sending, deadline_seconds: float | None) -> None:
        hello = split_pb2.Hello()
        hello.CopyFrom(sending.hello)
        hello.client_id, hello.heartbeat_ms = self._client, 0
        hello.inline_bytes, hello.message_bytes = INLINE_BYTES, self._core.limits.max_message_bytes
        self._take(split_pb2.ClientFrame(hello=hello))
        upload = split_pb2.CutUpload(digest=sending.cut_digest, data=sending.cut)
        self._take(split_pb2.ClientFrame(cut=upload))
        milliseconds = 0 if deadline_seconds is None else min(MOST_MS, max(1, int(1000 * deadline_seconds)))
        header = split_pb2.RequestHeader(
            id=self._id,
            cut_digest=sending.cut_digest,
            header=sending.header,
            payload_bytes=sending.nbytes,
            deadline_ms=milliseconds,
        )
        self._take(HeadedRequest(header, tuple(buffer.cast("B") for buffer in sending.buffers if buffer.nbytes)))

    def _take(self, frame: InFrame) -> None:
        """Pass a frame to the stream. An error of the stream ends it, and is raised on receiving."""
        self._session.receive(frame)

    def _receive(self) -> tuple[split_pb2.ReplyHeader, memoryview]:
        reply: split_pb2.ReplyHeader | None = None
        pieces: list[memoryview] = []
        missing = 0
        for frame in self._frames:
            if isinstance(frame, HeadedReply):
                reply = frame.header
                missing += reply.payload_bytes
            if isinstance(frame, HeadedReply | ChunkFrame):
                pieces += frame.pieces
                missing -= frame.nbytes
            elif frame.HasField("failed"):
                raise _error(frame.failed)
            elif frame.HasField("reply"):
                reply = frame.reply
                missing = 0 if reply.payload else reply.payload_bytes
            if reply is not None and missing <= 0:
                self._answered = True
                payload = reply.payload if reply.payload else b"".join(pieces)
                return reply, memoryview(payload)
        raise Cancelled("the caller left")


def _error(failed: split_pb2.RequestFailed) -> IsthmusError:
    """Return a failure as an error of this side, without its cause."""
    kind = by_name(failed.error)
    error = kind(failed.message)
    if failed.retry_after_ms:
        error.retry_after_seconds = failed.retry_after_ms / 1e3
    elif failed.retry and not isinstance(error, ServerUnavailable):
        error.retry_after_seconds = 1.0
    return error


NAME = "isthmus"
PLATFORM = "pytorch"
EXTENSIONS = ("model_repository", "model_configuration", "statistics", "binary_tensor_data", "isthmus_tail")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description. ``shape``: -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


PARTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
"""The durations in Triton's statistics, by its names."""


class _Statistics:
    """A hook that counts each model's requests since the server started, over all protocols."""

    name = "statistics"
    built_in = True
    priority = "LOWEST"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, _ModelStatistics] = {}

    def after_request(self, event: Event) -> None:
        """Count a request that was answered, failed or cancelled."""
        reply: split_pb2.ReplyHeader | None = event.reply
        took = time.perf_counter_ns() - event.began_ns
        assert event.request is not None
        with self._lock:
            known = self._models.setdefault(event.request.model_id, _ModelStatistics())
            if event.error is not None or reply is None:
                known.add(fail=took)
                return
            one = reply.durations
            before = one.decode_ns + one.inject_ns
            known.add(
                success=took,
                queue=one.queue_ns,
                compute_input=before,
                compute_infer=one.compute_ns,
                compute_output=one.encode_ns,
            )
            known.last_ms = time.time_ns() // 10**6
            known.executions += 1 / max(1, reply.batch_size)

    def of(self, model: str) -> dict[str, Any]:
        """Return the counts in Triton's form."""
        with self._lock:
            known = self._models.get(model, _ModelStatistics())
            parts = {name: {"count": known.counts[name], "ns": known.ns[name]} for name in PARTS}
            return {
                "name": model.partition(":")[0],
                "version": model.partition(":")[2] or "1",
                "last_inference": known.last_ms,
                "inference_count": known.counts["success"],
                "execution_count": round(known.executions),
                "inference_stats": parts,
            }


class _ModelStatistics:
    def __init__(self) -> None:
        self.counts, self.ns = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
        self.last_ms = 0
        self.executions = 0.0

    def add(self, **parts: int) -> None:
        for name, ns in parts.items():
            self.counts[name] += 1
            self.ns[name] += ns


class Inference:
    """The Open Inference Protocol of one core. ``ready``: whether the server accepts requests. Thread-safe."""

    def __init__(self, core: Core, ready: Callable[[], bool]) -> None:
        self.core = core
        self.held = HeldBytes(core.limits.max_inference_bytes)
        self._statistics = _Statistics()
        core.lifecycle.register(self._statistics)
        self._ready = ready

    @property
    def ready(self) -> bool:
        return self._ready() and not self.core.draining

    def server(self) -> dict[str, Any]:
        """Return the server's description."""
        return {"name": NAME, "version": __version__, "extensions": list(EXTENSIONS)}

    def index(self, caller: Caller) -> list[dict[str, str]]:
        """Return the models that ``caller`` may use, including those that are not served now."""
        fleet = self.core.fleet
        states = dict.fromkeys(self.core.engines, ("READY", "")) if fleet is None else fleet.states()
        found = []
        for name in granted(caller.policy.models, states):
            state, reason = states[name] if self.ready else ("UNAVAILABLE", "")
            one = {"name": name.partition(":")[0], "version": name.partition(":")[2] or "1", "state": state}
            found.append(one | ({"reason": reason} if reason else {}))
            served = self.core.engines.get(name)
            tails = {} if served is None else served.identity.form.get("tails", {})
            found += [{**one, "name": f"{one['name']}@{cut}"} for cut, form in tails.items() if "refused" not in form]
        return found

    def statistics(self, caller: Caller, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Triton's statistics of a model, or of all that ``caller`` may use. Raises UnknownModel."""
        known = self.core.engines_for(caller)
        name = self._tail_of(name)[0]  # requests of a tail belong to its model
        if version:
            wanted: Iterable[str] = [self.engine(caller, name, version).identity.model_id]
        elif name:
            self.engine(caller, name)
            wanted = [name] if ":" in name else newest_first(known, name)
        else:
            wanted = known
        return [self._statistics.of(one) for one in wanted]

    def load(self, caller: Caller, name: str) -> None:
        """Load, or reload, a model as in the server's files; returns when it is warm.

        Raises AccessRefused, UnknownModel, ServerUnavailable during another change, and the model's error.
        """
        self._managed(caller, name).load(name)

    def unload(self, caller: Caller, name: str) -> None:
        """Unload a model. Raises AccessRefused, UnknownModel, and ServerUnavailable during another change."""
        self._managed(caller, name).unload(name)

    def _managed(self, caller: Caller, name: str) -> Fleet:
        """Return the fleet, if the caller may manage it. Raises AccessRefused, and UnknownModel for a model that the
        caller may not use.
        """
        if not caller.policy.manage:
            raise AccessRefused(f'identity "{caller.identity}" may not load or unload models here (manage)')
        self.core.check_open()
        if not granted(caller.policy.models, [name]):
            raise UnknownModel(f'no model "{name[:128]}" is served here')
        if self.core.fleet is None:
            raise AccessRefused("the models of this server are always the same")
        return self.core.fleet

    def engine(self, caller: Caller, name: str, version: str = "", weights_hash: str = "") -> Engine:
        """Return a model's engine: without a version the newest, or the one with these weights. Raises UnknownModel."""
        known = self.core.engines_for(caller)
        name, _ = self._tail_of(name)
        newest = version_of(known, name, weights_hash)
        if newest is None:
            raise UnknownModel(f'no model "{name[:128]}" is served here; there is: {", ".join(known) or "none"}')
        if version in ("", newest.identity.version):
            return newest
        engines = {known[one].identity.version: known[one] for one in newest_first(known, name)}
        if version not in engines:
            raise UnknownModel(f'model "{name}" has no version "{version[:40]}"; there is: {", ".join(engines)}')
        return engines[version]

    def describe(self, caller: Caller, name: str, version: str = "") -> ModelInfo:
        """Return a model's description. Raises UnknownModel, and CutRefused for a model without named inputs."""
        identity = self.engine(caller, name, version).identity
        cut = self._tail_of(name)[1]
        form = described(identity, cut)
        known = self.core.engines_for(caller)
        versions = tuple(known[one].identity.version for one in newest_first(known, identity.name))
        shown = identity.name if cut is None else f"{identity.name}@{cut}"
        return ModelInfo(shown, versions, PLATFORM, _infos(form["inputs"]), _infos(form["outputs"]))

    def _tail_of(self, name: str) -> tuple[str, str | None]:
        """Split ``NAME@CUT`` into the model and the cut whose tail is meant; a model's own name may contain an @."""
        base, at, cut = name.partition("@")
        return (name, None) if not at or name in self.core.engines else (base, cut)

    def asking(self, caller: Caller, on_drop: Callable[[], object]) -> InferenceCall:
        """Return a place for one request. Raises ServerUnavailable."""
        return InferenceCall(self.core, caller, on_drop)

    def infer(self, asking: InferenceCall, query: Query, deadline_seconds: float | None = None) -> InferenceResult:
        """Answer a request. Raises its error."""
        if query.parameters.get("sequence_id"):
            raise InputMismatch("sequences are not served: each request stands alone")
        for wanted in (query.outputs, [one.name for one in query.inputs]):
            if len(set(wanted)) < len(wanted):  # an answer has each output once, so its size depends on the model alone
                raise InputMismatch("two inputs or two outputs have one name")
        weights = str(query.parameters.get(WEIGHTS, ""))
        identity = self.engine(asking.caller, query.model, query.version, weights).identity
        cut = self._tail_of(query.model)[1]
        limit = asking.caller.max_request_bytes(self.core.limits)
        made = asking.read(lambda: sending(query, identity, limit, cut))
        try:
            reply, payload = asking.answer(made, _shorter(deadline_seconds, query.parameters.get("timeout")))
        except ModelFailed as error:
            if cut is not None or fits(query, identity):
                raise
            raise InputMismatch(f"the model does not take these shapes: {error}") from error
        version = self.engine(asking.caller, made.hello.model_id, "", made.hello.weights_hash).identity.version
        result = asking.read(lambda: _result(query, version, reply, payload))
        return result if cut is None else replace(result, parameters={**result.parameters, **_of_tail(reply)})


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Check the parameters of loading and unloading. Raises InputMismatch for one that would change what is loaded."""
    for name, value in parameters.items():
        if name != "unload_dependents" or value:
            raise InputMismatch(f"the parameter {name[:80]!r} is not served: what is loaded is what the files say")


def _infos(entries: list[list[Any]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, NAMES.get(dtype_named(dtype), dtype), tuple(shape)) for name, dtype, shape in entries)


def _shorter(seconds: float | None, microseconds: Value | None) -> float | None:
    """Return the shorter time limit in seconds; ``timeout`` is Triton's parameter."""
    if microseconds is None or microseconds == 0:
        return seconds
    if type(microseconds) is not int or not 0 <= microseconds <= 1000 * MOST_MS:
        raise InputMismatch(
            f"the parameter timeout is a number of microseconds up to {1000 * MOST_MS}, not {str(microseconds)[:40]}"
        )
    return microseconds / 1e6 if seconds is None else min(seconds, microseconds / 1e6)


def _of_tail(reply: split_pb2.ReplyHeader) -> dict[str, Value]:
    """Parameters of a tail's answer: server times, and that it is not verified, because its head ran in another
    runtime.
    """
    took = reply.durations
    return {
        "isthmus_head": "not verified",
        "isthmus_queue_ns": int(took.queue_ns),
        "isthmus_tail_ns": int(took.decode_ns + took.inject_ns + took.compute_ns + took.encode_ns),
    }


def _result(query: Query, version: str, reply: split_pb2.ReplyHeader, payload: memoryview) -> InferenceResult:
    """Return the outputs by name, and what else the model returns as parameters."""
    structure, tensors = Parcel.tensors(reply.header, payload)
    found: dict[str, NamedElements] = {}
    parameters: dict[str, Value] = {}
    for name, node in leaves(structure):
        if node[0] == "t":
            tensor = tensors[node[1]].contiguous()
            datatype = NAMES.get(tensor.dtype)
            if datatype is None:
                raise ModelFailed(f'the output "{name}" is {tensor.dtype}, for which this protocol has no datatype')
            data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]
            found[name] = NamedElements(name, datatype, tuple(tensor.shape), data)
        elif node[0] == "v" and node[1] is not None:
            parameters[name] = node[1]
    if reply.transforms:
        parameters["isthmus_transforms"] = ",".join(reply.transforms)
    wanted = query.outputs or tuple(found)
    for name in wanted:
        if name not in found:
            raise InputMismatch(f'the model has no output "{name[:80]}"; it has {", ".join(found)}{near(name, found)}')
    return InferenceResult(query.model, version, query.id, tuple(found[name] for name in wanted), parameters)
