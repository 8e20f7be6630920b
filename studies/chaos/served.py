"""The server's process: started, ended in every way, started again at its port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from studies.chaos.model import NAME, spec

ROOT: Final = Path(__file__).parents[2]
START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 60.0


class Served:
    """``cloud-server`` with the study's model. ``arguments`` are more of its own."""

    def __init__(self, folder: Path, arguments: Sequence[str] = (), port: int | None = None) -> None:
        self.folder = folder
        self.port = _free_port() if port is None else port
        self.computed = folder / "computed.txt"
        self.starts: list[float] = []
        """Seconds that each start took, until the server listened."""
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self.statuses: list[int] = []
        """With which those ended that were rolled away."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, seed: int = 0) -> None:
        """Returns when it listens."""
        began, number = time.monotonic(), len(self.starts)
        model, config, out = (self.folder / f"{name}.{number}" for name in ("model", "server", "out"))
        model, config = model.with_suffix(f".{number}.toml"), config.with_suffix(f".{number}.toml")
        model.write_text(spec(seed), encoding="utf-8")
        path = json.dumps(str(self.computed))
        config.write_text(
            f"threads = 1\n[models]\n{NAME} = {json.dumps(str(model))}\n"
            f'[lifecycle]\nhooks = [{{ hook = "studies.chaos.counting:Computed", options = {{ path = {path} }} }}]\n',
            encoding="utf-8",
        )
        command = [sys.executable, "-u", "-m", "cloud_server", str(config), "--listen", f"127.0.0.1:{self.port}"]
        command += ["--reuse-port", "--log-level", "warning", *self._arguments]
        with out.open("wb") as stdout, (self.folder / "server.log").open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        while b"listening on" not in out.read_bytes():
            if self._process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"the server did not start; see {self.folder / 'server.log'}")
            time.sleep(0.02)
        self.starts.append(time.monotonic() - began)

    def roll(self) -> float:
        """Another one beside the one that serves, which then drains; on command."""
        old = self._process
        assert old is not None
        self.start()
        reported = time.monotonic()
        old.send_signal(signal.SIGTERM)
        self.statuses.append(old.wait(STOP_SECONDS))
        return reported

    def send(self, number: int) -> None:
        """SIGSTOP and SIGCONT, for two; nothing is waited for."""
        os.kill(self.pid, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal; the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.send(signal.SIGCONT)
            self.end()

    def workers(self) -> list[int]:
        """The processes that compute for it, if it has any."""
        found = []
        for children in Path(f"/proc/{self.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return sorted(found)


def _free_port() -> int:
    """Below the ephemeral ports, so that no other process is given it while the server is away."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port below 32000")
