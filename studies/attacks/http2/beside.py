"""One flood on a fresh server process, beside an honest client that compares every answer, and newcomers who call."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.health import status_of
from studies.attacks.live import Honest

ROOT = Path(__file__).parents[3]
START_SECONDS = 120.0
WELL_SECONDS = 5.0
"""A newcomer who is answered within so long finds a server that is well."""
LOOK_SECONDS = 0.1


class Server:
    """A ``cloud-server`` process as it comes, with no configuration but ``arguments``."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cloud_server", "--listen", "127.0.0.1:0", "--threads", "1", *arguments],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on"), f"{line!r}; see {log}"
        self.address = line.split()[-1]

    def status(self, name: str) -> float:
        """A line of /proc/PID/status: MiB for sizes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                number = int(line.split()[1])
                return number / 1024 if line.endswith("kB") else number
        raise KeyError(name)

    @property
    def rss(self) -> float:
        """MiB resident, of this process and its children."""
        total = self.status("VmRSS")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for child in children.read_text().split() if children.exists() else ():
            try:
                total += int(Path(f"/proc/{child}/statm").read_text().split()[1]) * 4 / 1024
            except OSError:
                pass
        return total

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> int:
        """The exit status after SIGTERM; -9 where that did not help."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.log.close()
            if self.process.stdout is not None:
                self.process.stdout.close()


@dataclass
class Outcome:
    """The outcome of one flood. Memory in MiB, times in ms."""

    flood: str
    seconds: float
    sent: int = 0
    memory_before: float = 0.0
    memory_peak: float = 0.0
    memory_after: float = 0.0
    log_kib: float = 0.0
    honest_before: dict[str, Any] = field(default_factory=dict)
    honest: dict[str, Any] = field(default_factory=dict)
    honest_after: dict[str, Any] = field(default_factory=dict)
    newcomers: int = 0
    newcomers_unanswered: int = 0
    newcomer_worst: float = 0.0
    well_after: float | None = None
    """Seconds until a newcomer and the honest client were answered again, each within `WELL_SECONDS`; None: never."""
    alive: bool = False
    exit_status: int | None = None

    @property
    def good(self) -> bool:
        """Nothing lost, wrong or out of service; how slow it was is for the reader to judge."""
        spans = (self.honest_before, self.honest, self.honest_after)
        return bool(
            self.alive
            and self.well_after is not None
            and self.honest["answers"]
            and not any(span["wrong"] or span["lost"] for span in spans)
        )

    def reported(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.good}


class _Span:
    """What the honest client lived through since the last look."""

    def __init__(self, honest: Honest) -> None:
        self._honest = honest
        self._at = (0, 0, 0)

    def reported(self) -> dict[str, Any]:
        answers, wrong, lost = self._at
        honest = self._honest
        seconds = sorted(honest.seconds[answers:])
        self._at = (len(honest.seconds), len(honest.wrong), len(honest.lost))
        return {
            "answers": len(seconds),
            "wrong": len(honest.wrong) - wrong,
            "lost": len(honest.lost) - lost,
            "p50": round(1000 * seconds[len(seconds) // 2], 1) if seconds else None,
            "p99": round(1000 * seconds[int(0.99 * len(seconds))], 1) if seconds else None,
        }


def beside(name: str, seconds: float, folder: Path, arguments: tuple[str, ...] = (), quiet: float = 2.0) -> Outcome:
    """Let the flood run for so long; ``quiet``: seconds of honest work before, which tell what is usual."""
    outcome = Outcome(name, seconds)
    log = folder / f"{name.replace(' ', '_')}.log"
    server = Server(log, *arguments)
    honest = Honest(server.address)
    over = threading.Event()
    waits: list[float | None] = []

    def newcome() -> None:
        while not over.is_set():
            began = time.monotonic()
            answered = status_of(server.address, timeout=10.0) == "SERVING"
            waits.append(time.monotonic() - began if answered else None)
            over.wait(0.5)

    try:
        threading.Thread(target=honest.run, daemon=True).start()
        began = time.monotonic()
        while len(honest.seconds) < 20 and time.monotonic() < began + START_SECONDS:
            time.sleep(0.05)
        span = _Span(honest)
        span.reported()
        time.sleep(quiet)
        outcome.honest_before = span.reported()
        outcome.memory_before = server.rss
        threading.Thread(target=newcome, daemon=True).start()
        flood = subprocess.Popen(
            [sys.executable, "-m", "studies.attacks.http2.floods", name, server.address, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        peak = outcome.memory_before
        while flood.poll() is None and server.alive:
            peak = max(peak, server.rss)
            time.sleep(LOOK_SECONDS)
        assert flood.stdout is not None
        said = flood.stdout.read()
        outcome.sent = json.loads(said)["sent"] if said else 0
        outcome.honest = span.reported()
        over.set()
        ended = time.monotonic()
        for _ in itertools.takewhile(lambda _: server.alive and time.monotonic() < ended + 60, itertools.count()):
            count = len(honest.seconds) - len(honest.lost)
            tried = time.monotonic()
            if status_of(server.address, timeout=WELL_SECONDS) == "SERVING":
                while len(honest.seconds) - len(honest.lost) == count and time.monotonic() < tried + WELL_SECONDS:
                    time.sleep(0.01)
                if len(honest.seconds) - len(honest.lost) > count:
                    outcome.well_after = round(time.monotonic() - ended, 1)
                    break
        time.sleep(1.0)
        outcome.honest_after = span.reported()
        outcome.alive = server.alive
        if server.alive:
            outcome.memory_peak, outcome.memory_after = round(max(peak, server.rss)), round(server.rss)
        outcome.memory_before = round(outcome.memory_before)
    finally:
        honest.over = True
        over.set()
        outcome.exit_status = server.close()
    answered = [wait for wait in waits if wait is not None]
    outcome.newcomers, outcome.newcomers_unanswered = len(waits), len(waits) - len(answered)
    outcome.newcomer_worst = round(1000 * max(answered, default=0.0), 1)
    outcome.log_kib = round(log.stat().st_size / 1024, 1)
    return outcome
