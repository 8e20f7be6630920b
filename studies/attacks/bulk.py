"""Mutated requests in bulk: forked workers, each with a server's core of its own and no transport.

A worker writes down the number of a volley before it fires it, so that one that dies or hangs names its seed. In
between it asks honestly, and compares every answer bit for bit.
"""

from __future__ import annotations

import faulthandler
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf.message import DecodeError

from cloud_server.access import Caller
from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from cloud_server.requests.request import RequestState, ServerAnswer
from cloud_server.scheduling import Task
from cloud_server.streams.session import StreamSession
from protos.frames import ChunkFrame, HeadedRequest, parse_client_frame
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel
from shared_hooks.errors import BadFrame
from shared_hooks.tensors.trees import flatten
from studies.attacks.corpus import DIGITS, KEEPER, READER, Recording, spec_of
from studies.attacks.shots import Shot
from studies.attacks.volleys import Gunner, Volley

LIMITS = Limits(
    max_compute_seconds=2,
    max_rehearsal_seconds=5,
    rehearsal_seconds_per_account=1e9,
    rehearsal_seconds_per_minute=1e9,
    max_request_bytes=8 << 20,
    max_elements=1 << 30,
    max_cuts=256,  # so that what is kept is full soon, and memory that grows after that is lost
    max_recipes=256,
)
EVERY = 25
"""Volleys between two honest requests."""


class Target:
    """A core that computes in the caller's thread, and one stream into it."""

    def __init__(self, models: tuple[str, ...] = (READER, KEEPER, DIGITS)) -> None:
        device = torch.device("cpu")
        engines = self.engines = [
            ServedModel(ModelEntry(spec_of(name)), device, None, LIMITS.rehearsals()) for name in models
        ]
        self.core = Core(engines, LIMITS)
        self.tasks: list[Task] = []
        self.core.scheduler.add = self._add  # type: ignore[method-assign]
        self.identities = {identity.model_id: identity for identity in self.core.identities}
        self.sessions: dict[tuple[str, bool], StreamSession] = {}
        self.opened = 0
        self.sent = 0
        """Frames that were taken or refused."""
        self.read = 0
        """Those of them that belong to a changed request, and whose content was looked at: not only their id."""
        self.said = ""
        """The last failure's message."""
        self.reply: ServerAnswer | None = None

    def _add(self, task: Task) -> Callable[[], None]:
        self.tasks.append(task)
        return lambda: self.tasks.remove(task) if task in self.tasks else None

    def session(self, model_id: str, *, honest: bool = False) -> StreamSession:
        """The stream on a model, of the stranger or of an honest client; a new one where the last was ended."""
        session = self.sessions.get((model_id, honest))
        if session is None:
            hello = split_pb2.Hello(protocol_version=3, model_id=model_id, inline_bytes=64 << 10)
            session = self.sessions[model_id, honest] = self.core.open(Caller("attack"))
            assert session.receive(split_pb2.ClientFrame(hello=self.greeting(hello)))
            session._outbox.clear()
        return session

    def greeting(self, hello: split_pb2.Hello) -> split_pb2.Hello:
        """A hello with what it leaves empty."""
        identity = self.identities.get(hello.model_id)
        self.opened += 1
        made = split_pb2.Hello(client_id=f"stranger-{self.opened}", protocol_version=3)
        if identity is not None:
            made.weights_hash, made.structure_digest = identity.weights_hash, identity.structure_digest
            made.plan_digest = identity.plan_digest
            made.environment.update(identity.environment)
        made.MergeFrom(hello)
        return made

    def fire(self, volley: Volley, *, honest: bool = False) -> tuple[list[str], Any]:
        """What came of the frames: the errors' names, or "answer"; and the last reply."""
        reported: list[str] = []
        reply = None
        for data, own in zip(volley.frames, volley.own, strict=True):
            if volley.greetings:
                reported += self._greet(data)
                continue
            session = self.session(volley.model_id, honest=honest)
            self.sent += 1
            try:
                frame = parse_client_frame(data)
            except DecodeError:
                self.read += own
                session.broke(BadFrame("a message that is no ClientFrame"))
            else:
                self.read += own and self.is_read(session, frame)
                session.receive(frame)
            while self.tasks:
                self.core._executor([self.tasks.pop(0)])
            reported += self._heard(session)
            reply = self.reply or reply
            if session._error is not None:
                reported.append(f"stream ended: {type(session._error).__name__}")
                self.said = str(session._error)
                session.disconnect()
                del self.sessions[volley.model_id, honest]
        if "ServerUnavailable" in reported and not honest and (volley.model_id, honest) in self.sessions:
            # its unfinished requests have used up what it may have in flight
            self.sessions.pop((volley.model_id, honest)).disconnect()
        return reported, reply

    @staticmethod
    def parsed(frame: split_pb2.ClientFrame) -> Any:
        """A frame as it comes out of the transport."""
        return parse_client_frame(frame.SerializeToString())

    def _heard(self, session: StreamSession) -> list[str]:
        reported, self.reply = [], None
        while session._outbox:
            item = session._outbox.popleft()
            if isinstance(item, ServerAnswer):
                session.undelivered -= 1
                self.core.requests.forget([item.key])
                if item.failed is None:
                    self.reply = item
                reported.append("answer" if item.failed is None else item.failed.error)
                self.said = "" if item.failed is None else item.failed.message
            elif item.WhichOneof("frame") == "failed":
                reported.append(item.failed.error)
                self.said = item.failed.message
        return reported

    def _greet(self, data: bytes) -> list[str]:
        """A stream that only says hello."""
        session = self.core.open(Caller("attack"))
        self.sent, self.read = self.sent + 1, self.read + 1
        hello = split_pb2.ClientFrame.FromString(data).hello
        session.receive(split_pb2.ClientFrame(hello=self.greeting(hello)))
        error = session._error
        session.disconnect()
        return ["welcome" if error is None else f"stream ended: {type(error).__name__}"]

    def is_read(self, session: StreamSession, frame: Any) -> bool:
        """Whether what a frame says is going to be looked at: a description that is not known, a request at a cut that
        is held, a chunk of a payload that is coming in.
        """
        uploads = session._uploads
        assert uploads is not None
        if isinstance(frame, ChunkFrame):
            request = uploads._receiving.get(frame.id)
            return request is not None and request.state is RequestState.RECEIVING
        if isinstance(frame, HeadedRequest):
            frame = split_pb2.ClientFrame(request=frame.header)
        kind = frame.WhichOneof("frame")
        if kind == "cut":
            return frame.cut.digest not in self.core.crossings
        return kind == "request" and (frame.request.HasField("file") or frame.request.cut_digest in self.core.crossings)

    def honest(self, recording: Recording, id: int) -> str:
        """ "" when the answer is the whole model's, bit for bit; else what was wrong."""
        volley = Volley("honest", recording.model_id)
        volley.add(Shot.of(recording).frames(id), own=False)
        reported, reply = self.fire(volley, honest=True)
        if reply is None:
            return f"no answer: {reported}: {self.said}"
        value = Parcel.to_value(reply.reply.header, reply.reply.payload or b"".join(reply.buffers))
        return "" if same(value, recording.answer) else "another answer"


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    mine, theirs = flatten(one), flatten(other)
    return mine[0] == theirs[0] and len(mine[1]) == len(theirs[1]) and all(map(_same_bits, mine[1], theirs[1]))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(*flat)


