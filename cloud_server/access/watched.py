"""Files that are read again when they change."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_CLOCKS_DIFFER = 60.0
"""A time of change that lies further ahead is of another clock, and says nothing."""

State = tuple[tuple[int, int, int] | None, ...]


def state_of(paths: Iterable[Path]) -> State:
    """Compares equal while nobody touched the files; None stands for one that is not there."""
    return tuple(_state(path) for path in paths)


def written_since(paths: Iterable[Path], when: float) -> bool:
    """Whether any of them was written to since then (seconds since 1970): somebody may be in the middle of it."""
    states = (one for one in state_of(paths) if one is not None)
    return any(when < changed / 1e9 <= when + _CLOCKS_DIFFER for changed, _, _ in states)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()  # behind links, too: a mounted secret is replaced by moving one
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
