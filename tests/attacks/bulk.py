"""Mutated requests in bulk: forked workers, each with a server's core of its own and no transport.

A worker writes down the number of a shot before it fires it, so that one that dies or hangs names its seed. In between
it asks honestly, and compares every answer bit for bit.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from cloud_server.answers import Answer
from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.served_model import ServedModel
from cloud_server.session import Session
from protos.chunks import parse_client_frame
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel
from shared_hooks.trees import flatten
from tests.attacks.corpus import DIGITS, KEEPER, READER, Recording, spec_of
from tests.attacks.mutation import Mutator
from tests.attacks.shots import Shot

LIMITS = Limits(
    max_compute_seconds=10,
    max_rehearsal_seconds=5,
    rehearsal_seconds_per_host=1e9,
    rehearsal_seconds_per_minute=1e9,
    max_request_bytes=8 << 20,
    max_elements=1 << 30,
)
JUMBLED = 0.5
"""Share of shots whose frames come in another order, with others between them."""
EVERY = 25
"""Shots between two honest requests."""


class Target:
    """A core that computes in the caller's thread, and one stream into it."""

    def __init__(self, models: tuple[str, ...] = (READER, KEEPER, DIGITS)) -> None:
        device = torch.device("cpu")
        engines = self.engines = [
            ServedModel(ModelEntry(spec_of(name)), device, None, LIMITS.rehearsals()) for name in models
        ]
        self.core = Core(engines, LIMITS)
        self.jobs: list[Callable[[], None]] = []
        self.core._workers.put = self.jobs.append  # type: ignore[method-assign]
        self.identities = {identity.model_id: identity for identity in self.core.identities}
        self.sessions: dict[tuple[str, bool], Session] = {}
        self.opened = 0
        self.received = 0
        """Frames that were taken or refused; not those after a stream's end."""
        self.said = ""
        """The last failure's message."""

    def session(self, model_id: str, *, honest: bool = False) -> Session:
        """The stream on a model, of the stranger or of an honest client; a new one where the last was ended."""
        session = self.sessions.get((model_id, honest))
        if session is None:
            identity = self.identities[model_id]
            self.opened += 1
            session = self.sessions[model_id, honest] = self.core.open("attack")
            hello = split_pb2.Hello(
                protocol_version=2,
                client_id=f"stranger-{self.opened}",
                model_id=model_id,
                weights_hash=identity.weights_hash,
                structure_digest=identity.structure_digest,
                plan_digest=identity.plan_digest,
                environment=dict(identity.environment),
                inline_bytes=64 << 10,
            )
            assert session.receive(split_pb2.ClientFrame(hello=hello))
            session._outbox.clear()
        return session

    def fire(
        self, model_id: str, frames: list[split_pb2.ClientFrame], *, honest: bool = False
    ) -> tuple[list[str], Any]:
        """What came of the frames: the errors' names, or "answer"; and the last reply."""
        session, told, reply = self.session(model_id, honest=honest), [], None
        for frame in frames:
            self.received += 1
            if not session.receive(parse_client_frame(frame.SerializeToString())):
                break
            while self.jobs:
                self.jobs.pop(0)()
        while session._outbox:
            item = session._outbox.popleft()
            if isinstance(item, Answer):
                session.undelivered -= 1
                self.core.books.forget([item.key])
                reply = item if item.reply is not None else None
                told.append("answer" if item.failed is None else item.failed.error)
                self.said = "" if item.failed is None else item.failed.message
            elif item.WhichOneof("frame") == "failed":
                told.append(item.failed.error)
                self.said = item.failed.message
        if session._error is None and "ServerUnavailable" in told and not honest:
            session.disconnect()  # its unfinished requests have used up what it may have in flight
            del self.sessions[model_id, honest]
        if session._error is not None:
            told.append(f"stream ended: {type(session._error).__name__}")
            session.disconnect()
            del self.sessions[model_id, honest]
        return told, reply

    def honest(self, recording: Recording, id: int) -> str:
        """ "" when the answer is the whole model's, bit for bit; else what was wrong."""
        told, reply = self.fire(recording.model_id, Shot.of(recording).frames(id), honest=True)
        if reply is None:
            return f"no answer: {told}: {self.said}"
        value = Parcel.to_value(reply.reply.header, b"".join(reply.buffers))
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


def work(recordings: list[Recording], seed: int, first: int, seconds: float, deep: float, report: Any) -> None:
    """One worker: shots from number ``first`` on; ``report(kind, ...)`` tells the parent."""
    faulthandler.enable(sys.stderr)
    torch.set_num_threads(1)
    target, counted, number, frames = Target(), Counter[str](), first, 0
    until, told = time.monotonic() + seconds, time.monotonic()
    honest = [recording for recording in recordings if not target.honest(recording, 1 << 40)]
    if len(honest) < len(recordings):
        report("failed", first, f"{len(recordings) - len(honest)} honest requests are not answered: {target.said}")
    began, asked, slowest = rss(), 0, 0.0
    while time.monotonic() < until:
        report("at", number)
        mutator = Mutator(recordings, seed * 1_000_003 + number)
        recording, shot = mutator.shot(deep)
        sent = shot.frames(number + 1)
        if mutator.random.random() < JUMBLED:
            sent = mutator.jumbled(sent)
        before = time.monotonic()
        outcome, _ = target.fire(recording.model_id, sent)
        took = time.monotonic() - before
        if took > slowest:
            slowest = took
            report("slow", number, took)
        frames, target.received = frames + target.received, 0
        counted.update(outcome or ["no word"])
        counted["shots"] += 1
        counted["shots with a changed description"] += shot.changed
        if "IsthmusError" in " ".join(outcome):
            report("failed", number, f"an error without a name: {outcome}")
        number += 1
        if number % EVERY == 0:
            asked += 1
            wrong = target.honest(honest[asked % len(honest)], (1 << 41) + number)
            if wrong:
                report("failed", number, f"honest: {wrong}")
        if time.monotonic() > told + 5:
            told = time.monotonic()
            report("counted", number, counted, frames, asked, began, rss(), slowest)
            counted, frames, asked = Counter(), 0, 0
    counted["rehearsals"] = sum(engine._wrapped.recipes.rehearsals for engine in target.engines)
    report("counted", number, counted, frames, asked, began, rss(), slowest)
    report("done", number)
