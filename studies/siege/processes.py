"""Processes: started, measured and ended by their own ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import tomllib

ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.05
MIB = 1 << 20


def environment() -> dict[str, str]:
    """One thread each: many processes share few cores."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def shipped() -> dict[str, Any]:
    """The shipped model's entry in a server's file, with tails by name."""
    folder = ROOT / "shared_hooks" / "models" / "digits"
    known = tomllib.loads((folder / "digits.toml").read_text())
    known = {name: value for name, value in known.items() if name not in ("id", "description")}
    return {**known, "weights": str(folder / known["weights"]), "tails": ["stem.2", "pool"]}


class Server:
    """A ``cloud-server`` process with a configuration; its memory is looked at all the time.

    ``tables``: of the configuration file, by name; "" has what comes before the first. ``options``: of the command.
    """

    def __init__(self, folder: Path, tables: Mapping[str, Mapping[str, Any]], options: Iterable[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"{key} = {toml(value)}" for key, value in tables.get("", {}).items()) + "\n"
        for name, table in tables.items():
            if name:
                text += f"[{name}]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in table.items()) + "\n"
        (folder / "server.toml").write_text(text)
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cloud_server", str(folder / "server.toml"), *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment(),
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on"):
            self.process.kill()
            raise RuntimeError(f"the server said {line!r}; {self.log.read_text()[-2000:]}")
        self.address = line.split()[-1]
        self.looks: list[tuple[float, float]] = []
        """(monotonic seconds, MiB resident) of the process and its children."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            with contextlib.suppress(psutil.Error):
                self.looks.append((time.monotonic(), self.resident()))

    def resident(self) -> float:
        """MiB of this process and its children. What they share is counted once: as the first of them has it."""
        own = psutil.Process(self.process.pid)
        children = own.children(recursive=True)
        total = own.memory_info().rss
        for child in children:
            with contextlib.suppress(psutil.Error):
                memory = child.memory_info()
                total += memory.rss - memory.shared
        return total / MIB

    def peak(self, begin: float, end: float = float("inf")) -> float:
        """MiB at most between two moments."""
        return max((mib for when, mib in self.looks if begin <= when <= end), default=0.0)

    def usage(self) -> tuple[int, int]:
        """(descriptors, threads) of the process and its children."""
        own = psutil.Process(self.process.pid)
        found = [0, 0]
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found[0] += process.num_fds()
                found[1] += process.num_threads()
        return found[0], found[1]

    @property
    def cpu_seconds(self) -> float:
        """The processor time of this process and its children."""
        own = psutil.Process(self.process.pid)
        total = 0.0
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    @property
    def log_bytes(self) -> int:
        return self.log.stat().st_size

    def drain(self, patience: float = 60.0) -> tuple[int | None, float]:
        """(exit status, seconds) after SIGTERM; None where it had to be killed."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status: int | None
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = None
        self._over.set()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status, time.monotonic() - began


class Child:
    """A Python process of ours that speaks lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def say(self, reported: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(reported) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """Its next line; empty where it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, reported: Any) -> Any:
        """Says a line, and reads the answer. Raises RuntimeError for one that says what failed."""
        self.say(reported)
        return self.heard()

    def heard(self) -> Any:
        line = self.line()
        if not line:
            raise RuntimeError(f"a process ended: {self.process.args!r}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._shut()

    def _shut(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was not read by then is lost
                if pipe is not None:
                    pipe.close()

    def close(self) -> None:
        """Ends with its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
            self._shut()
        except subprocess.TimeoutExpired:
            self.kill()
