"""The two machines of an experiment: a cloud server and a relay on one core, an edge held to a share of the other.

    edge (a quarter of core 0) --- token buckets --- relay (latency) --- cloud server (core 1)

Everything ends with the `Testbed`; the edge's processes are started by `edge` and belong to whoever starts them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from edge_client.process import end_with_parent
from studies.experiments.core import Core
from studies.experiments.network import CLOUD, CLOUD_ADDRESS, EDGE, Network, inside

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "models"
EDGE_CORE, CLOUD_CORE = 0, 1
EDGE_SHARE = 0.25
SERVER_PORT, RELAY_PORT = 50051, 50052
SERVER = f"{CLOUD_ADDRESS}:{RELAY_PORT}"
"""Where the edge finds the server: at the relay."""


def reference(model: str) -> str:
    """What ``--model`` takes for a model of the experiments, or for one that ships."""
    file = MODELS / f"{model}.toml"
    return str(file) if file.exists() else model


class Testbed:
    """Network, latency, cores and a cloud server with ``models``; use as a context manager."""

    __test__ = False  # pytest: not a class of tests

    def __init__(self, models: Sequence[str], rtt_ms: float = 20.0, share: float = EDGE_SHARE) -> None:
        self.models, self.rtt_ms, self.share = tuple(models), rtt_ms, share
        self.network = Network()
        self._all = contextlib.ExitStack()

    def __enter__(self) -> Testbed:
        with self._all:
            self._all.enter_context(self.network)
            self.network.rate(1000)
            self._edge_core = self._all.enter_context(Core("edge", EDGE_CORE, self.share))
            self._cloud_core = self._all.enter_context(Core("cloud", CLOUD_CORE))
            self.start_server()
            self._all.callback(self.stop_server)
            self.await_server()
            words = [f"{CLOUD_ADDRESS}:{RELAY_PORT}", f"127.0.0.1:{SERVER_PORT}", str(self.rtt_ms / 2)]
            self._relay = self._start(self._cloud_core, CLOUD, "studies.experiments.relay", *words)
            self._all.callback(_end, self._relay)
            _read_listening(self._relay)
            self._all = self._all.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._all.close()

    def start_server(self) -> None:
        """The cloud server; see `await_server`."""
        words = ["--listen", f"127.0.0.1:{SERVER_PORT}", "--threads", "1", "--log-level", "error"]
        for model in self.models:
            words += ["--model", reference(model)]
        self._server = self._start(self._cloud_core, CLOUD, "cloud_server", *words)

    def await_server(self) -> None:
        """Until it is ready."""
        _read_listening(self._server)

    def stop_server(self) -> None:
        """Killed, as if its machine had lost its power."""
        _end(self._server, signal.SIGKILL)

    def relay(self, order: str) -> None:
        """One line of `relay`'s, obeyed."""
        assert self._relay.stdin is not None and self._relay.stdout is not None
        self._relay.stdin.write(order + "\n")
        self._relay.stdin.flush()
        if self._relay.stdout.readline() != "ok\n":
            raise OSError(f"the relay did not obey {order!r}")

    @contextlib.contextmanager
    def edge(self, module: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """``python -m module words`` on the edge, its standard input and output here; at full speed until `slow`."""
        process = self._start(None, EDGE, module, *words)
        try:
            os.sched_setaffinity(process.pid, {EDGE_CORE})
            yield process
        finally:
            _end(process)

    def slow(self, process: subprocess.Popen[str]) -> None:
        """From here on the edge has its share of the core and no more."""
        self._edge_core.hold(process.pid)

    def _start(self, core: Core | None, namespace: str, module: str, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            inside(namespace, sys.executable, "-m", module, *words),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent(signal.SIGKILL),
            start_new_session=True,  # Ctrl-C reaches the experiment, which ends its processes in order
        )
        if core is not None:
            core.hold(process.pid)
        return process


def _read_listening(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        raise OSError(f"{' '.join(map(str, process.args))} did not start")  # type: ignore[arg-type]


def _end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    if process.poll() is None:
        process.send_signal(number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
