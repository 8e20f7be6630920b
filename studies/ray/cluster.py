"""The nodes of a Ray cluster, all on loopback, and ``cloud-server`` on them or as one plain process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from studies.chaos.served import ROOT, _free_port

START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 120.0
OBJECT_STORE_BYTES: Final = 80 << 20

# Before Ray is loaded: no telemetry, and nothing listens beyond loopback.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


class Nodes:
    """A cluster of nodes on this machine, each of them ``cpus`` strong as far as Ray knows."""

    def __init__(self, count: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        one = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**one, "include_dashboard": False})
        self.workers: list[Any] = [self._cluster.add_node(**one) for _ in range(count - 1)]
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill(self) -> None:
        """A worker node is gone with all that it has, at once."""
        self._cluster.remove_node(self.workers.pop(), allow_graceful=False)

    def add(self) -> None:
        self.workers.append(self._cluster.add_node(num_cpus=self._cpus, object_store_memory=OBJECT_STORE_BYTES))

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def nodes(count: int, cpus: int = 4) -> Iterator[Nodes]:
    made = Nodes(count, cpus)
    try:
        yield made
    finally:
        made.close()


class Server:
    """``cloud-server`` with ``words``; on the cluster at ``ray`` if there is one."""

    def __init__(self, folder: Path, words: Sequence[str], ray: str = "") -> None:
        self.port = _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._ray = bool(ray)
        command = [sys.executable, "-u", "-m", "cloud_server", *words, "--listen", self.address, "--threads", "1"]
        command += ["--on", "ray"] if ray else []
        out = folder / f"server.{self.port}.out"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_SERVE_LOG_TO_STDERR": "0"}
        env |= {"RAY_ADDRESS": ray} if ray else {}
        began = time.monotonic()
        with out.open("wb") as stdout, (folder / "server.log").open("ab") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=ROOT, env=env
            )
        while b"listening on" not in out.read_bytes():
            if self._process.poll() is not None or time.monotonic() - began > START_SECONDS:
                self.close()
                raise RuntimeError(f"the server did not start; see {folder / 'server.log'}")
            time.sleep(0.05)
        self.start_seconds = time.monotonic() - began

    def deploy_again(self) -> None:
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> int:
        """Its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextmanager
def server(folder: Path, words: Sequence[str], ray: str = "") -> Iterator[Server]:
    made = Server(folder, words, ray)
    try:
        yield made
    finally:
        made.close()


def processes(deployment: str) -> dict[int, psutil.Process]:
    """Those of a deployment's replicas, as Ray calls them, by process id."""
    found = {}
    for one in psutil.process_iter():
        try:
            line = one.cmdline()
        except psutil.Error:
            continue
        if line and line[0].startswith(f"ray::ServeReplica:isthmus:{deployment}"):
            found[one.pid] = one
    return found
