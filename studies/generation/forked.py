"""Every subject in a process of its own, some at once, each with limits of memory and time: a crash is a record."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from studies.library.check import short

Subject = TypeVar("Subject")
Tell = Callable[[dict[str, Any]], None]
Work = Callable[[Any, Tell], None]


@dataclass(frozen=True)
class Limits:
    """Limits of one subject: bytes of address space, and wall-clock seconds for a process that hangs."""

    memory_bytes: int = 7 << 30
    wall_seconds: float = 1800.0


class OutOfTime(Exception):
    """A case took more processor time than it may."""


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block once this process has computed that long. Main thread only."""

    def ring(*_: object) -> None:
        raise OutOfTime(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Child:
    """A process that looks at one subject and tells facts, line by line."""

    def __init__(self, subject: Any, work: Work, limits: Limits) -> None:
        self.subject = subject
        self.started = time.monotonic()
        self.limit = self.started + limits.wall_seconds
        self.record: dict[str, Any] = {"status": "crash", "cases": {}}
        self._rest = b""
        self.reading, writing = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self.reading)
            _work(subject, work, limits, writing)
        os.close(writing)

    def read(self) -> bool:
        """Take in what it has reported; False at the end."""
        data = os.read(self.reading, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        return bool(data)

    def _note(self, fact: dict[str, Any]) -> None:
        case = fact.pop("case", None)
        if case is None:
            self.record.update(fact)
        else:
            self.record["cases"][case] = fact

    def end(self, *, late: bool) -> dict[str, Any]:
        """Its record, when it is no more."""
        if late:
            self.record["status"] = "timeout"
            os.kill(self._process, signal.SIGKILL)
        os.close(self.reading)
        code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        if self.record["status"] == "crash":
            self.record["exit_code"] = code
        else:
            self.record.pop("at", None)
        return self.record | {"seconds": round(time.monotonic() - self.started, 1)}


def _work(subject: Any, work: Work, limits: Limits, writing: int) -> None:
    """In the child: never returns."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(fact: dict[str, Any]) -> None:
        os.write(writing, json.dumps(fact, default=repr).encode() + b"\n")

    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        work(subject, tell)
        tell({"status": "ran"})
    except BaseException as error:
        tell({"status": "unusable", "why": short(error)})
    os._exit(0)


def each(
    subjects: Iterable[Subject], work: Work, *, jobs: int = 1, limits: Limits | None = None
) -> Iterator[tuple[Subject, dict[str, Any]]]:
    """Pairs of a subject and its record, in the order they are done.

    ``work(subject, tell)`` tells facts of the record, and those of a case under its name: ``{"case": name, ...}``.
    ``status``: ran, unusable (``why``), timeout, crash (``at``: the case that was announced last).
    """
    limits = limits or Limits()
    todo = iter(subjects)
    running: list[_Child] = []
    while True:
        while len(running) < jobs and (subject := next(todo, None)) is not None:
            running.append(_Child(subject, work, limits))
        if not running:
            return
        left = max(0.0, min(child.limit for child in running) - time.monotonic())
        ready, _, _ = select.select([child.reading for child in running], [], [], left)
        for child in list(running):
            ended = child.reading in ready and not child.read()
            late = not ended and time.monotonic() >= child.limit
            if ended or late:
                running.remove(child)
                yield child.subject, child.end(late=late)
