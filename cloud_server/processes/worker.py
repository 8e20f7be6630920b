"""The program of a worker process: it loads every model once, and answers one request after the other.

It reads the same command line and file as the server. Its messages: `worker_process`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cloud_server import wire
from cloud_server.arguments import parser
from cloud_server.config import ModelEntry, ServerConfig, configure
from cloud_server.models import Computed, Following, PartEnd, ServedModel, inexact
from cloud_server.processes import ranks
from cloud_server.processes.channel import MAX_BYTES, Lost, Mapping, Message, ProcessChannel, StepRequest
from cloud_server.processes.worker_process import WorkerShare
from cloud_server.scheduling import Overtime, Watchdog
from shared_hooks import Crossing
from shared_hooks.crossing import Parcel, decode, decoded_bytes
from shared_hooks.errors import (
    Cancelled,
    IsthmusError,
    ModelFailed,
    ServerUnavailable,
    SessionLost,
    SpecError,
    TooLarge,
    by_name,
)
from shared_hooks.generation import StepReply
from shared_hooks.lifecycle import About, Lifecycle
from shared_hooks.lifecycle.log import show
from shared_hooks.models import pick_device, set_threads
from shared_hooks.modules.manifest import encode
from shared_hooks.sharing import Owner, SharedCache
from shared_hooks.tail import paid_by

INLINE_BYTES = 64 << 10
"""Answers up to this size are sent in the message, larger ones in shared memory."""
KEPT_BYTES = 64 << 20
"""If more bytes of payloads than this are referenced after their request, garbage is collected at once."""
MAX_TRACEBACK = 16 << 10
"""Most characters of a traceback in the server's log."""
REFUSED_SECONDS = 60.0
"""How long a process with a share waits after a failure to load: rank 0 reports the reason and ends it."""
SERVER = Owner()
"""The account that cuts are charged to here; the server knows the real one."""
_CUDA_ERROR = "CUDA error"
"""After most of these errors (running out of memory has another name) a process can no longer use its device."""
_PDEATHSIG = 1  # linux/prctl.h


def main(
    words: Sequence[str],
    share: WorkerShare,
    server: int,
    channel_fd: int,
    memory_fd: int,
    memory_bytes: int,
    begun: int,
) -> int:
    """Serve until the process ``server`` hangs up; returns the exit status.

    ``share``: as `WorkerShare`. ``begun``: the place in shared memory for the number of the task in progress.
    """
    _belong_to(server)
    channel = ProcessChannel(socket.socket(fileno=channel_fd))
    mapping = Mapping(memory_fd, memory_bytes)
    os.close(memory_fd)
    shards = None
    try:
        try:
            join = partial(ranks.start, partial(follow, words, share, os.getpid()))
            config, models, shards = _loaded(words, share, join)
        except IsthmusError as error:
            channel.send({"is": "refused", "error": type(error).__name__, "message": wire.message(error)})
            return 1
        if shards is not None:
            shards.ready()
        channel.send({"is": "warm", "identities": [dataclasses.asdict(one.identity) for one in models.values()]})
        WorkerLoop(config, models, channel, mapping, begun, shards).serve()
    except Lost:
        pass  # the server has ended, or dismissed this worker
    if shards is not None:
        shards.close()
    return 0


def follow(words: Sequence[str], share: WorkerShare, leader: int, rank: int, store: Path) -> None:
    """The program of a process with a share of the models of the worker ``leader``."""
    _belong_to(leader)
    try:
        _, models, shards = _loaded(words, share, partial(ranks.Ranks, rank, store))
    except IsthmusError:
        time.sleep(REFUSED_SECONDS)
        raise
    assert shards is not None
    ranks.follow(shards, ranks.RankSessions(models))


