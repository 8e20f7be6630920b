"""Every model in a process of its own, forked from one that has the library loaded: a crash is a line of the table."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from studies.library.check import Sample, check, short
from studies.library.subject import NotUsable, Subject

GRACE_S = 12.0  # for a cut that was begun in time, and for building
CROWDED = 8.0  # how many times longer than its processor time a model may take on a busy machine


def look(subject: Subject, sample: Sample, memory_bytes: int) -> dict[str, Any]:
    """The record of one model. ``status``: ran, unusable (the model by itself), timeout, crash."""
    started = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(subject, sample, memory_bytes, writing)
    os.close(writing)
    record: dict[str, Any] = {"family": subject.family, "name": subject.name, "status": "crash", "cuts": {}}
    limit = started + CROWDED * (sample.seconds + GRACE_S)
    for line in _lines(reading, limit):
        _note(record, json.loads(line))
    os.close(reading)
    if time.monotonic() >= limit:
        record["status"] = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if record["status"] == "crash":
        record["exit_code"] = code
    record["seconds"] = round(time.monotonic() - started, 1)
    return record


def _lines(reading: int, limit: float) -> Any:
    rest = b""
    while (left := limit - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            return
        data = os.read(reading, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _note(record: dict[str, Any], fact: dict[str, Any]) -> None:
    """Facts of a cut go under its name; the name of a cut that is begun is kept for where a worker ends."""
    cut = fact.pop("cut", None)
    if cut is None:
        record.update(fact)
    else:
        stateful = fact.pop("stateful", None)
        if stateful is not None:
            record["stateful"] = stateful
        record["cuts"][str(cut)] = fact


def _work(subject: Subject, sample: Sample, memory_bytes: int, writing: int) -> None:
    """In the child: never returns."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(fact: dict[str, Any]) -> None:
        os.write(writing, json.dumps(fact, default=repr).encode() + b"\n")

    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        check(subject, sample, tell)
        tell({"status": "ran"})
    except NotUsable as error:
        tell({"status": "unusable", "why": short(error)})
    except BaseException as error:
        tell({"status": "unusable", "why": short(error)})
    os._exit(0)


class Journal:
    """The records so far, in a file: a sweep that is stopped continues where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.records: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.records = json.loads(path.read_text())

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Keep a record, in the file too."""
        self.records[key] = record
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self.records, separators=(",", ":")))
            new.replace(self._path)
