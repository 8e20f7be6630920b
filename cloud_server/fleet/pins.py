"""What keeps weights in memory: requests that were put in line while the weights are there, or wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cloud_server.entries import ModelEntry
from cloud_server.models import Engine, Leave
from shared_hooks.errors import IsthmusError


@dataclass(frozen=True)
class Loaded:
    """A model in memory. ``nbytes``: of its weights, on each device that it is on. ``close`` gives them up, with the
    reason that decoding sessions hear.
    """

    entry: ModelEntry
    engine: Engine
    close: Callable[[str], None] = lambda why: None
    nbytes: Mapping[str, int] = field(default_factory=dict)
    compiled: Callable[[], Iterable[str]] = tuple
    """How its compiled tails stand (`shared_hooks.compiling.Standing`), one word for each."""
    spot_checks: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """How many batches had a part computed alone, too, and how many copies of the model make none any more for that."""


class Home:
    """Weights in memory, and how much of what was put needs them."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.pins = 0


class Keeper(Protocol):
    """Whose weights they are. Any thread may call."""

    def unpin(self, home: Home) -> None:
        """Something that was put is over."""
        ...

    def unpark(self, parked: Parked) -> bool:
        """Whether it still waited."""
        ...


def unpinned(home: Home) -> bool:
    """Whether nothing needs these weights."""
    return not home.pins


class Pinned:
    """Something that keeps weights in memory until it is left, once."""

    def __init__(self, keeper: Keeper, home: Home | None, put: Callable[[], Leave]) -> None:
        self._keeper = keeper
        self._home = home
        try:
            self._leave = put()
        except BaseException:
            if home is not None:
                keeper.unpin(home)
            raise

    def leave(self) -> None:
        self._leave()
        home, self._home = self._home, None
        if home is not None:
            self._keeper.unpin(home)


class Parked:
    """Something that waits for weights, then keeps them as `Pinned` does."""

    def __init__(self, keeper: Keeper, put: Callable[[], Leave]) -> None:
        self._keeper = keeper
        self._put = put
        self._lock = threading.Lock()
        self._left = False
        self._pinned: Pinned | None = None

    def go(self, home: Home | None) -> None:
        """It is put, and its keeper has counted it; without weights it is put to hear why there are none."""
        pinned = Pinned(self._keeper, home, self._put)
        with self._lock:
            self._pinned = pinned
            left = self._left
        if left:
            pinned.leave()

    def leave(self) -> None:
        if self._keeper.unpark(self):
            return
        with self._lock:
            self._left = True
            pinned = self._pinned
        if pinned is not None:
            pinned.leave()


class Delayed:
    """Something that waits until its cut was tried, and enters then."""

    def __init__(self, enter: Callable[[], Leave], put: Callable[[], Leave]) -> None:
        """``put`` takes the place of ``enter`` where that raises: it hears why when it is computed."""
        self._enter = enter
        self._put = put
        self._lock = threading.Lock()
        self._left = False
        self._entered: Leave | None = None

    def go(self) -> None:
        if self._is_left():
            return
        try:
            entered = self._enter()
        except IsthmusError:
            entered = self._put()
        with self._lock:
            self._entered = entered
        if self._is_left():
            entered()

    def _is_left(self) -> bool:
        with self._lock:
            return self._left

    def leave(self) -> None:
        with self._lock:
            self._left = True
            entered = self._entered
        if entered is not None:
            entered()
