"""Run generators in processes of their own: ``python -m edge_client.benching.gang``, started by `SeveralProcesses`.

Such a process reads and writes lines of JSON: the first describes the run (it responds when all clients are connected),
each further one what to send; ``{"stop": true}`` ends the current one.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from edge_client import interrupts
from edge_client.benching.generator import AHEAD, Fired, Generator, WaitingLane
from edge_client.benching.load import Ended, Lane, Over, Shot
from edge_client.call import Call
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.model_choice import ModelChoice
from edge_client.request import EdgeModel
from edge_client.transport import Connection, ConnectionOptions, Exchange, Outgoing, Stamps, wire
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Cancelled, DeadlineExceeded, RemoteError, SpecError, by_name
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models import InputItem

# Clients of a bench that run heads in PyTorch, or send frontiers that such heads made before.


@dataclass(frozen=True)
class LoadPlan:
    """A load. ``codecs``: one per client. ``give_up``: seconds after which a request is lost. ``exact``: False lets the
    server compute requests as rows of a batch.
    """

    server: str
    choice: ModelChoice
    cuts: Sequence[str]
    codecs: Sequence[str]
    calls: Sequence[Call]
    give_up: float
    in_flight: int
    patience: float
    exact: bool = True
    credentials: Credentials = field(default_factory=Credentials)

    def connection(self) -> ConnectionOptions:
        """Return the options of one client's connection."""
        return ConnectionOptions(patience=self.patience, max_in_flight=self.in_flight, credentials=self.credentials)


class LiveLane(WaitingLane):
    """A client that runs its heads: an `EdgeClient`."""

    def __init__(self, load: LoadPlan, client: int) -> None:
        super().__init__(load.in_flight, load.give_up)
        self._load = load
        self._client = EdgeClient(
            load.server,
            load.choice,
            load.cuts[0],
            codec=load.codecs[client],
            metrics=False,
            exact=load.exact,
            deadline=load.give_up,
            connection=load.connection(),
        )

    def begin(self) -> None:
        self._client.open()
        for cut in self._load.cuts:
            self._client.infer(self._load.calls[0], split=cut, deadline=60.0)
        super().begin()

    def disconnect(self) -> None:
        self._client.close()

    def request_within(self, shot: Shot, left: float, ended: Ended) -> None:
        pending = self._client.submit(self._load.calls[shot.input], split=self._load.cuts[shot.cut], deadline=left)
        try:
            answer = pending.result()
            ended.batch_size, ended.bytes_up = answer.batch_size, answer.bytes_up
            if (load := answer.load) is not None:
                ended.pending, ended.workers, ended.queue_ns = load.pending, load.workers, int(load.queue_ns)
        finally:
            exchange = getattr(pending.request, "exchange", None)
            ended.put_offs = 0 if exchange is None else exchange.put_offs


# A client whose frontiers were made before: it sends them as they are, so that no head takes this machine's time.
#
# This measures what the server can do for clients on other machines. Answers are received whole, and not decoded.


MAX_ANSWER: Final = 1 << 30
BEGIN_SECONDS: Final = 60.0
MOST_BYTES: Final = 2 << 30
"""Maximum bytes of all frontiers, which each process keeps in memory."""


@dataclass(frozen=True)
class Recorded:
    """Recorded requests. ``hello``: the greeting, serialised; ``frontiers``: by codec, for each cut those of each
    input.
    """

    hello: bytes
    frontiers: Mapping[str, Sequence[Sequence[Outgoing]]]


def record(load: LoadPlan) -> Recorded:
    """Run every head once for each codec. Raises as `EdgeModel.head`, and SpecError for too many bytes."""
    total, hello = 0, b""
    frontiers: dict[str, list[list[Outgoing]]] = {}
    for codec in dict.fromkeys(load.codecs):
        model = EdgeModel(load.choice, codec=codec, metrics=False)
        try:
            hello = hello or model.greeting("").SerializeToString()
            frontiers[codec] = []
            for cut in load.cuts:
                frontiers[codec].append([])
                for call in load.calls:
                    made = model.head(call, cut, Stamps()).outgoing
                    payload = b"".join(made.buffers)  # the next request overwrites the head's own memory
                    total += len(payload)
                    if total > MOST_BYTES:
                        raise SpecError(
                            f"the frontiers of {len(load.calls)} inputs at {len(load.cuts)} cuts are more than "
                            f"{MOST_BYTES >> 30} GiB: give fewer inputs"
                        )
                    frontiers[codec][-1].append(replace(made, buffers=(memoryview(payload),)))
        finally:
            model.wrapped.detach()
    return Recorded(hello, frontiers)


