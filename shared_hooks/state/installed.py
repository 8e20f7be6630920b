"""Whether a file of Python code was installed as somebody's library, or is its user's own.

Installed is what lies where an interpreter keeps its libraries, and what the record of a distribution beside it lists:
so `pip install --target` counts wherever it went, while a project that is installed to be edited stays its author's.
"""

from __future__ import annotations

import csv
import functools
import os
import sysconfig
from pathlib import Path, PurePath

_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(path + os.sep for kind, path in sysconfig.get_paths().items() if kind in _KINDS)
_NAMES = frozenset({"site-packages", "dist-packages"})
"""What interpreters call the folders of their libraries, be it another interpreter than this one."""


@functools.lru_cache(maxsize=1 << 14)
def is_installed(file: str) -> bool:
    """Whether code of this file is an installed library's, the standard one's included. Not a path, not installed."""
    path = PurePath(file)
    if not path.is_absolute():
        return False
    if file.startswith(_LIBRARIES) or not _NAMES.isdisjoint(path.parts):
        return True
    return any(path.relative_to(folder).as_posix() in _recorded(folder) for folder in path.parents)


@functools.lru_cache(maxsize=1 << 12)
def _recorded(folder: PurePath) -> frozenset[str]:
    """The files below a folder that the records of the distributions in it list."""
    found: set[str] = set()
    try:
        for record in Path(folder).glob("*.dist-info/RECORD"):
            with record.open(encoding="utf-8", newline="") as lines:
                found.update(line[0] for line in csv.reader(lines) if line)
    except (OSError, ValueError, csv.Error):  # not to be read: nothing is known of it
        pass
    return frozenset(found)