def _belong_to(process: int) -> None:
    """End with that process, the parent, and leave signals to the server."""
    die_with(process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Both signals reach every process of a terminal or a unit; draining and reloading are the server's job.
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()


def _loaded(
    words: Sequence[str], share: WorkerShare, join: Callable[[int, torch.device], ranks.Ranks]
) -> tuple[ServerConfig, dict[str, ServedModel], ranks.Ranks | None]:
    """Return the configuration, this worker's models by id, and the processes among which they are divided, or None.

    ``join`` is called with the number of processes and a device. Raises SpecError, and as `ServedModel`.
    """
    gc.freeze()  # imported modules stay: the collection below examines only what loading left
    options = parser().parse_args(words)
    bounds = show(options.log_level, options.log_format)
    config = configure(options)
    bounds.each, bounds.together = config.limits.log_lines_per_account, config.limits.log_lines_per_minute
    share = WorkerShare(*share)
    device = pick_device(share.device or config.device)
    set_threads(config.threads)
    entries = _wanted(config, share)
    shards = join(config.tensor_parallel, device) if config.tensor_parallel > 1 else None
    device = device if shards is None else shards.device
    limits = config.limits.rehearsals(), config.limits.files(), config.limits.max_frames_bytes
    models = [ServedModel(entry, device, config.lifecycle, *limits, shards=shards) for entry in entries]
    gc.collect()
    gc.freeze()  # the model stays loaded: later collections skip it
    return config, {one.identity.model_id: one for one in models}, shards


def _wanted(config: ServerConfig, share: WorkerShare) -> list[ModelEntry]:
    """Return this worker's entries. Raises SpecError for a model that is no longer in the files."""
    names = share.models
    if names is None:
        return list(config.models)
    known = {entry.spec.model_id: entry for entry in config.models}
    if missing := [name for name in names if name not in known]:
        raise SpecError(f'models: "{missing[0]}" is in the server\'s file no more')
    parts = zip(names, share.parts or [None] * len(names), strict=True)
    return [known[name] if part is None else known[name].piece(*part) for name, part in parts]


def die_with(server: int) -> None:
    """End with the server, even during a kernel that nothing interrupts; on systems other than Linux, after a
    request.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server died before prctl took effect
        os._exit(1)


class WorkerLoop:
    """Answers one message after the other."""

    def __init__(
        self,
        config: ServerConfig,
        models: dict[str, ServedModel],
        channel: ProcessChannel,
        mapping: Mapping,
        begun: int,
        shards: ranks.Ranks | None = None,
    ) -> None:
        self._limits = config.limits
        self._lifecycle: Lifecycle = config.lifecycle
        self._models = models
        self._channel = channel
        self._mapping = mapping
        self._overtime = Watchdog(config.limits.max_compute_seconds)
        self._crossings: SharedCache[str, Crossing] = SharedCache(config.limits.max_cuts, config.limits.max_cuts_bytes)
        self._begun = memoryview(mapping.array(begun, 8)).cast("Q")  # type: ignore[arg-type]
        self._sessions = ranks.RankSessions(models) if shards is None else ranks.LedSessions(models, shards)
        self._rests: dict[int, _Rest] = {}
        """The second halves of steps in progress, by session."""
        self._number = 0
        """The number of the task in progress."""
        self._kept: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Payloads that something still references after their request: (start, size)."""

    def serve(self) -> None:
        """Answer messages. Raises Lost when the server hangs up."""
        while True:
            head, parts = self._channel.receive()
            self._number = self._begun[0] = head["number"]
            self._sessions.close(head["closed"])
            for session in head["closed"]:
                if (rest := self._rests.pop(session, None)) is not None:
                    rest.end()
            if head["do"] == "forget":
                continue
            if head["do"] in ("profile", "manifest", "session"):
                self._send_bytes(head)
            else:
                self._answer(head, parts)

    # Requests

    def _answer(self, head: dict[str, Any], parts: list[bytes]) -> None:
        start, nbytes = head["at"], head["bytes"]
        array = self._mapping.array(start, nbytes)
        seen = weakref.ref(array)
        reported, data = self._replied(head, parts[0], memoryview(array), parts[1:])  # type: ignore[arg-type]
        del array
        if nbytes and seen() is not None:
            self._kept[start] = seen, nbytes
        self._send({**reported, "kept": self._still_kept()}, *data)

    def _replied(self, head: dict[str, Any], header: bytes, payload: memoryview, more: Sequence[bytes]) -> Message:
        """Return the answer to a request. When this returns, the request's memory is free, unless the model or a hook
        keeps it.
        """
        try:
            computed = self._tail(head, header, payload, more)
            if isinstance(computed, StepRequest):
                requested = {"is": "next?", "session": computed.session, "step": computed.step, "fork": computed.fork}
                return requested, [computed.header, computed.payload]
            digest, description = computed.cut or ("", b"")
            reported = {
                "is": "reply",
                "session_bytes": computed.session_bytes,
                "is_done": computed.is_done,
                "cut": digest,
            }
            reported["rest"] = computed.rest is not None
            parts = [computed.reply.SerializeToString(), description]
            if computed.nbytes > INLINE_BYTES:
                return {**reported, "places": self._put(computed, payload)}, parts
            return {**reported, "places": []}, [*parts, b"".join(computed.buffers)]
        except IsthmusError as error:
            return _failure(error)

    def _tail(
        self, head: dict[str, Any], header: bytes, payload: memoryview, more: Sequence[bytes]
    ) -> Computed | StepRequest:
        """Run the tail. Raises an IsthmusError, or Lost."""
        model, observers = self._models[head["model"]], tuple(head["observers"])
        inexact.set(head["inexact"])
        try:
            with ExitStack() as stack:
                stack.enter_context(self._lifecycle.request(About(*head["about"])))
                stack.enter_context(self._overtime.limited())
                stack.enter_context(paid_by(head["account"], About(*head["about"]).client))
                if head["do"] == "rest":
                    return self._rest(head, header, more[0] if more else b"")
                found = stack.enter_context(model.observing(observers)) if observers else bytes
                end = None if head["end"] is None else PartEnd(*head["end"])
                if head["do"] == "step":
                    computed = self._step(head["session"], header, payload)
                elif head["do"] == "file":
                    most, wanted = self._limits.max_request_bytes, head["metrics"]
                    computed = model.compute_file(head["suffix"], header, payload, wanted, most, end=end)
                else:
                    computed = model.compute(self._crossing(head["cut"]), header, payload, head["metrics"], end)
                computed.reply.observations = found()
                return computed
        except (IsthmusError, Lost):
            raise
        except Overtime:
            seconds = self._limits.max_compute_seconds
            raise TooLarge(
                f"the model computed for more than {seconds:g} s on this request (max_compute_seconds)"
            ) from None
        except BaseException as error:  # a model may even raise SystemExit
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def _step(self, session: int, header: bytes, payload: memoryview) -> Computed:
        computed = self._sessions.step(session, header, payload)
        if computed.rest is not None:
            self._rests[session] = _Rest(computed.rest)
        return computed

    def _rest(self, head: dict[str, Any], header: bytes, payload: bytes) -> Computed | StepRequest:
        rest = self._rests.pop(head["session"], None)
        if rest is None:
            raise SessionLost("its worker process does not have it")
        found = rest.go() if head["answered"] is None else rest.go((head["answered"], header, payload))
        if isinstance(found, StepRequest):
            self._rests[head["session"]] = rest
        return found

    def _put(self, computed: Computed, payload: memoryview) -> list[list[int]]:
        """Return where the parts of an answer lie: what the tail made in place stays there, the rest is copied once."""
        first = self._mapping.offset(payload)
        places = [[self._mapping.offset(buffer), buffer.nbytes] for buffer in computed.buffers]
        inside = [first <= at and at + nbytes <= first + payload.nbytes for at, nbytes in places]
        missing = sum(nbytes for (_, nbytes), is_there in zip(places, inside, strict=True) if not is_there)
        if missing:
            at = self._room(missing)
            target = memoryview(self._mapping.array(at, missing))  # type: ignore[arg-type]
            done = 0
            for place, buffer, is_there in zip(places, computed.buffers, inside, strict=True):
                if not is_there:
                    target[done : done + buffer.nbytes] = buffer.cast("B") if buffer.nbytes else b""
                    place[0], done = at + done, done + buffer.nbytes
        return places

    def _room(self, nbytes: int) -> int:
        self._send({"is": "room?", "bytes": nbytes})
        head, _ = self._channel.receive()
        if head["at"] < 0:
            raise ServerUnavailable(head["message"])
        return int(head["at"])

    def _send(self, head: dict[str, Any], *parts: bytes) -> None:
        self._channel.send({**head, "number": self._number}, *parts)

    def _still_kept(self) -> list[int]:
        if sum(nbytes for _, nbytes in self._kept.values()) > KEPT_BYTES:
            gc.collect()
        self._kept = {start: one for start, one in self._kept.items() if one[0]() is not None}
        return list(self._kept)

    def _crossing(self, digest: str) -> Crossing:
        """Return the description of a cut, which is sent once, and again if it was evicted."""
        known = self._crossings.get(digest, SERVER)
        if known is None:
            self._send({"is": "cut?"})
            _, (data,) = self._channel.receive()
            known = decode(data, self._limits.max_request_bytes, remember=False)  # checked by the server already
            self._crossings.put(digest, known, decoded_bytes(data) + known.working_bytes, SERVER)
        return known

    # Messages answered with bytes

    def _send_bytes(self, head: dict[str, Any]) -> None:
        try:
            model = self._models[head["model"]]
            if head["do"] == "session":
                reported = self._begin(head)
            else:
                reported = self._profile(model, head) if head["do"] == "profile" else self._manifest(model)
            message: Message = {"is": "answer"}, [reported]
        except IsthmusError as error:
            message = _failure(error)
        except Lost:
            raise
        except BaseException as error:
            failure = ModelFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            message = _failure(failure)
        self._send({**message[0], "kept": self._still_kept()}, *message[1])

    def _profile(self, model: ServedModel, head: dict[str, Any]) -> bytes:
        def on_progress(done: int, total: int, what: str) -> None:
            self._send({"is": "progress", "done": done, "total": total, "what": what})
            answer, _ = self._channel.receive()
            if answer["do"] != "go on":
                raise Cancelled("this profile is no longer waited for")

        made = model.profile(head["warmup"], head["repetitions"], head["seconds"], on_progress, head["codecs"])
        return json.dumps(made, allow_nan=False).encode()

    def _begin(self, head: dict[str, Any]) -> bytes:
        """Open a decoding session."""
        following = Following(head["end"], _Next()) if head["end"] else None
        self._sessions.begin(head["session"], head["model"], head["cut"], head["of"], following)
        return b""

    def _manifest(self, model: ServedModel) -> bytes:
        found = encode(model.manifest())
        if found is None:
            raise TooLarge("the model has too many modules for a comparison module by module")
        return found


_Answer = tuple[dict[str, Any], bytes, bytes]
_asking: ContextVar[_Rest] = ContextVar("isthmus_rest")
"""The step whose second half this thread computes."""


class _Rest:
    """The second half of a step in the middle of a chain: a thread that runs while `go` waits for it, and waits in
    `request_next` for the next server.
    """

    def __init__(self, rest: Callable[[], Computed]) -> None:
        self._found: queue.SimpleQueue[Computed | StepRequest | BaseException] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run, rest), daemon=True)

    def go(self, answer: _Answer | None = None) -> Computed | StepRequest:
        """Run it up to its end, or to its next request to the next server. Raises its error."""
        if answer is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def request_next(self, requested: StepRequest) -> _Answer:
        """Ask the next server. Called by its own thread."""
        self._found.put(requested)
        answer = self._answers.get()
        if answer is None:
            raise Cancelled("its session was closed")
        return answer

    def end(self) -> None:
        """End it with `Cancelled`, because its session was closed."""
        self._answers.put(None)

    def _run(self, rest: Callable[[], Computed]) -> None:
        _asking.set(self)
        try:
            self._found.put(rest())
        except BaseException as error:
            self._found.put(error)


class _Next:
    """The link to the next server of a chain, through the server's process: a `shared_hooks.generation.Link`."""

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None = None,
    ) -> StepReply:
        """As `Link.step`."""
        parcel = Parcel.of_tensors(header, tensors)
        head, reported, payload = _asking.get().request_next(
            StepRequest(session, number, fork, parcel.header, b"".join(parcel.buffers))
        )
        if "error" in head:
            raise by_name(head["error"])(head["message"])
        found = Parcel.tensors(reported, bytearray(payload), len(payload) + MAX_BYTES)
        return StepReply(*found, head["up"], head["down"])

    def close(self, session: int) -> None:
        """Does nothing: the server's process closes it with this server's session."""


def _failure(error: IsthmusError) -> Message:
    """Return an error as the server receives it: a `RequestFailed`, and the traceback of its cause."""
    cause = error.__cause__
    text = "".join(traceback.format_exception(cause)) if cause is not None else ""
    head = {"is": "failure", "spent": isinstance(cause, RuntimeError) and _CUDA_ERROR in str(cause)}
    return head, [wire.failed(0, error).SerializeToString(), text[-MAX_TRACEBACK:].encode("utf-8", "replace")]
