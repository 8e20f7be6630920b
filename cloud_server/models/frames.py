"""`KeptFrames`: symbols of the frames that clients refer to (codec "frames"), each client's its own, within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared_hooks.codecs.basis import References, Ring
from shared_hooks.sharing import Party, SharedCache

MOST = 65_536
"""Tensors of cuts, of all clients together."""

SHARE = 8

Key = tuple[Party, str, int]


class KeptFrames:
    """Beyond ``most_bytes`` who keeps the most loses what it has not used for longest. Any thread may call.

    One tensor's frames take a `SHARE` of them at most: what is newest is never given up, however large it is.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_of_one = most_bytes // SHARE
        self._kept: SharedCache[Key, Ring] = SharedCache(MOST, most_bytes)
        self._lock = threading.Lock()

    def of(self, party: Party, cut_digest: str) -> Callable[[int], References]:
        """What is kept of one client's frames of one cut, by the number of the piece."""
        return lambda piece: _Piece(self, (party, cut_digest, piece))

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def get(self, key: Key, number: int) -> torch.Tensor | None:
        with self._lock:
            ring = self._kept.get(key, key[0])
            return None if ring is None else ring.get(number)

    def put(self, key: Key, number: int, symbols: torch.Tensor, reference: int) -> None:
        with self._lock:
            ring = self._kept.get(key, key[0]) or Ring(self._most_of_one)
            ring.put(number, symbols, reference)
            self._kept.put(key, ring, ring.nbytes, key[0])


@dataclass(frozen=True, slots=True)
class _Piece:
    """`References` of one piece."""

    frames: KeptFrames
    key: Key
    number: int = 0

    def get(self, number: int) -> torch.Tensor | None:
        return self.frames.get(self.key, number)

    def put(self, number: int, symbols: torch.Tensor, reference: int) -> None:
        self.frames.put(self.key, number, symbols, reference)

    def latest(self) -> int:
        return 0
