"""Files that are there whole or not at all: a power cut or a full disk in between leaves what was there before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_hooks.errors import SpecError


def write_whole(path: str | Path, fill: Callable[[Path], Any], naming: str = "") -> None:
    """Replace a file by what ``fill`` writes to the path that it is given; on the disk when this returns.

    A pipe, a device, and a file in a folder that takes no other file (a single file mounted into a container) are
    written in place. ``naming``: the option that named the file, for the message. Raises SpecError where the file
    cannot be written, and what ``fill`` raises beside OSError.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if not _can_be_replaced(target):
            fill(target)
            return
        try:
            fill(beside)
            _to_disk(beside)
            if target.exists():
                shutil.copymode(target, beside)
            try:
                os.replace(beside, target)
            except OSError as error:
                if error.errno != errno.EBUSY:  # a single file that is mounted there
                    raise
                fill(target)
            _to_disk(target.parent)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise SpecError(
            f"{naming + ': ' if naming else ''}{path} cannot be written: {error.strerror or error}"
        ) from error


def write_bytes(path: str | Path, data: bytes, naming: str = "") -> None:
    """As `write_whole`, bytes."""
    write_whole(path, lambda made: made.write_bytes(data), naming)


def write_text(path: str | Path, text: str, naming: str = "") -> None:
    """`write_whole` of a text, in UTF-8."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"), naming)


def write_json(path: str | Path, value: Any, naming: str = "") -> None:
    """`write_whole` of JSON; ValueError for NaN and infinities, which JSON has none of."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", naming)


def _can_be_replaced(target: Path) -> bool:
    try:
        regular = stat.S_ISREG(target.stat().st_mode)
    except OSError:
        return True  # not there yet, or what is in the way is said when it is written
    return regular and os.access(target.parent, os.W_OK) and os.access(target, os.W_OK)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)
