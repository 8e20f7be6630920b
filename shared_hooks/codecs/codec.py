"""`Codec`: what turns a tensor's bytes into fewer, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Codec(ABC):
    """Lossless, and without state: one object serves every thread.

    What is decoded comes from strangers. So a codec says how far its bytes can expand (`grows`), which is checked on
    the announced sizes before anything is allocated, and `decode` never makes more than it is asked for.
    """

    name: ClassVar[str]
    """On the wire and on the command line."""

    grows: ClassVar[int]
    """A byte of `encode` stands for so many bytes at most."""

    @abstractmethod
    def encode(self, data: memoryview) -> memoryview:
        """``data`` (one byte or more), encoded. What has not become smaller is sent raw by the caller."""

    @abstractmethod
    def decode(self, data: memoryview, nbytes: int) -> memoryview:
        """The ``nbytes`` bytes that `encode` took: writable memory of their own, or ``data`` itself.

        Raises ValueError for anything but an encoding of ``nbytes`` bytes, before more than that is allocated.
        """

    def can_be(self, encoded: int, nbytes: int) -> bool:
        """Whether ``encoded`` bytes may stand for ``nbytes``."""
        return nbytes <= self.grows * max(encoded, 1)
