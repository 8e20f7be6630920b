"""``python -m cloud_server`` and ``python -m edge_client`` as processes, forked from one that has imported torch.

A start takes half a second of processor time, where a new interpreter takes five. What is tested about the start itself
(its signals, its imports, its environment) starts an interpreter (`subprocess`).
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parents[1]
MODULES: Final = ["torch", "torch._dynamo", "cloud_server.cli", "edge_client.client", "edge_client.commands.run"]
"""What the parent of all has imported; torch._dynamo because the first meta kernel does. Nothing that starts threads:
they would be lost in its children."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Started:
    """A process; as much of `subprocess.Popen` as the tests use, and in its words. Output is text."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
    ) -> None:
        self.args = [sys.executable, "-m", module, *words]
        ends: list[int] = []
        self.stdout, out = _way(stdout, ends)
        self.stderr, err = _way(stderr, ends)
        begun = {**os.environ} if env is None else dict(env)
        context = _context()
        given = (module, list(words), str(cwd or Path.cwd()), begun, _Given(out), _Given(err))
        self._process = context.Process(target=_run, args=given, daemon=True)
        try:
            self._process.start()
        finally:
            for end in ends:
                os.close(end)
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it still prints, once it has ended. TimeoutExpired after ``timeout`` seconds."""
        texts = ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            with stream:
                texts[index] = stream.read()

        pipes = [(index, stream) for index, stream in enumerate((self.stdout, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=pipe, daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[0], texts[1]


class InPlaceOfSubprocess:
    """What a module finds as ``subprocess``: ``python -u -m MODULE`` is forked, all else is started."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], *, stdout: IO[Any], stderr: IO[Any], env: Mapping[str, str], **more: Any) -> Any:
        if list(command[:3]) != [sys.executable, "-u", "-m"]:
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, **more)
        return Started(command[3], command[4:], env=env, stdout=stdout, stderr=stderr)


class _Given:
    """An open file that the new process gets, too."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self._fd),)


def _taken(given: Any) -> int:
    return int(given.detach())


def _way(wanted: int | IO[Any] | None, ends: list[int]) -> tuple[IO[str] | None, int]:
    """Where this side reads, if it does, and what the other writes to; what is to be closed here is put to ``ends``."""
    if wanted == subprocess.PIPE:
        read, write = os.pipe()
        ends.append(write)
        return os.fdopen(read, encoding="utf-8"), write
    if wanted == subprocess.DEVNULL:
        ends.append(write := os.open(os.devnull, os.O_WRONLY))
        return None, write
    assert wanted is not None and not isinstance(wanted, int)
    return None, wanted.fileno()


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # read when the libraries are loaded
    try:
        from multiprocessing.forkserver import ensure_running

        ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _run(module: str, words: list[str], cwd: str, env: dict[str, str], out: int, err: int) -> None:
    """In the new process: as ``python -m module words``."""
    for fd, number in ((out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd]
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    finally:
        atexit._run_exitfuncs()
