"""What all sources are."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.frames import Frame

if TYPE_CHECKING:
    from shared_hooks.models.inputs import InputItem

Item: TypeAlias = "InputItem | Frame"
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


# How many frames were taken, dropped and answered, and how many a second.


WINDOW_SECONDS: Final = 2.0
"""Window of the rate that is shown while it runs."""


class Tally:
    """Counts one run through ``source``; it begins now, or at `start`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._began = time.monotonic()
        self._recent: deque[float] = deque()
        self.answered = 0
        self._seconds: float | None = None
        self._dropped: int | None = None

    def start(self) -> None:
        """Count the time from now: what was before was preparation."""
        self._began = time.monotonic()

    def add(self) -> None:
        """One more answer."""
        now = time.monotonic()
        self.answered += 1
        self._recent.append(now)
        while now - self._recent[0] > WINDOW_SECONDS:
            self._recent.popleft()

    def stop(self) -> None:
        """The run is over."""
        self._seconds, self._dropped = self.seconds, self.dropped

    @property
    def seconds(self) -> float:
        """Since it began, until it stopped."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def dropped(self) -> int:
        """Until it stopped."""
        return self._source.dropped if self._dropped is None else self._dropped

    @property
    def per_second(self) -> float:
        """Answers a second over the whole time; 0 before any."""
        return self.answered / self.seconds if self.answered else 0.0

    @property
    def now_per_second(self) -> float:
        """Answers a second lately."""
        span = min(self.seconds, WINDOW_SECONDS)
        return len(self._recent) / span if span else 0.0

    def line(self) -> str:
        """While it runs."""
        return f"{self._counts()}, {self.now_per_second:.1f} frames/s"

    def summary(self) -> str:
        """At the end."""
        return f"{self._source.name}: {self._counts()}, {self.per_second:.1f} frames/s"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self._source.name,
            "live": self._source.live,
            "taken": self._source.taken,
            "dropped": self.dropped,
            "answered": self.answered,
            "seconds": self.seconds,
            "frames_per_second": self.per_second,
        }

    def _counts(self) -> str:
        return f"{self._source.taken} taken, {self.dropped} dropped, {self.answered} answered"


# Input files as a source.


def folder(*paths: str | Path) -> Files:
    """The images and tensors of a folder, by name; or a file, or of a glob; or of several of these.

    A file that is given twice comes twice. One that cannot be read fails at its place. Raises InputMismatch where there
    is none.
    """
    from shared_hooks.models.inputs import find_inputs  # which loads torch: a camera needs none

    return Files(find_inputs(paths, once=False), ", ".join(map(str, paths)))


class Files(Source):
    """So many files; `len` says how many."""

    def __init__(self, items: Sequence[InputItem], name: str) -> None:
        super().__init__(name)
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def first(self) -> InputItem:
        return self.items[0]

    def _items(self) -> Iterator[InputItem]:
        return iter(self.items)


# PyAV, which only videos and cameras need.


def check(what: str) -> None:
    """SpecError where PyAV is missing: to read ``what`` takes it."""
    if find_spec("av") is None:
        raise SpecError(f'{what}: videos and cameras need PyAV: pip install "isthmus[video]"')
