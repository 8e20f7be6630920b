"""A ``cloud-server`` with all its doors open, at ports of its own choice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from studies.doors.material import SPLIT

ROOT = Path(__file__).parents[2]
SECONDS = 120.0


class Server:
    """As a context manager. ``grpc``, ``rest`` and ``metrics``: HOST:PORT."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._log = folder / "server.log"
        words = ["--model", "digits", "--listen", "127.0.0.1:0", "--rest-port", "0", "--metrics", "0", "--tails", SPLIT]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cloud_server", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"the server did not start: {self.log()}")
        self.grpc = line.split()[-1]
        self.metrics = self._reported(r"metrics on http://(\S+)/metrics")
        self.rest = self._reported(r"Open Inference Protocol on http://(\S+)/v2")

    def _reported(self, pattern: str) -> str:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if found := re.search(pattern, self.log()):
                return found[1]
            time.sleep(0.05)
        raise RuntimeError(f"{pattern} is not in the log: {self.log()}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """Its exit status, after it has drained."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(SECONDS)
