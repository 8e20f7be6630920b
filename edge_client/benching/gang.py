"""Generators in processes of their own: ``python -m edge_client.benching.gang``, started by `Several`.

Such a process reads lines of JSON and answers with lines of JSON: the first describes the run (it answers when all
clients are connected), every other is what to send; ``{"stop": true}`` ends what is under way.
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from edge_client import interrupts
from edge_client.benching.generator import AHEAD, Fired, Generator
from edge_client.benching.lanes import LiveLane, Load, Recorded, RecordedLane
from edge_client.benching.load import Ended, Lane, Shot
from edge_client.call import Call
from edge_client.credentials import Credentials
from edge_client.model_choice import ModelChoice
from edge_client.transport import Outgoing
from shared_hooks.errors import RemoteError, by_name
from shared_hooks.models import InputItem

ROOT: Final = Path(__file__).resolve().parents[2]


class Several:
    """Processes; of ``clients`` each has every n-th."""

    def __init__(self, load: Load, recorded: Recorded | None, files: Sequence[str], processes: int) -> None:
        """Starts them, and waits until all are connected. Raises what the first raises that cannot."""
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
                    start_new_session=True,  # Ctrl-C is passed on by a word, so that what was measured comes back
                )
                self._processes.append(process)
                mine = list(range(number, len(load.codecs), processes))
                self._say(process, instructions(load, recorded, list(files), folder, mine))
            for process in self._processes:
                self._heard(process)
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
            self._say(process, {"shots": mine, "begin": begin, "give_up": give_up})
        answers: list[dict[str, Any]] = []
        while len(answers) < len(self._processes):
            try:
                answers.append(self._heard(self._processes[len(answers)]))
            except KeyboardInterrupt:
                interrupts.heard()
                for process in self._processes:
                    self._say(process, {"stop": True})
        return [Fired(**{**one, "ended": [Ended(*row) for row in one["ended"]]}) for one in answers]

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()  # at which it ends
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
    def _say(process: subprocess.Popen[str], value: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # why it ended is what it said last

    @staticmethod
    def _heard(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RemoteError(f"a process that sends requests ended with status {process.wait()}")
        said: dict[str, Any] = json.loads(line)
        if "failed" in said:
            raise by_name(said["failed"])(said["message"])
        return said


# One such process.


def instructions(
    load: Load, recorded: Recorded | None, files: list[str], folder: Path, mine: list[int]
) -> dict[str, Any]:
    """A worker's instructions, JSON-able, for the clients ``mine``; payloads go to ``folder``."""
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
    """Each payload a file, written once."""
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
            assert example is not None  # who started this has looked
            calls = [Call(*example)]
    load = Load(
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
            said = json.loads(line)
            if not said.get("stop"):
                lines.put(said)
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
            said = lines.get()
            shots = [Shot(*one) for one in said["shots"]]
            fired = generator.fire(shots, said["begin"], said["give_up"])
            answer({**vars(fired), "ended": [one.row() for one in fired.ended]})
    except Exception as error:
        answer({"failed": type(error).__name__, "message": str(error)})
        os._exit(1)


if __name__ == "__main__":
    main()