class RecordedLane:
    """A client with one stream. Requests are passed to the connection when they are due, and it keeps its window."""

    def __init__(self, load: LoadPlan, recorded: Recorded, client: int) -> None:
        self._load = load
        self._frontiers = recorded.frontiers[load.codecs[client]]
        hello = split_pb2.ClientFrame.FromString(recorded.hello)
        hello.hello.client_id = uuid.uuid4().hex
        self._lifecycle = Lifecycle("edge")
        self._connection = Connection(
            load.server, hello, load.connection(), lifecycle=self._lifecycle, codec=load.codecs[client]
        )
        self._ids = count(1)
        self._under: deque[Exchange] = deque()

    def begin(self) -> None:
        self._connection.open(self._load.patience)
        for cut in self._frontiers:
            exchange = self._exchange(cut[0], time.monotonic() + BEGIN_SECONDS)
            self._connection.submit(exchange)
            if not exchange.wait():
                self._connection.cancel(exchange, DeadlineExceeded(f"no first answer within {BEGIN_SECONDS:.0f} s"))
            if exchange.error is not None:
                raise exchange.error

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        late_ns = int(1e9 * (time.monotonic() - intended))
        holder: list[Exchange] = []
        settled = partial(self._settled, holder, shot, intended, late_ns, over)
        exchange = self._exchange(self._frontiers[shot.cut][shot.input], intended + self._load.give_up, settled)
        holder.append(exchange)
        self._under.append(exchange)
        try:
            self._connection.submit(exchange)
        except Cancelled as closed:
            exchange.settle(closed)

    def tick(self) -> None:
        """Give up what took too long. All requests have the same timeout, so the first sent is the first to give up."""
        now = time.monotonic()
        while self._under and (self._under[0].settled or self._under[0].until <= now):
            exchange = self._under.popleft()
            if not exchange.settled:
                self._connection.cancel(exchange, DeadlineExceeded("no answer in time"))

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, outgoing: Outgoing, until: float, settled: partial[None] | None = None) -> Exchange:
        return Exchange(
            next(self._ids),
            outgoing,
            until=until,
            stamps=Stamps(),
            check_header=lambda header, size: wire.check_answer(header, size, MAX_ANSWER),
            want_metrics=False,
            together=not self._load.exact,
            lifecycle=self._lifecycle,
            on_settled=settled or (lambda: None),
        )

    def _settled(self, holder: list[Exchange], shot: Shot, intended: float, late_ns: int, over: Over) -> None:
        took_ns = int(1e9 * (time.monotonic() - intended))
        exchange = holder[0]
        error = "" if exchange.error is None else type(exchange.error).__name__
        ended = Ended(shot.number, late_ns, took_ns, error, exchange.put_offs, exchange.bytes_up)
        if not error and (reply := exchange.reply) is not None:
            ended.batch_size = max(1, reply.batch_size)
            if (load := wire.load(reply)) is not None:
                ended.pending, ended.workers, ended.queue_ns = load.pending, load.workers, int(load.queue_ns)
        exchange.payload = bytearray()  # a bench counts answers and does not decode them
        over(ended)


ROOT: Final = Path(__file__).resolve().parents[2]


