"""The memory in which payloads lie: one file without a name, mapped once by the server and by every worker.

A named segment would need /dev/shm, which has 64 MB in a container. The file is as large as all that limits allow at a
time and takes only the pages that are touched. A block is taken from the lowest free place, so the same pages are used
again and again, and faults are paid once; what lies beyond `KEPT_BYTES` goes back to the system when it is free.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import numpy as np

from shared_hooks.errors import ServerUnavailable

KEPT_BYTES = 64 << 20
"""Free memory that stays mapped and touched, in whole pages from the start of the file."""

_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", None)  # Linux


class Ranges:
    """Which parts of ``size`` are free: the lowest that fits is taken, neighbours grow together again."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._lengths = {0: size}

    def take(self, length: int) -> int | None:
        """Where ``length`` begin that were free; None where no free range is as long."""
        for start in self._starts:
            free = self._lengths[start]
            if free >= length:
                self._remove(start)
                if free > length:
                    self._insert(start + length, free - length)
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """The reverse of `take`."""
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
    """The file as one process sees it. ``fd`` stays the caller's."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.base = address(memoryview(self._map))

    def array(self, start: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A part of it; whatever is made of it keeps this array alive. Raises ValueError beyond the end."""
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at {start} of {self.nbytes}")
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def offset(self, view: memoryview) -> int:
        """Where a view begins, counted from the start of the file; negative or beyond it for memory from elsewhere."""
        return address(view) - self.base

    def forget(self, start: int, nbytes: int) -> None:
        """The pages' content goes back to the system, where it can do that."""
        if nbytes > 0 and _MADV_REMOVE is not None:
            self._map.madvise(_MADV_REMOVE, start, nbytes)


class SharedMemory:
    """The server's side: hands out blocks. Any thread may call."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _pages(nbytes)
        self.fd = _file(self.nbytes)
        self.mapping = Mapping(self.fd, self.nbytes)
        self._lock = threading.Lock()
        self._free = Ranges(self.nbytes)
        self._given: deque[tuple[int, int]] = deque()
        self.used_bytes = 0
        """Bytes of blocks that something refers to, in whole pages."""

    def allocate(self, nbytes: int) -> memoryview:
        """A block that is nobody else's until the last reference to it is gone. Raises ServerUnavailable."""
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
        """Called where the last reference goes, which may be in the middle of anything: even of this lock's block."""
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
        """Nothing is handed to new workers any more; blocks in use stay as they are."""
        os.close(self.fd)


def address(view: memoryview) -> int:
    """The address of the first byte."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        # by another name than clients' areas: one who claimed this file would be given others' payloads
        fd = os.memfd_create("payloads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # A worker that made it shorter would end the server at its next touch.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        return os.dup(file.fileno())
