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

    @classmethod
    def entered(cls, keeper: Keeper, home: Home | None, put: Callable[[], Leave]) -> Leave:
        """Puts it; the keeper has counted it already."""
        return cls(keeper, home, put).leave

    def leave(self) -> None:
        self._leave()
        home, self._home = self._home, None
        if home is not None:
            self._keeper.unpin(home)


class Deferred:
    """Something that is put later, by `go`, and may be left before or after."""

    def __init__(self, before: Leave | None = None) -> None:
        """``before``: called where it is left, to take it from where it waits to be put."""
        self.before = before
        self._lock = threading.Lock()
        self._left = False
        self._leave: Leave | None = None

    def go(self, put: Callable[[], Leave], instead: Callable[[], Leave] | None = None) -> bool:
        """Puts it now, unless it was left; whether it did. ``instead`` takes the place of ``put`` where that raises:
        whoever waits hears why when it is computed.
        """
        with self._lock:
            if self._left:
                return False
        try:
            leave = put()
        except IsthmusError:
            if instead is None:
                raise
            leave = instead()
        with self._lock:
            self._leave, is_left = leave, bool(self._left)
        if is_left:
            leave()
        return True

    def leave(self) -> None:
        if self.before is not None:
            self.before()
        with self._lock:
            self._left, leave = True, self._leave
        if leave is not None:
            leave()
