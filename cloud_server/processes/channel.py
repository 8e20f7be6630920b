"""Messages between the server and one worker: a Unix socket with JSON and raw bytes, never objects.

A message is the number of its parts and their sizes (a u32 each), then the parts: the first is JSON, the others are raw
bytes. Payloads are not sent this way; they lie in `memory`.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_server.models import PartEnd
from shared_hooks import Crossing
from shared_hooks.errors import ServerUnavailable
from shared_hooks.lifecycle import About

# The shared memory for payloads: one file without a name, mapped once by the server and by every worker.
#
# A named segment would need /dev/shm, which has 64 MB in a container. The file is as large as the sum of what the
# limits allow and occupies only the pages that are touched. A block is taken from the lowest free place, so the same
# pages are reused and page faults are paid once; free memory beyond `KEPT_BYTES` returns to the system.


KEPT_BYTES = 64 << 20
"""Free memory that stays mapped, in whole pages from the start of the file."""

_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", None)  # Linux only


class Ranges:
    """The free ranges of ``size``: the lowest that fits is taken, adjacent ones are merged."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._lengths = {0: size}

    def take(self, length: int) -> int | None:
        """Take a free range of ``length`` and return its start; None if there is none as long."""
        for start in self._starts:
            free = self._lengths[start]
            if free >= length:
                self._remove(start)
                if free > length:
                    self._insert(start + length, free - length)
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Give back a range that was taken."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + length:
            length += self._remove(start + length)
        if at and (before := self._starts[at - 1]) + self._lengths[before] == start:
            start, length = before, self._remove(before) + length
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length

    def _remove(self, start: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        return self._lengths.pop(start)


class Mapping:
    """The shared file as mapped by one process. ``fd`` stays the caller's."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.base = address(memoryview(self._map))

    def array(self, start: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a part of it; whatever is made of it keeps this array alive. Raises ValueError beyond the end."""
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at {start} of {self.nbytes}")
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def offset(self, view: memoryview) -> int:
        """Return the offset of a view from the start of the file; negative or beyond the end for other memory."""
        return address(view) - self.base

    def forget(self, start: int, nbytes: int) -> None:
        """Give the pages back to the system, where it supports that."""
        if nbytes > 0 and _MADV_REMOVE is not None:
            self._map.madvise(_MADV_REMOVE, start, nbytes)


class SharedMemory:
    """The server's side: allocates blocks. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _pages(nbytes)
        self.fd = _file(self.nbytes)
        self.mapping = Mapping(self.fd, self.nbytes)
        self._lock = threading.Lock()
        self._free = Ranges(self.nbytes)
        self._given: deque[tuple[int, int]] = deque()
        self.used_bytes = 0
        """Bytes of blocks in use, in whole pages."""

    def allocate(self, nbytes: int) -> memoryview:
        """Return a block that is freed with the last reference to it. Raises ServerUnavailable."""
        length = _pages(nbytes)
        with self._lock:
            self._take_back()
            start = self._free.take(length)
            if start is None:
                raise ServerUnavailable(
                    f"no room for {nbytes} bytes: {self.used_bytes} of {self.nbytes} bytes of shared memory are used"
                )
            self.used_bytes += length
        block = self.mapping.array(start, nbytes)
        weakref.finalize(block, self._give_back, start, length).atexit = False
        return memoryview(block)  # type: ignore[arg-type]

    def _give_back(self, start: int, length: int) -> None:
        """Called with the last reference gone, possibly while this thread holds the lock."""
        self._given.append((start, length))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._given:
            start, length = self._given.popleft()
            self.used_bytes -= length
            beyond = max(start, KEPT_BYTES)
            self.mapping.forget(beyond, start + length - beyond)
            self._free.give(start, length)

    def close(self) -> None:
        """Close the file: new workers cannot map it any more; blocks in use stay."""
        os.close(self.fd)


def address(view: memoryview) -> int:
    """Return the address of its first byte."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        # not named like clients' areas: a client that claimed this file would be given other clients' payloads
        fd = os.memfd_create("payloads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # A worker that shrank it would crash the server at its next access.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        return os.dup(file.fileno())


MAX_PARTS = 8
MAX_BYTES = 256 << 20
"""The largest message, so that a faulty peer cannot make this side allocate more."""
READ_BYTES = 64 << 10

Message = tuple[dict[str, Any], list[bytes]]


class Lost(Exception):
    """The other side is gone, or sent something that is no message."""


class ProcessChannel:
    """One end of a channel. Sending and receiving: one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, head: dict[str, Any], *parts: bytes, seconds: float | None = None) -> None:
        """Send a message. Raises Lost, and TimeoutError if the other side does not take it within ``seconds``."""
        text = json.dumps(head, separators=(",", ":")).encode()
        sizes = struct.pack(f"<{len(parts) + 2}I", len(parts) + 1, len(text), *map(len, parts))
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(b"".join((sizes, text, *parts)))
        except TimeoutError:
            raise
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self, seconds: float | None = None) -> Message:
        """Wait for the next message. Raises Lost, and TimeoutError if none comes within ``seconds``."""
        until = None if seconds is None else time.monotonic() + seconds
        try:
            (count,) = struct.unpack("<I", self._exactly(4, until))
            if not 1 <= count <= MAX_PARTS:
                raise Lost(f"a message of {count} parts")
            sizes = struct.unpack(f"<{count}I", self._exactly(4 * count, until))
            if sum(sizes) > MAX_BYTES:
                raise Lost(f"a message of {sum(sizes)} bytes")
            text, *parts = [self._exactly(size, until) for size in sizes]
            head = json.loads(text)
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise Lost(str(error)) from error
        if not isinstance(head, dict):
            raise Lost("a message without a head")
        return head, parts

    def _exactly(self, size: int, until: float | None) -> bytes:
        while len(self._read) < size:
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            more = self._socket.recv(max(size - len(self._read), READ_BYTES))
            if not more:
                raise Lost("the other side is gone")
            self._read += more
        found = bytes(memoryview(self._read)[:size])
        del self._read[:size]
        return found

    def hang_up(self) -> None:
        """Wake a receiver on either side."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side did it first

    def close(self) -> None:
        """Close the socket. No thread may be receiving on it."""
        self.hang_up()
        self._socket.close()


# The messages to a worker.


@dataclass(frozen=True)
class RequestTask:
    """A complete request. Without a crossing its payload is an input file with this ``suffix``."""

    model_id: str
    about: About
    """For hooks in the worker."""
    account: str
    """The account that rehearsals are charged to."""
    crossing: Crossing | None
    suffix: str
    header: bytes
    payload: memoryview
    """In shared memory, or empty."""
    want_metrics: bool
    observers: tuple[str, ...]
    inexact: bool = False
    """Whether last bits other than the model's own are accepted."""
    end: PartEnd | None = None
    """Where this part ends, if others continue."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the request."""
        return self.account, self.about.client, self.about.id

    def head(self) -> dict[str, Any]:
        """Return the request's entry in a message."""
        about = self.about
        found = {
            "do": "compute" if self.crossing is not None else "file",
            "model": self.model_id,
            # with the account, to which log lines attribute a model's writes
            "about": [about.id, about.index, about.total, about.model_id, about.client, about.identity, about.account],
            "account": self.account,
            "metrics": self.want_metrics,
            "observers": self.observers,
            "inexact": self.inexact,
            "end": self.end,
        }
        return {**found, "suffix": self.suffix} if self.crossing is None else {**found, "cut": self.crossing.digest}


@dataclass(frozen=True)
class ProfileTask:
    """A profile; the fields are the arguments of `Engine.profile`."""

    model_id: str
    warmup: int
    repetitions: int
    seconds: float
    codecs: tuple[str, ...] = ()

    def head(self) -> dict[str, Any]:
        found = {"do": "profile", "model": self.model_id, "warmup": self.warmup, "repetitions": self.repetitions}
        return {**found, "seconds": self.seconds, "codecs": self.codecs}


@dataclass(frozen=True)
class ManifestTask:
    """A request for the facts behind a model's digests."""

    model_id: str

    def head(self) -> dict[str, Any]:
        return {"do": "manifest", "model": self.model_id}


@dataclass(frozen=True)
class StepTask(RequestTask):
    """The next step of the worker's decoding session with this number."""

    session: int = 0

    def head(self) -> dict[str, Any]:
        return {**super().head(), "do": "step", "session": self.session}


@dataclass(frozen=True)
class RestTask(StepTask):
    """The second half of a step in the middle of a chain. It begins with a request to the next server and continues
    with what that ``answered``, an error or a parcel; in between the worker is free for other requests.
    """

    answered: tuple[dict[str, Any], bytes] | None = None

    def head(self) -> dict[str, Any]:
        return {**super().head(), "do": "rest", "answered": self.answered and self.answered[0]}


@dataclass(frozen=True)
class StepRequest:
    """A worker's request to the next server: the arguments of `Link.step`, with packed tensors."""

    session: int
    step: int
    fork: tuple[int, int] | None
    header: bytes
    payload: bytes


@dataclass(frozen=True)
class SessionTask:
    """Opens a decoding session as the worker's number ``session``.

    It is a copy of session ``of``, or a new one after the layer ``cut``, up to the layer ``end`` in the middle of a
    chain.
    """

    model_id: str
    session: int
    cut: str = ""
    of: int = 0
    end: str = ""

    def head(self) -> dict[str, Any]:
        named = {"cut": self.cut, "of": self.of, "end": self.end}
        return {"do": "session", "model": self.model_id, "session": self.session, **named}
