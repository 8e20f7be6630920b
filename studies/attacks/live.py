"""Attacks over gRPC on a server process, beside an honest client that compares every answer bit for bit."""

from __future__ import annotations

import itertools
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
from edge_client.transport.options import ConnectionOptions
from protos.frames import ChunkFrame, parse_client_frame
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel
from studies.attacks.bulk import same
from studies.attacks.corpus import DIGITS, TARGETS, Recording, inputs_of, spec_of
from studies.attacks.flatness import Flatness
from studies.attacks.models import Reader
from studies.attacks.volleys import Gunner, Volley

MARKERS = 1 << 60
"""Ids of requests that tell how far the server has read."""
MISSING = "Disagreement: the cut is not held"
COMPUTED = {"answer", "ModelFailed", "CutRefused", "PlanMismatch", "PlaceholderRead"}
"""What is only said of a request whose payload came whole."""
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds that the server may take over the frames of one attack; more is a hang."""
EVERY = 1000
"""Frames between two looks at the server's memory."""
LIMITS = """
[limits]
max_cuts = 256
max_recipes = 256
max_compute_seconds = 2
max_rehearsal_seconds = 5
rehearsal_seconds_per_minute = 1000000
rehearsal_seconds_per_account = 1000000
max_request_bytes = 8388608
"""


class Served:
    """A ``cloud-server`` process with guard pages round slots; ended by its own process id."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        models = [f'{DIGITS} = "{DIGITS}"']
        for name, (factory, example) in TARGETS.items():
            where = Reader.__module__
            models.append(f'{name} = {{ factory = "{where}:{factory}", example = "{where}:{example}" }}')
        config = folder / "server.toml"
        config.write_text('listen = "127.0.0.1:0"\nthreads = 1\n[models]\n' + "\n".join(models) + LIMITS)
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cloud_server",
                str(config),
                "--workers",
                str(workers),
                "--in-process",
                "--log-level",
                "error",
            ],
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
        self.opened = self.marked = 0
        self.sent = 0
        """Frames."""
        self.read = 0
        """At least so many of them belong to changed requests and were read: what answers and errors prove."""

    def models(self) -> split_pb2.ListModelsReply:
        """What the server says it serves."""
        ask = self.channel.unary_unary(
            "/isthmus.v1.Split/ListModels",
            request_serializer=split_pb2.ListModelsRequest.SerializeToString,
            response_deserializer=split_pb2.ListModelsReply.FromString,
        )
        return ask(split_pb2.ListModelsRequest(), timeout=PATIENCE)

    def hello(self, model_id: str, hello: split_pb2.Hello | None = None) -> split_pb2.ClientFrame:
        """A greeting; ``hello``: what is different in it."""
        self.opened += 1
        made = split_pb2.Hello(
            protocol_version=3, client_id=f"stranger-{self.opened}", model_id=model_id, inline_bytes=64 << 10
        )
        about = self.about.get(model_id)
        if about is not None:
            if model_id not in self.environment:
                with WrappedModel(spec_of(model_id).load_model()) as local:  # a refusal would tell it, too
                    self.environment[model_id] = local.environment()
            made.weights_hash, made.structure_digest = about.weights_hash, about.structure_digest
            made.plan_digest = about.plan_digest
            made.environment.update(self.environment[model_id])
        made.MergeFrom(hello or split_pb2.Hello())
        return split_pb2.ClientFrame(hello=made)

    def stream(self, model_id: str) -> _Stream:
        """The standing stream on a model; a new one where the last was ended."""
        known = self.streams.get(model_id)
        if known is None or known.over or known.sent > 5000:
            if known is not None:
                known.close()
            known = self.streams[model_id] = _Stream(self.channel)
            known.put([self.hello(model_id).SerializeToString()])
        return known

    def fire(self, volley: Volley) -> list[str]:
        """What came of it: errors, "answer", "taken" for frames that need no answer, or "hang"."""
        if volley.greetings:
            return [self._greet(frame) for frame in volley.frames]
        # each of them ends its stream
        alone = volley.kind == "unreadable"
        return [
            one
            for frames in ([[frame] for frame in volley.frames] if alone else [volley.frames])
            for one in self._fire(volley, frames)
        ]

    def _fire(self, volley: Volley, frames: list[bytes]) -> list[str]:
        stream = self.stream(volley.model_id)
        stream.put(frames)
        # a stream answers in order what it can answer at once: this request is refused when all before it was looked at
        self.marked += 1
        marker = MARKERS + self.marked
        stream.put(
            [split_pb2.ClientFrame(request=split_pb2.RequestHeader(id=marker, session_id=1)).SerializeToString()]
        )
        stream.sent += len(frames) + 1
        self.sent += len(frames) + 1
        reported = stream.wait(marker, volley)
        if reported == ["hang"] or volley.jumbled or volley.kind == "bytes":
            return reported
        if stream.over:
            self.read += volley.kind in ("unreadable", "descriptions")
            return reported
        chunks = Counter(frame.id for frame in map(parse_client_frame, frames) if isinstance(frame, ChunkFrame))
        for id in volley.asked:
            said = stream.reported.get(id, "")
            self.read += bool(said) and said != MISSING
            self.read += chunks[id] if said in COMPUTED else 0
        self.read += sum(volley.own[: len(frames)]) - len(volley.asked) - sum(chunks.values())
        return reported

    def _greet(self, data: bytes) -> str:
        """A stream that only says hello."""
        hello = split_pb2.ClientFrame.FromString(data).hello
        stream = _Stream(self.channel)
        stream.put([self.hello(hello.model_id, hello).SerializeToString()])
        self.sent, self.read = self.sent + 1, self.read + 1
        reported = stream.welcomed()
        stream.close()
        return reported

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.channel.close()


class _Stream:
    def __init__(self, channel: grpc.Channel) -> None:
        self.queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.sent = 0
        self.over = False
        self.reported: dict[int, str] = {}
        self.ended = ""
        self.news = threading.Condition()
        call = channel.stream_stream(
            "/isthmus.v1.Split/Session", response_deserializer=split_pb2.ServerFrame.FromString
        )
        self.call = call(iter(self.queue.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def put(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.queue.put(frame)

    def _read(self) -> None:
        try:
            for frame in self.call:
                kind = frame.WhichOneof("frame")
                with self.news:
                    if kind == "reply":
                        self.reported[frame.reply.id] = "answer"
                        acknowledge = split_pb2.Acknowledge(ids=[frame.reply.id])
                        self.put([split_pb2.ClientFrame(acknowledge=acknowledge).SerializeToString()])
                    elif kind == "failed":
                        missing = frame.failed.error == "Disagreement" and frame.failed.retry
                        self.reported[frame.failed.id] = MISSING if missing else frame.failed.error
                    elif kind == "welcome":
                        self.ended = "welcome"
                    self.news.notify_all()
        except grpc.RpcError as error:
            self.ended = f"stream ended: {(error.details() or '').split(':')[0]}"
        with self.news:
            self.over = True
            self.news.notify_all()

    def welcomed(self) -> str:
        """What was said of a hello."""
        with self.news:
            found = self.news.wait_for(lambda: self.ended, PATIENCE)
        return self.ended if found else "hang"

    def wait(self, marker: int, volley: Volley) -> list[str]:
        """What was said of the volley's requests once ``marker`` has been answered; some may never be complete."""
        with self.news:
            if not self.news.wait_for(lambda: self.over or marker in self.reported, PATIENCE):
                return ["hang"]
            whole = set(volley.whole)
            if not self.news.wait_for(
                lambda: self.over or whole <= self.reported.keys(), PATIENCE * max(len(whole), 1)
            ):
                return ["hang"]
            reported = [self.reported[id] for id in volley.asked if id in self.reported]
            lost = [id for id in volley.asked if id not in self.reported]
            if not self.over:  # nobody waits for these
                for id in lost:
                    self.queue.put(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=id)).SerializeToString())
            return [*reported, *([self.ended] if self.over else [])] or ["taken"]

    def close(self) -> None:
        self.queue.put(None)
        self.call.cancel()


