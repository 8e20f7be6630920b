"""Descriptions of cuts by digest: uploaded once, used by every request at that cut, shared by all clients."""

from __future__ import annotations

import threading
from contextlib import nullcontext

from cloud_server.limits import Limits
from shared_hooks import Crossing
from shared_hooks.crossing import decode, decoded_bytes, digest_of
from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.sharing import Party, SharedCache

LARGE = 64 << 10
"""Bytes of a description from which on one is read at a time."""


class CrossingCache:
    """The descriptions used last, bounded in number and in the memory they take; safe to call from several threads.

    Each counts for the clients that used it last (`sharing`): one who brings ever new cuts pushes out its own.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._one_large = threading.Lock()
        """While it is read, a description takes as much again as afterwards."""
        self._kept: SharedCache[str, Crossing] = SharedCache(limits.max_cuts, limits.max_cuts_bytes)

    def add(self, digest: str, data: bytes, party: Party) -> Crossing:
        """What these bytes say. Raises BadFrame when they are malformed or ``digest`` is not theirs, and TooLarge.

        Clients share what is kept here, so it is the digest of the bytes that counts, not the one the client claims.
        """
        if len(data) > self._limits.max_cut_bytes:
            most = f"at most {self._limits.max_cut_bytes} are accepted (max_cut_bytes)"
            raise TooLarge(f"a cut's description of {len(data)} bytes; {most}")
        if (real := digest_of(data)) != digest:
            raise BadFrame(f'cut: the digest {digest[:80]!r} is not that of its bytes, "{real}"')
        known = self.get(digest, party)
        if known is not None:
            return known
        with self._one_large if len(data) > LARGE else nullcontext():
            crossing = decode(data, self._limits.max_request_bytes, remember=False)
        with self._lock:
            known = self._kept.get(digest, party)  # of another stream, meanwhile
            if known is None:
                self._kept.put(digest, crossing, decoded_bytes(data) + crossing.working_bytes, party)
            return known or crossing

    def get(self, digest: str, party: Party) -> Crossing | None:
        """The description with this digest, None when it never came or was dropped for others. It counts for
        ``party`` from now on.
        """
        with self._lock:
            return self._kept.get(digest, party)

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """What they take, as `decoded_bytes` and `Crossing.working_bytes` have it."""
        return self._kept.nbytes
