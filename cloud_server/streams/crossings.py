"""Descriptions of cuts by digest: uploaded once, used by every request at that cut, shared by all clients."""

from __future__ import annotations

import threading
from collections import OrderedDict

from cloud_server.limits import Limits
from shared_hooks import Crossing
from shared_hooks.crossing import decode, digest_of
from shared_hooks.errors import BadFrame, TooLarge


class CrossingCache:
    """The descriptions used last, bounded in number and in bytes; safe to call from several threads."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Crossing, int]] = OrderedDict()
        self._bytes = 0

    def add(self, digest: str, data: bytes) -> Crossing:
        """What these bytes say. Raises BadFrame when they are malformed or ``digest`` is not theirs, and TooLarge.

        Clients share what is kept here, so it is the digest of the bytes that counts, not the one the client claims.
        """
        if len(data) > self._limits.max_cut_bytes:
            raise TooLarge(
                f"a cut's description of {len(data)} bytes; at most {self._limits.max_cut_bytes} are accepted"
            )
        if (real := digest_of(data)) != digest:
            raise BadFrame(f'cut: the digest "{digest[:80]}" is not that of its bytes, "{real}"')
        known = self.get(digest)
        if known is not None:
            return known
        crossing = decode(data, self._limits.max_request_bytes, remember=False)
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = (crossing, len(data))
                self._bytes += len(data)
            self._kept.move_to_end(digest)
            while len(self._kept) > self._limits.max_cuts or self._bytes > self._limits.max_cuts_bytes:
                _, (_, nbytes) = self._kept.popitem(last=False)
                self._bytes -= nbytes
            return self._kept[digest][0]

    def get(self, digest: str) -> Crossing | None:
        """The description with this digest, None when it never came or was dropped for newer ones."""
        with self._lock:
            found = self._kept.get(digest)
            if found is None:
                return None
            self._kept.move_to_end(digest)
            return found[0]

    def __len__(self) -> int:
        return len(self._kept)
