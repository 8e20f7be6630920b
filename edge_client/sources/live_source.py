"""Frames that come by themselves: read in a thread of its own, which never waits for whoever takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Final, Generic, TypeVar

from edge_client.sources.source import Source
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models.frames import Frame, FrameId, Pixels

# The queue of live frames: so many wait, and the oldest is dropped.

T = TypeVar("T")


class Closed(Exception):
    """Nothing comes any more, and nothing is left."""


class Late(Exception):
    """Nothing came in time."""


class Latest(Generic[T]):
    """At most ``most`` (1 or more) things that wait to be taken, in their order. One thread puts, any thread takes."""

    def __init__(self, most: int) -> None:
        self._waiting: deque[T] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        self.dropped = 0
        """How many gave way."""

    def put(self, thing: T) -> None:
        """Never waits. After `end` it has no effect."""
        with self._changed:
            if self._ended:
                return
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(thing)
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """No more will come; ``error`` is raised in whoever has taken the last. Only the first call counts."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def ready(self, seconds: float | None) -> bool:
        """Whether `take` would not wait, now or within so long (None: as long as it takes)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._ended, seconds)

    def take(self, seconds: float | None = None) -> T:
        """The oldest that waits. Raises Late, Closed, or the error it ended with."""
        with self._changed:
            self._wait(seconds)
            return self._waiting.popleft()

    def newest(self, seconds: float | None = None) -> T:
        """A look at the newest; it stays where it is. Raises as `take`."""
        with self._changed:
            self._wait(seconds)
            return self._waiting[-1]

    def _wait(self, seconds: float | None) -> None:
        if not self.ready(seconds):
            raise Late
        if not self._waiting:
            raise self._error or Closed


KEPT: Final = 2
"""Frames that wait, by default: one is the freshest, two outlast a hitch of one frame."""
LEAVE_SECONDS: Final = 1.0
"""For the thread to end at `close`. One that a device holds ends when that returns, or with the process."""


def live(frames: Iterable[Pixels], name: str = "camera", *, queue: int = KEPT, timeout: float | None = None) -> Live:
    """A source of your own camera's frames: arrays of uint8, (height, width, 3), RGB, a new one for each.

    ``frames`` is read in another thread, as fast as it gives them, until the source is closed (a generator is closed,
    too); it ends the source when it ends, and what it raises is raised where the frame would be taken (what is no
    Exception, such as SystemExit, as InputMismatch). ``queue`` frames wait, and the oldest is dropped. ``timeout``:
    seconds without a frame after which it is given up (None: never).
    """
    return Live(frames, name, queue=queue, timeout=timeout)


class Live(Source):
    """`live` says what the arguments are."""

    live = True

    def __init__(
        self,
        frames: Iterable[Pixels],
        name: str,
        *,
        queue: int = KEPT,
        timeout: float | None = None,
    ) -> None:
        """Begins to read at once. Raises SpecError for a queue of less than 1, and for text and paths."""
        super().__init__(name)
        if isinstance(frames, (str, bytes, PurePath)):
            raise SpecError(
                "live takes an iterable of frames (arrays of uint8, (height, width, 3), RGB), "
                f"not {type(frames).__name__}: folder, video and camera take names"
            )
        if queue < 1:
            raise SpecError(f"queue={queue}: at least one frame must be able to wait")
        self._frames = frames
        self._timeout = timeout
        self._latest: Latest[tuple[int, Pixels]] = Latest(queue)
        self._dropped_before: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"frames of {name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return 0 if self._dropped_before is None else self._latest.dropped - self._dropped_before

    def first(self) -> Frame:
        """The newest, once one has come. Raises InputMismatch, and what the frames end by."""
        try:
            return self._one(self._latest.newest)
        except Closed:
            raise InputMismatch(f"{self.name}: ended without {'another' if self.taken else 'a'} frame") from None

    def wait_for_input(self, seconds: float) -> bool:
        return self._latest.ready(seconds)

    def close(self) -> None:
        self._closing.set()
        self._latest.end()
        if self._thread is not threading.current_thread():
            self._thread.join(LEAVE_SECONDS)

    def _items(self) -> Iterator[Frame]:
        if self._dropped_before is None:  # what went by before anybody asked was not dropped
            self._dropped_before = self._latest.dropped
        while True:
            try:
                frame = self._one(self._latest.take)
            except Closed:
                return
            yield frame

    def _one(self, get: Callable[[float | None], tuple[int, Pixels]]) -> Frame:
        try:
            index, pixels = get(self._timeout)
        except Late:
            raise InputMismatch(f"{self.name}: no frame for {self._timeout:g} s") from None
        return Frame(FrameId(self.name, index), pixels)

    def _read(self) -> None:
        frames: Iterator[Pixels] = iter(())
        try:
            frames = iter(self._frames)
            for index, pixels in enumerate(frames):
                if self._closing.is_set():
                    break
                self._latest.put((index, pixels))
            self._latest.end()
        except Exception as error:
            self._latest.end(error)
        except BaseException as error:  # it would end this thread alone, and the taker would wait for ever
            ended = InputMismatch(f"{self.name}: its frames ended by {error!r}")
            ended.__cause__ = error
            self._latest.end(ended)
        finally:
            if (close := getattr(frames, "close", None)) is not None:
                close()
