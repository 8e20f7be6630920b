"""The generators of one run: one in this process, or several in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from edge_client import interrupts
from edge_client.benching.generator import Fired, Generator
from edge_client.benching.load import Ended, Lane, Load, Recorded, RecordedLane, Shot
from edge_client.benching.page import LiveLane
from edge_client.benching.worker import instructions
from shared_hooks.errors import RemoteError, by_name

AHEAD: Final = 0.2
"""Seconds from an order to second 0, so that all processes have it before."""
ROOT: Final = Path(__file__).resolve().parents[2]


class Gang(Protocol):
    """Sends the load of one run."""

    def fire(self, shots: Sequence[Shot], give_up: float) -> list[Fired]:
        """One for each process. Ends early, saying why, at Ctrl-C and where the server is gone."""

    def close(self) -> None:
        """Disconnects all."""


class Alone:
    """One generator, in this process."""

    def __init__(self, load: Load, recorded: Recorded | None) -> None:
        """Connects all clients. Raises what that raises."""
        lanes: list[Lane] = []
        self._generator = Generator(lanes)
        try:
            for client in range(len(load.codecs)):
                lanes.append(LiveLane(load, client) if recorded is None else RecordedLane(load, recorded, client))
            self._generator.begin()
        except BaseException:
            self._generator.close()
            raise

    def fire(self, shots: Sequence[Shot], give_up: float) -> list[Fired]:
        return [self._generator.fire(shots, time.monotonic() + AHEAD, give_up)]

    def close(self) -> None:
        self._generator.close()


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
                    [sys.executable, "-m", "edge_client.benching.worker"],
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
