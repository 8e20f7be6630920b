"""Write files atomically, and append lines of JSON of which each is complete or absent.

A power cut or a full disk leaves the old contents. In a journal, a line cut off by an interruption is dropped when the
file is read again, a full disk is reported and leaves no partial line, and two processes cannot write to one file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from shared_hooks.errors import SpecError


def write_whole(path: str | Path, fill: Callable[[Path], Any], naming: str = "") -> None:
    """Replace a file by what ``fill`` writes to the path it is given; on the disk on return.

    A pipe, a device, and a file in a folder that accepts no other file (a single file mounted into a container) are
    written in place. ``naming``: the option that named the file, for the message. Raises SpecError if the file cannot
    be written, and exceptions of ``fill`` other than OSError.
    """
    target = Path(os.path.realpath(path))  # a link is kept
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
    """Write bytes, as `write_whole`."""
    write_whole(path, lambda made: made.write_bytes(data), naming)


def write_text(path: str | Path, text: str, naming: str = "") -> None:
    """Write text in UTF-8, as `write_whole`."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"), naming)


def write_json(path: str | Path, value: Any, naming: str = "") -> None:
    """Write JSON, as `write_whole`. Raises ValueError for NaN and infinities, which JSON does not have."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", naming)


def make_folder(path: str | Path, naming: str) -> Path:
    """Return the folder, created with its parents if missing. Raises SpecError, as `write_whole`."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"{naming}: {path} cannot be written: {error.strerror}") from error
    return folder


def _can_be_replaced(target: Path) -> bool:
    try:
        regular = stat.S_ISREG(target.stat().st_mode)
    except OSError:
        return True  # missing so far, or an obstacle is reported when it is written
    return regular and os.access(target.parent, os.W_OK) and os.access(target, os.W_OK)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


BEGINNING: Final = b'{"'
"""Prefix of every record: a file that starts otherwise is a user's own."""


class JournalFile:
    """A file of JSON lines at ``path``, created if missing. ``option`` is named in messages; ``kind``: other holders of
    its lock.
    """

    def __init__(self, path: Path, option: str, kind: str) -> None:
        self.path = path
        self._option, self._kind = option, kind
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise SpecError(f"{option}: {path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> JournalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file and its lock."""
        os.close(self._file)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line, atomically; it is on the disk on return. Raises SpecError, as for a full disk."""
        data = json.dumps(record, separators=(",", ":"), allow_nan=True).encode() + b"\n"
        good = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, good)  # otherwise the next record would continue in the middle of this line
            raise SpecError(f"{self._option}: {self.path} cannot be written: {error.strerror}") from error

    def clear(self) -> None:
        """Delete all lines."""
        os.ftruncate(self._file, 0)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield number (from 1) and bytes of each line; a truncated end is removed."""
        good = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if number == 1 and line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                        raise SpecError(
                            f"{self._option}: {self.path} is no journal of a {self._kind}, and is left as it is; give "
                            "another file"
                        )
                    os.ftruncate(self._file, good)
                    return
                good += len(line)
                yield number, line

    def parsed(self, number: int, line: bytes) -> dict[str, Any]:
        """Parse a line. Raises SpecError naming the line."""
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{self.path}, line {number}: not a {self._kind}'s journal: {error}") from error
        return record

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # a system without locks: the user must not run two at once
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SpecError(f"{self._option}: another {self._kind} is writing to {self.path}") from error
