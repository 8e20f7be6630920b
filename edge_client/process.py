"""Start a cloud server on loopback, for measurements on one machine; it is always ended."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from edge_client.model_choice import ModelChoice
from shared_hooks.errors import ServerUnavailable, SpecError

# For a process that is killed and cannot end its children: they end by themselves.

PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """Return a ``preexec_fn`` for `subprocess.Popen`: send the signal ``number`` when this process ends. None if
    unsupported.

    Linux ends a child with its parent *thread*; only the main thread lives to the end.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    return partial(_end_with, os.getpid(), number)


def _end_with(parent: int, number: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the parent's would be lost with the new program
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent was killed before the line above, and no signal will come
        os._exit(128 + number)


ROOT: Final = Path(__file__).resolve().parents[2]
START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 10.0


@contextmanager
def local_server(
    choice: str | ModelChoice,
    *,
    observers: Sequence[str] = (),
    listen: str = "127.0.0.1:0",
    arguments: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> Iterator[str]:
    """Run ``python -m cloud_server`` with this side's ``choice`` as a process; yields HOST:PORT when it listens.

        with local_server("digits") as server, EdgeClient(server, "digits", split="auto") as client:
            ...

    The model must be given by name (else SpecError): nothing else reaches another process. ``observers``: those that it
    allows, ``arguments``: more of the server's own, ``prefix``: goes before the command (``ip netns exec ...``). Raises
    ServerUnavailable with the last lines of its log if it does not start.
    """
    command = [
        *prefix,
        sys.executable,
        "-u",
        "-m",
        "cloud_server",
        "--listen",
        listen,
        *_words_of(ModelChoice.of(choice)),
        *(f"--codec={one}" for one in _codecs()),
        *arguments,
    ]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    with tempfile.TemporaryDirectory(prefix="isthmus-server-") as folder:
        out, log = Path(folder) / "out", Path(folder) / "log"
        if observers:
            config = Path(folder) / "server.toml"
            config.write_text(f"[observers]\nallow = {json.dumps(list(observers))}\n", encoding="utf-8")
            command.append(str(config))
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches only the edge, which then ends its server
                preexec_fn=end_with_parent(),
            )
        try:
            yield _address(process, out, log)
        finally:
            _end(process)


def _words_of(choice: ModelChoice) -> list[str]:
    if not isinstance(choice.model, str):
        raise SpecError(
            "a server that is started here takes a model by its name or file, not "
            f"{type(choice.model).__name__}: start cloud-server with a spec that makes it, and give its HOST:PORT"
        )
    words = ["--model", choice.model, "--device", choice.device]
    for file in choice.weights:
        words += ["--weights", file]
    if choice.example is not None and not isinstance(choice.example, str):
        raise SpecError("a local server takes an example by words, such as 1,3,224,224; this one is tensors")
    for option, value in (
        ("--example", choice.example),
        ("--selection", choice.selection),
        ("--threads", choice.threads),
    ):
        if value is not None:
            words += [option, str(value)]
    return words


def _codecs() -> list[str]:
    """Return the codecs registered in this process, which a new one lacks."""
    registry = sys.modules.get("shared_hooks.codecs.registry")
    return [] if registry is None else registry.added()


def _address(process: subprocess.Popen[bytes], out: Path, log: Path) -> str:
    """Read the address from the line that the server prints when it is ready."""
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        status = process.poll()
        if found := re.search(r"listening on (\S+:\d+)\n", out.read_text(encoding="utf-8")):
            return found.group(1)
        if status is not None:
            raise ServerUnavailable(f"the local server ended with status {status}{_words(log)}")
        time.sleep(0.05)
    raise ServerUnavailable(f"the local server was not ready within {START_SECONDS:.0f} s{_words(log)}")


def _words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    return f": {' | '.join(lines)}" if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