def rss() -> float:
    """MiB resident now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def work(recordings: list[Recording], seed: int, first: int, seconds: float, report: Any) -> None:
    """One worker: volleys from number ``first`` on; ``report(kind, number, ...)`` tells the parent."""
    faulthandler.enable(sys.stderr)
    torch.set_num_threads(1)
    target, gunner = Target(), Gunner(recordings, seed)
    counted, number, asked, slowest = Counter[str](), first, 0, 0.0
    until, reported = time.monotonic() + seconds, time.monotonic()
    ids = itertools.count(1 << 40)
    honest = [recording for recording in recordings if not target.honest(recording, next(ids))]
    if len(honest) < len(recordings):
        report("failed", first, f"{len(recordings) - len(honest)} honest requests are not answered: {target.said}")
    target.sent = 0
    while time.monotonic() < until:
        report("at", number)
        took, outcome, kind = shoot(target, gunner, number)
        if took > slowest:
            slowest = took
            report("slow", number, took)
        counted.update(outcome or ["no word"])
        counted[f"volleys: {kind}"] += 1
        if "IsthmusError" in " ".join(outcome):
            report("failed", number, f"an error without a name: {outcome}")
        number += 1
        if number % EVERY == 0:
            asked += 1
            wrong = ask(target, honest, number)
            if wrong:
                report("failed", number, f"honest: {wrong}")
        if time.monotonic() > reported + 2:
            reported = time.monotonic()
            report("counted", number, Counts(counted, target.sent, target.read, asked, rss()))
            counted, asked, target.sent, target.read = Counter(), 0, 0, 0
    counted["rehearsals"] = sum(engine._wrapped.recipes.rehearsals for engine in target.engines)
    report("counted", number, Counts(counted, target.sent, target.read, asked, rss()))
    report("done", number)


@dataclass
class Counts:
    """What a worker has done since its last report. ``frames``: sent; ``read``: see `Target.read`."""

    outcomes: Counter[str]
    frames: int
    read: int
    honest: int
    rss: float


def shoot(target: Target, gunner: Gunner, number: int) -> tuple[float, list[str], str]:
    """One volley: seconds, what came of it, its kind."""
    volley = gunner.volley(number)
    before = time.monotonic()
    outcome, _ = target.fire(volley)
    return time.monotonic() - before, outcome, volley.kind


def ask(target: Target, honest: list[Recording], number: int) -> str:
    """An honest request after volley ``number - 1``; what is wrong with its answer."""
    return target.honest(honest[number // EVERY % len(honest)], (1 << 41) + number)
