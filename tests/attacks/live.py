"""Attacks over gRPC on a server process, beside an honest client that compares every answer bit for bit."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from edge_client.client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.options import ConnectionOptions
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel
from tests.attacks.bulk import same
from tests.attacks.corpus import DIGITS, TARGETS, Recording, inputs_of, spec_of
from tests.attacks.families import Attack
from tests.attacks.models import Reader
from tests.attacks.mutation import Mutator

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds that the server may take over the frames of one attack; more is a hang."""
LIMITS = """
[limits]
max_compute_seconds = 5
max_rehearsal_seconds = 5
rehearsal_seconds_per_minute = 1000000
rehearsal_seconds_per_host = 1000000
max_request_bytes = 8388608
"""


class Served:
    """A ``cloud-server`` process with guard pages round slots; ended by its own process id."""

    def __init__(self, folder: Path) -> None:
        models = [f'{DIGITS} = "{DIGITS}"']
        for name, (factory, example) in TARGETS.items():
            where = Reader.__module__
            models.append(f'{name} = {{ factory = "{where}:{factory}", example = "{where}:{example}" }}')
        config = folder / "server.toml"
        config.write_text('listen = "127.0.0.1:0"\nthreads = 1\n[models]\n' + "\n".join(models) + LIMITS)
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cloud_server", str(config), "--log-level", "error"],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "ISTHMUS_GUARD_PAGES": "1", "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on"), f"{line!r}; see {self.log.name}"
        self.address = line.split()[-1]

    def rss(self) -> float:
        """MiB resident."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def close(self) -> int:
        """The exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(90)
        finally:
            self.log.close()


@dataclass
class Honest:
    """An honest client on digits that asks all the time, at changing cuts."""

    address: str
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    over: bool = False

    def run(self) -> None:
        (x,), _ = inputs_of(DIGITS, 0)
        with WrappedModel(spec_of(DIGITS).load_model()) as local:
            wanted = local.whole(x)
        with EdgeClient(
            self.address,
            ModelChoice(DIGITS, device="cpu", threads=1),
            "input",
            connection=ConnectionOptions(patience=30),
        ) as client:
            chance = random.Random(0)
            while not self.over:
                cut = chance.choice([0, 7, 20, 33, 45])
                began = time.monotonic()
                try:
                    answer = client.infer(x, split=cut)
                    if not same(answer.output, wanted):
                        self.wrong.append(f"cut {cut}")
                except Exception as error:
                    self.lost.append(f"{type(error).__name__}: {error!s:.100}")
                self.asked += 1
                self.seconds.append(time.monotonic() - began)
                time.sleep(0.02)

    def late(self, share: float) -> float:
        """Milliseconds within which this share of the answers came."""
        ordered = sorted(self.seconds) or [0.0]
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