@dataclass
class Outcome:
    """The outcome of one run on one server process. ``frames``: sent; ``read``: see `Stranger.read`."""

    workers: int = 1
    volleys: int = 0
    frames: int = 0
    read: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)
    slowest: float = 0.0
    slowest_volley: str = ""
    honest: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    status: int | None = None
    weights_hash_unchanged: bool = False
    looks: list[list[float]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """The server lives, nothing hung, and no honest answer was wrong or lost."""
        honest = self.honest["asked"] and not self.honest["wrong"] and not self.honest["lost"]
        return bool(self.alive and self.status == 0 and not self.hangs and self.weights_hash_unchanged and honest)

    def reported(self) -> dict[str, Any]:
        """As JSON."""
        memory = Flatness.of(self.looks).reported()
        rest = {name: value for name, value in vars(self).items() if name != "looks"}
        return {**rest, "outcomes": dict(self.outcomes.most_common()), "memory": memory}


def attacked(
    folder: Path, volleys: Iterator[Volley], seconds: float, frames: int = 1 << 60, workers: int = 1
) -> Outcome:
    """Fire until there are no more volleys, so many frames are sent, or the time is over."""
    served, outcome = Served(folder, workers), Outcome(workers)
    honest, began = Honest(served.address), time.monotonic()
    try:
        thread = threading.Thread(target=honest.run, daemon=True)
        thread.start()
        stranger = Stranger(served.address)
        before = {name: model.weights_hash for name, model in stranger.about.items()}
        outcome.looks.append([0, round(served.rss(), 1)])
        for volley in volleys:
            start = time.monotonic()
            reported = stranger.fire(volley)
            took = time.monotonic() - start
            if took > outcome.slowest:
                outcome.slowest, outcome.slowest_volley = round(took, 2), volley.name
            outcome.volleys += 1
            outcome.outcomes.update(reported)
            if "hang" in reported:
                outcome.hangs.append(volley.name)
            if served.process.poll() is not None:
                break
            if stranger.sent >= outcome.looks[-1][0] + EVERY:
                outcome.looks.append([stranger.sent, round(served.rss(), 1)])
            if time.monotonic() > began + seconds or stranger.sent >= frames:
                break
        outcome.frames, outcome.read, outcome.seconds = stranger.sent, stranger.read, round(time.monotonic() - began, 1)
        honest.over = True
        thread.join(PATIENCE)
        outcome.alive = served.process.poll() is None
        if outcome.alive:
            outcome.looks.append([stranger.sent, round(served.rss(), 1)])
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


def mutated(recordings: list[Recording], seed: int) -> Iterator[Volley]:
    """Without an end."""
    return map(Gunner(recordings, seed).volley, itertools.count())
