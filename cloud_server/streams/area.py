"""A client's memory on this machine, from which its payloads are read instead of from the stream.

Whose it is: the client names a file of its own process, and the system decides whether this one may look into that. It
is used only if it is memory (nothing that could block, or do something when it is read) and begins with the nonce of
the greeting, which tells it from another process's of that number, on another machine or in another container.

It is read by a system call, never mapped: the client may shrink it, punch holes into it or write to it at any time. A
short read fails its request, holes cost nothing, and what was read is the server's own.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import sys

from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame

NONCE_BYTES = 16
MOST = 1 << 40
LOCAL = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
"""How gRPC's names of peers begin that are on this machine."""
NAME = "/memfd:isthmus-area"
"""No server's own memory is called so, an earlier version's neither: it was "isthmus"."""


class Area:
    """To be had from `opened`. One thread calls."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        self._nbytes = nbytes

    @classmethod
    def opened(cls, reported: split_pb2.Area, peer: str) -> Area | None:
        """What a client on ``peer`` described; None where it cannot be used, whatever the reason: then chunks come."""
        if sys.platform != "linux" or not peer.startswith(LOCAL) or len(reported.nonce) != NONCE_BYTES:
            return None
        if not NONCE_BYTES < reported.nbytes <= MOST:
            return None
        path = f"/proc/{reported.pid}/fd/{reported.fd}"
        try:
            if not os.readlink(path).startswith(NAME):  # before it is opened, which may have effects
                return None
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.fcntl(file, fcntl.F_GET_SEALS)  # fails for all that is not memory
            if hmac.compare_digest(os.pread(file, NONCE_BYTES, 0), reported.nonce):
                return cls(file, reported.nbytes)
        except OSError:
            pass
        os.close(file)
        return None

    def read(self, offset: int, into: memoryview) -> None:
        """All of ``into``. Raises BadFrame where there is less."""
        if offset + into.nbytes > self._nbytes:
            raise BadFrame(f"{into.nbytes} bytes at {offset} of an area of {self._nbytes}")
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(self._file, [into[done:]], offset + done)
            except OSError as error:
                raise BadFrame(f"the client's area cannot be read: {error.strerror}") from error
            if count <= 0:
                raise BadFrame(f"the client's area ends after {offset + done} bytes")
            done += count

    def close(self) -> None:
        """Nothing is read any more: the file's number may be another's now."""
        os.close(self._file)
        self._file = -1
