"""Files that are read again when they change."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

State = tuple[tuple[int, int, int] | None, ...]


def state_of(paths: Iterable[Path]) -> State:
    """Compares equal while nobody touched the files; None stands for one that is not there."""
    return tuple(_state(path) for path in paths)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()  # behind links, too: a mounted secret is replaced by moving one
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
