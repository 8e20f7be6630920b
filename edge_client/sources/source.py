"""What all sources are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import TypeAlias

from shared_hooks.errors import InputMismatch
from shared_hooks.models.frames import Frame
from shared_hooks.models.inputs import InputItem

Item: TypeAlias = InputItem | Frame
"""What a source gives: `ModelSpec.preprocess` takes it."""


class Source(ABC):
    """Inputs one after the other, for `EdgeClient.infer_many`; `close` it, or use ``with``."""

    name: str
    """For messages; no password is in it."""
    live: bool = False
    """Whether it continues by itself: who is slow misses frames."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken = 0
        """Inputs given until now."""
        self.broken: list[InputMismatch] = []
        """Why it ended early; of several sources, all that did."""

    @property
    def dropped(self) -> int:
        """Frames that gave way to newer ones since the first was taken."""
        return 0

    def __iter__(self) -> Iterator[Item]:
        """Raises InputMismatch where it breaks off, at its place; of several sources, after the last one."""
        self.broken = []
        try:
            for item in self._items():
                self.taken += 1
                yield item
        except InputMismatch as error:
            self.broken = self.broken or [error]
            raise

    @abstractmethod
    def first(self) -> Item:
        """What would come now, without taking it. Raises InputMismatch."""

    @abstractmethod
    def _items(self) -> Iterator[Item]: ...

    def wait_for_input(self, seconds: float) -> bool:
        """Whether the next input (or the end) is there, or comes within so long; files always are."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of the device, the file, the thread. May be repeated."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
