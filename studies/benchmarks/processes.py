"""The other processes: a real cloud server, a bare echo server, a measurement in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NETWORKS = "studies.benchmarks.networks"


@contextmanager
def cloud(
    *models: str,
    shape: tuple[int, ...] | None,
    threads: int,
    words: Sequence[str] = (),
    module: str = NETWORKS,
    core: int | None = None,
) -> Iterator[str]:
    """A cloud server with these callables of ``module``, all planned on an input of ``shape``; yields its address.
    ``words``: more of its command line. ``core``: the one that it has for itself.
    """
    words = ["--listen", "127.0.0.1:0", "--threads", str(threads), "--log-level", "warning", *words]
    for name in models:
        words += ["--model", target(name, module)]
        words += [] if shape is None else ["--example", f"{name}={','.join(map(str, shape))}"]
    with listening("cloud_server", *words, threads=threads, core=core) as (address, _):
        yield address


def target(name: str, module: str = NETWORKS) -> str:
    """What client and server take for one callable of ``module``."""
    return f"{name}={module}:{name}"


@contextmanager
def echo(*words: str) -> Iterator[str]:
    """`echo_server` with these arguments; yields its address."""
    with listening("studies.benchmarks.echo_server", *words, threads=1) as (address, _):
        yield address


@contextmanager
def pipe(*words: str) -> Iterator[str]:
    """`pipe_server` with these arguments; yields its address."""
    with listening("studies.benchmarks.pipe_server", *words, threads=1) as (address, _):
        yield address


def probe(module: str, *words: str, threads: int = 1) -> dict[str, Any]:
    """The JSON that a module prints when it is run on its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"studies.benchmarks.{module}", *words],
        cwd=ROOT,
        env=_environment(threads),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def listening(module: str, *words: str, threads: int, core: int | None = None) -> Iterator[tuple[str, int]]:
    """Runs a module that prints "listening on ADDRESS"; yields the address and the number of its process."""
    alone = () if core is None else ("taskset", "--cpu-list", str(core))
    with subprocess.Popen(
        [*alone, sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=_environment(threads),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                raise RuntimeError(f"{module} did not start")
            yield line.split()[-1], process.pid
        finally:
            process.kill()


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}
