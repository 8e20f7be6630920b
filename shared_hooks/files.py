"""Files that are there whole or not at all, and files of lines of JSON of which each is on the disk or not there.

A power cut or a full disk leaves what was there before. Of a `Journal` a line that an interruption cut off is dropped
when the file is read again, a full disk is reported and leaves no half line, and two processes cannot write to one
file.
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


BEGINNING: Final = b'{"'
"""How every record begins: a file that begins otherwise is somebody's own."""


class JournalFile:
    """Opened or made at ``path`` for ``option``, which messages name; ``kind`` is what else may hold its lock."""

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
        """Lets the file and its lock go."""
        os.close(self._file)

    def write(self, record: dict[str, Any]) -> None:
        """One line, on the disk when this returns; all of it or nothing. Raises SpecError, for a full disk for one."""
        data = json.dumps(record, separators=(",", ":"), allow_nan=True).encode() + b"\n"
        good = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, good)  # else what is written next would go on in the middle of this line
            raise SpecError(f"{self._option}: {self.path} cannot be written: {error.strerror}") from error

    def clear(self) -> None:
        """Nothing is in it any more."""
        os.ftruncate(self._file, 0)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number (from 1) and bytes of each line; an end that was cut off is taken away."""
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
        """A line's record. Raises SpecError naming the line."""
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
        except ImportError:  # a system without: two at once are the user's to avoid
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SpecError(f"{self._option}: another {self._kind} is writing to {self.path}") from error