class Stranger:
    """Speaks the protocol by its definition alone."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        reply = self.models()
        self.about = {model.model_id: model for model in reply.models}
        self.environment: dict[str, dict[str, str]] = {}
        self.streams: dict[str, _Stream] = {}
        self.opened = 0

    def models(self) -> split_pb2.ListModelsReply:
        """What the server says it serves."""
        ask = self.channel.unary_unary(
            "/isthmus.v1.Split/ListModels",
            request_serializer=split_pb2.ListModelsRequest.SerializeToString,
            response_deserializer=split_pb2.ListModelsReply.FromString,
        )
        return ask(split_pb2.ListModelsRequest(), timeout=PATIENCE)

    def hello(self, model_id: str, environment: dict[str, str], version: int = 2) -> split_pb2.ClientFrame:
        about = self.about[model_id]
        self.opened += 1
        return split_pb2.ClientFrame(
            hello=split_pb2.Hello(
                protocol_version=version,
                client_id=f"stranger-{self.opened}",
                model_id=model_id,
                weights_hash=about.weights_hash,
                structure_digest=about.structure_digest,
                plan_digest=about.plan_digest,
                environment=environment,
                inline_bytes=64 << 10,
            )
        )

    def stream(self, model_id: str) -> _Stream:
        """The standing stream on a model; a new one where the last was ended."""
        known = self.streams.get(model_id)
        if known is None or known.over or known.sent > 400:
            if known is not None:
                known.close()
            if model_id not in self.environment:
                with WrappedModel(spec_of(model_id).load_model()) as local:  # a refusal would tell it, too
                    self.environment[model_id] = local.environment()
            known = self.streams[model_id] = _Stream(self.channel)
            known.put([self.hello(model_id, self.environment[model_id])])
        return known

    def fire(self, attack: Attack, id: int) -> str:
        """The name of what came of it: an error, "answer", "taken" for frames that need no answer, or "hang"."""
        stream, frames = self.stream(attack.model_id), attack.made(id)
        asks = [frame.request.id for frame in frames if frame.WhichOneof("frame") == "request"]
        stream.put(frames)
        # a stream answers in order what it can answer at once: this request is refused when all before it was looked at
        stream.put([split_pb2.ClientFrame(request=split_pb2.RequestHeader(id=(1 << 50) + id, session_id=1))])
        stream.sent += len(frames) + 1
        told = stream.wait((1 << 50) + id, asks[-1] if asks else None)
        return told

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.channel.close()


class _Stream:
    def __init__(self, channel: grpc.Channel) -> None:
        self.queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.sent = 0
        self.over = False
        self.told: dict[int, str] = {}
        self.ended = ""
        self.news = threading.Condition()
        call = channel.stream_stream(
            "/isthmus.v1.Split/Session", response_deserializer=split_pb2.ServerFrame.FromString
        )
        self.call = call(iter(self.queue.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def put(self, frames: list[split_pb2.ClientFrame]) -> None:
        for frame in frames:
            self.queue.put(frame.SerializeToString())

    def _read(self) -> None:
        try:
            for frame in self.call:
                kind = frame.WhichOneof("frame")
                with self.news:
                    if kind == "reply":
                        self.told[frame.reply.id] = "answer"
                        self.put([split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=[frame.reply.id]))])
                    elif kind == "failed":
                        self.told[frame.failed.id] = frame.failed.error
                    self.news.notify_all()
        except grpc.RpcError as error:
            self.ended = f"stream ended: {error.details()}".split(": ")[1].split(":")[0]
        with self.news:
            self.over = True
            self.news.notify_all()

    def wait(self, marker: int, id: int | None) -> str:
        """What was said of request ``id``, once ``marker`` has been answered; it may never be complete."""
        with self.news:
            if not self.news.wait_for(lambda: self.over or marker in self.told, PATIENCE):
                return "hang"
            if id is not None and not self.over:
                # complete requests are answered; others wait for chunks that do not come
                self.news.wait_for(lambda: self.over or id in self.told, 8.0)
            if id in self.told:
                return self.told[id]
            return f"stream ended: {self.ended}" if self.over else "taken"

    def close(self) -> None:
        self.queue.put(None)
        self.call.cancel()


@dataclass
class Outcome:
    """Of one run on one server process."""

    attacks: int = 0
    frames: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)
    honest: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    status: int | None = None
    weights_hash_unchanged: bool = False
    rss: list[float] = field(default_factory=list)


def attacked(folder: Path, attacks: Iterator[Attack], seconds: float) -> Outcome:
    """Fire until there are no more attacks, or the time is over."""
    served, outcome = Served(folder), Outcome()
    honest, until = Honest(served.address), time.monotonic() + seconds
    try:
        thread = threading.Thread(target=honest.run, daemon=True)
        thread.start()
        stranger = Stranger(served.address)
        before = {name: model.weights_hash for name, model in stranger.about.items()}
        outcome.rss.append(served.rss())
        for number, attack in enumerate(attacks):
            told = stranger.fire(attack, number + 1)
            outcome.attacks += 1
            outcome.outcomes[told] += 1
            if told == "hang":
                outcome.hangs.append(attack.name)
            if time.monotonic() > until or served.process.poll() is not None:
                break
        outcome.frames = sum(stream.sent for stream in stranger.streams.values())
        outcome.rss.append(served.rss() if served.process.poll() is None else 0.0)
        honest.over = True
        thread.join(PATIENCE)
        outcome.alive = served.process.poll() is None
        if outcome.alive:
            after = {model.model_id: model.weights_hash for model in stranger.models().models}
            outcome.weights_hash_unchanged = after == before
        stranger.close()
    finally:
        outcome.status = served.close()
    outcome.honest = {
        "asked": honest.asked,
        "wrong": honest.wrong,
        "lost": honest.lost,
        "p50_ms": honest.late(0.5),
        "p99_ms": honest.late(0.99),
        "max_ms": honest.late(1.0),
    }
    return outcome


def mutated(recordings: list[Recording], seed: int) -> Iterator[Attack]:
    """Without an end."""
    number = 0
    while True:
        recording, shot = Mutator(recordings, seed * 1_000_003 + number).shot(0.3)
        shot.fields.pop("id", None)
        yield Attack(f"{seed}:{number}", recording.model_id, shot)
        number += 1
