"""Memory in which payloads lie for a server on the same machine: they are copied twice, and cross no socket.

It is a memfd, so nothing has a name that could stay behind, and a server opens it by looking into this process
(``/proc/PID/fd/FD``): the system decides whether it may. Who cannot read the nonce at its beginning does not use it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Iterable
from typing import Final

from protos.isthmus.v1 import split_pb2

PAGE: Final = 4096
NONCE_BYTES: Final = 16
LEAST: Final = 32 << 10
"""Bytes of a payload that is worth it."""


class Area:
    """One stream's ``nbytes`` of memory; pages that were never written take none. A payload lies in it until `free`.

    One thread at a time calls all but `write`, of which another fills what `take` gave.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there is no such memory."""
        self._fd = os.memfd_create("isthmus-area", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, nbytes)
            self._memory = mmap.mmap(self._fd, nbytes)
        except OSError:
            os.close(self._fd)
            raise
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory[:NONCE_BYTES] = self._nonce
        self._taken: dict[int, tuple[int, int]] = {}

    @classmethod
    def made(cls, nbytes: int) -> Area | None:
        """One where this system has such memory, and any is wanted."""
        if sys.platform != "linux" or nbytes <= PAGE:
            return None
        try:
            return cls(nbytes)
        except OSError:
            return None

    def description(self) -> split_pb2.Area:
        """What a server has to know."""
        return split_pb2.Area(pid=os.getpid(), fd=self._fd, nbytes=len(self._memory), nonce=self._nonce)

    def take(self, request_id: int, nbytes: int) -> int | None:
        """The offset of a place for a payload; None where no gap is large enough."""
        start = PAGE
        for taken, end in sorted(self._taken.values()):
            if start + nbytes <= taken:
                break
            start = -(-end // PAGE) * PAGE
        if start + nbytes > len(self._memory):
            return None
        self._taken[request_id] = start, start + nbytes
        return start

    def write(self, offset: int, buffers: Iterable[memoryview]) -> None:
        """Copies ``buffers`` there, one after the other."""
        for buffer in buffers:
            if buffer.nbytes:
                self._memory[offset : offset + buffer.nbytes] = buffer.cast("B")
                offset += buffer.nbytes

    def free(self, request_id: int) -> None:
        """Nobody reads that payload any more; may be repeated."""
        self._taken.pop(request_id, None)

    def close(self) -> None:
        """Nobody opens it any more; the memory goes with the last who refers to it."""
        os.close(self._fd)
