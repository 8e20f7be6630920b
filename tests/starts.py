"""Processes of Python (servers, their workers, edges, those of studies), forked from one that has imported torch.

A start takes a fraction of a second of processor time, where a new interpreter takes five. What is tested about the
start itself (its signals, its imports, its environment) starts an interpreter (`subprocess`). The worker
processes of a forked server are forked from a child that it starts before it has threads.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

ROOT: Final = Path(__file__).parents[1]
LANGUAGE_MODEL: Final = "transformers.models.llama.modeling_llama"
MODULES: Final = [
    "torch",
    "torch._dynamo",
    "cloud_server.cli",
    "edge_client.client",
    "edge_client.commands.run",
    LANGUAGE_MODEL,
]
"""What the parent of all has imported; torch._dynamo because the first meta kernel does. Nothing that starts threads:
they would be lost in its children."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_FORKS_WORKERS: Final = "forks-workers"
_ADOPTING: Final = threading.Lock()
ADOPTED_SECONDS: Final = 60.0
"""Within which a process is this one's child, on a busy machine."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Forked(subprocess.Popen[Any]):
    """As `subprocess.Popen`, of ``python -m MODULE`` and ``python -c PROGRAM``; all else is started as ever, and
    everything where there is no Linux. It ends when this process does.

    Like any other it is a child of this process: who forks it ends at once, while orphans are sent here.
    """

    def __init__(
        self, command: Sequence[str], *, preexec_fn: Any = None, start_new_session: bool = False, **more: Any
    ) -> None:
        words = [*command[:1], *(word for at, word in enumerate(command[1:]) if at or word != "-u")]
        self._forked = sys.platform == "linux" and words[0] == sys.executable and words[1:2] in (["-m"], ["-c"])
        self._words, self._own_session = words[1:], start_new_session
        if not self._forked:
            more.update(preexec_fn=preexec_fn, start_new_session=start_new_session)
        super().__init__(command, **more)

    def _execute_child(self, *given: Any) -> None:
        if not self._forked:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        _, _, _, _, pass_fds, cwd, env, _, _, _, *pipes = given[:16]
        ours = {number: fd if fd != -1 else number for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))}
        files = {number: _Given(fd) for number, fd in {**ours, **{fd: fd for fd in pass_fds}}.items()}
        begun = {**os.environ} if env is None else dict(env)
        context = _context()
        here, there = context.Pipe(duplex=False)
        reported = there, self._words, str(cwd or Path.cwd()), begun, files, os.getpid(), self._own_session
        between = context.Process(target=_fork, args=reported, daemon=True)
        try:
            with here, _orphans_come_here():
                between.start()
                there.close()
                self.pid = here.recv()
                between.join()
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Started(Forked):
    """``python -m module words``, with pipes of text."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stderr: int = subprocess.PIPE,
    ) -> None:
        if module == "cloud_server" and "--trials" not in words and words[:1] not in (["token"], ["doctor"]):
            words = [*words, "--trials", "never"]  # which take seconds; tests/cloud_server/processes/test_trials.py
        command = [sys.executable, "-m", module, *words]
        super().__init__(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8")


def run(command: Sequence[str], *, timeout: float = 150.0, **more: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with what it prints, which is text."""
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class InPlaceOfMultiprocessing:
    """What a module finds as ``multiprocessing``: new interpreters are forked from the one of `Forked`."""

    @staticmethod
    def get_context(method: str) -> ForkServerContext:
        assert method == "spawn"
        return _context()


class InPlaceOfSubprocess:
    """What a module finds as ``subprocess``: see `Forked`."""

    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired
    Popen = Forked


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` fills, for all of a run's processes: the first that asks makes it."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / name).exists():
            part = factory.mktemp(name)
            make(part)
            part.rename(root / name)
    return root / name


@contextmanager
def forked(*names: str) -> Iterator[None]:
    """What modules start by what they call so (``module.subprocess``, ``module.multiprocessing``) is forked."""
    instead = {"subprocess": InPlaceOfSubprocess, "multiprocessing": InPlaceOfMultiprocessing}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(name, instead[name.rpartition(".")[2]])
        yield


@contextmanager
def _orphans_come_here() -> Iterator[None]:
    """Those of all that this process has started, and of what these have."""
    prctl = ctypes.CDLL(None).prctl
    with _ADOPTING:
        assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class _Given:
    """An open file that the new process gets, too."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self._fd),)


def _taken(given: Any) -> int:
    return int(given.detach())


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # read when the libraries are loaded
    try:
        forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _fork(
    reported: Connection,
    words: list[str],
    cwd: str,
    env: dict[str, str],
    files: dict[int, int],
    parent: int,
    own_session: bool,
) -> None:
    """In the process between: as ``python words`` in one of its own, with ``files`` at the numbers it knows them by."""
    gc.freeze()  # no collection of the new process looks at, and so copies, what was imported
    if pid := os.fork():
        reported.send(pid)
        return
    reported.close()
    if own_session:
        os.setsid()
    limit = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() != parent:
        if time.monotonic() > limit:  # there is nobody to be a child of
            os._exit(1)
        time.sleep(0.001)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, b"python")
    above = {fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(files)): number for number, fd in files.items()}
    for fd in files.values():
        os.close(fd)
    for fd, number in above.items():
        os.dup2(fd, number)
        os.close(fd)
    if (
        words[:2] == ["-m", "cloud_server"]
        and any(word.startswith("--worker") for word in words)
        and sys.version_info < (3, 14)
    ):
        _fork_workers()  # later versions authenticate whoever asks for a fork
    os._exit(_run(words, cwd, env))


def _fork_workers() -> None:
    """Start the process that this server's workers are forked from, while there are no threads yet."""
    from cloud_server.processes import worker_process

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{_FORKS_WORKERS}-{os.getpid()}")
    listener.listen()
    one, address, (alive, ours) = forkserver._forkserver, listener.getsockname().decode(), os.pipe()  # type: ignore[attr-defined]
    one._forkserver_pid = os.fork()
    if not one._forkserver_pid:
        os.close(ours)
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_NAME, _FORKS_WORKERS.encode())
        forkserver.main(listener.fileno(), alive, [])
        os._exit(0)
    os.close(alive)
    listener.close()
    one._forkserver_address, one._forkserver_alive_fd = address, ours
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    worker_process.subprocess = InPlaceOfSubprocess  # type: ignore[attr-defined]


def workers_of(server: int) -> list[psutil.Process]:
    """The worker processes of a server that was forked here."""
    return [one for one in psutil.Process(server).children() if one.name() != _FORKS_WORKERS]


def _run(words: list[str], cwd: str, env: dict[str, str]) -> int:
    """The exit status."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd]
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=False)
        else:
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status