class SeveralProcesses:
    """Several processes, among which the ``clients`` are dealt out."""

    def __init__(self, load: LoadPlan, recorded: Recorded | None, files: Sequence[str], processes: int) -> None:
        """Start the processes, and wait until all are connected. Raises the first failure."""
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._count = processes
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-bench-")))
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        try:
            for number in range(processes):
                process = subprocess.Popen(
                    [sys.executable, "-m", "edge_client.benching.gang"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C is passed on as a message, so that what was measured comes back
                )
                self._processes.append(process)
                mine = list(range(number, len(load.codecs), processes))
                self._send(process, instructions(load, recorded, list(files), folder, mine))
            for process in self._processes:
                self._receive(process)
        except BaseException:
            self.close()
            raise

    def fire(self, shots: Sequence[Shot], give_up: float) -> list[Fired]:
        begin = time.monotonic() + AHEAD  # one clock for all processes of a machine
        for number, process in enumerate(self._processes):
            mine = [
                [one.number, one.at, one.cut, one.input, one.client // self._count]
                for one in shots
                if one.client % self._count == number
            ]
            self._send(process, {"shots": mine, "begin": begin, "give_up": give_up})
        answers: list[dict[str, Any]] = []
        while len(answers) < len(self._processes):
            try:
                answers.append(self._receive(self._processes[len(answers)]))
            except KeyboardInterrupt:
                interrupts.acknowledge()
                for process in self._processes:
                    self._send(process, {"stop": True})
        return [Fired(**{**one, "ended": [Ended(*row) for row in one["ended"]]}) for one in answers]

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()  # which ends it
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes = []
        self._stack.close()

    @staticmethod
    def _send(process: subprocess.Popen[str], value: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # its last line has the reason

    @staticmethod
    def _receive(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RemoteError(f"a process that sends requests ended with status {process.wait()}")
        reported: dict[str, Any] = json.loads(line)
        if "failed" in reported:
            raise by_name(reported["failed"])(reported["message"])
        return reported


# One such process.


def instructions(
    load: LoadPlan, recorded: Recorded | None, files: list[str], folder: Path, mine: list[int]
) -> dict[str, Any]:
    """Return a worker's instructions as JSON data, for the clients ``mine``; payloads go to ``folder``."""
    return {
        "server": load.server,
        "choice": None if recorded is not None else asdict(load.choice),
        "cuts": list(load.cuts),
        "codecs": [load.codecs[client] for client in mine],
        "files": files,
        "give_up": load.give_up,
        "in_flight": load.in_flight,
        "patience": load.patience,
        "exact": load.exact,
        "credentials": {name: _text(value) for name, value in asdict(load.credentials).items()},
        "recorded": None if recorded is None else _written(recorded, folder),
    }


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _written(recorded: Recorded, folder: Path) -> dict[str, Any]:
    """Write each payload to a file, once."""
    frontiers: dict[str, Any] = {}
    for codec, cuts in recorded.frontiers.items():
        frontiers[codec] = []
        for at, cut in enumerate(cuts):
            frontiers[codec].append([])
            for number, one in enumerate(cut):
                file = folder / f"{codec}-{at}-{number}"
                if not file.exists():
                    file.write_bytes(b"".join(one.buffers))
                parts = [base64.b64encode(part).decode() for part in (one.cut_data, one.header)]
                frontiers[codec][-1].append([one.cut_digest, *parts, str(file), list(one.codecs)])
    return {"hello": base64.b64encode(recorded.hello).decode(), "frontiers": frontiers}


def _read(instructions: dict[str, Any]) -> Recorded:
    def outgoing(digest: str, cut: str, header: str, file: str, codecs: list[str]) -> Outgoing:
        payload = Path(file).read_bytes()
        buffers = (memoryview(payload),)
        return Outgoing(
            digest, base64.b64decode(cut), base64.b64decode(header), buffers, len(payload), codecs=tuple(codecs)
        )

    frontiers = {
        codec: [[outgoing(*one) for one in cut] for cut in cuts] for codec, cuts in instructions["frontiers"].items()
    }
    return Recorded(base64.b64decode(instructions["hello"]), frontiers)


def _generator(known: dict[str, Any]) -> Generator:
    recorded = None if known["recorded"] is None else _read(known["recorded"])
    choice, calls = ModelChoice(), []
    if recorded is None:
        words = known["choice"]
        choice = ModelChoice(**{**words, "weights": tuple(words["weights"])})
        spec = choice.spec()
        calls = [Call(*spec.preprocess(InputItem(Path(file)))) for file in known["files"]]
        if not calls:
            example = spec.example()
            assert example is not None  # checked by the starting process
            calls = [Call(*example)]
    load = LoadPlan(
        known["server"],
        choice,
        known["cuts"],
        known["codecs"],
        calls,
        known["give_up"],
        known["in_flight"],
        known["patience"],
        known["exact"],
        Credentials(**known["credentials"]),
    )
    lanes: list[Lane] = [
        LiveLane(load, client) if recorded is None else RecordedLane(load, recorded, client)
        for client in range(len(load.codecs))
    ]
    return Generator(lanes)


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    answers, sys.stdout = sys.stdout, sys.stderr  # a model's own code may print
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    made: list[Generator] = []

    def listen() -> None:
        for line in sys.stdin:
            reported = json.loads(line)
            if not reported.get("stop"):
                lines.put(reported)
            elif made:
                made[0].stop.set()
        os._exit(0)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    threading.Thread(target=listen, daemon=True).start()
    try:
        generator = _generator(lines.get())
        generator.begin()
        made.append(generator)
        answer({"ready": True})
        while True:
            reported = lines.get()
            shots = [Shot(*one) for one in reported["shots"]]
            fired = generator.fire(shots, reported["begin"], reported["give_up"])
            answer({**vars(fired), "ended": [one.row() for one in fired.ended]})
    except Exception as error:
        answer({"failed": type(error).__name__, "message": str(error)})
        os._exit(1)


if __name__ == "__main__":
    main()
