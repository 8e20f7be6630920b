"""What a sweep has measured so far: one line of JSON per finished input, on the disk before the next one starts.

The first line says what the sweep is of, the second (if there is one) what was predicted. A line that an interruption
cut off is dropped when the journal is read again: at most that one input is lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from edge_client.journal import JournalFile
from edge_client.spoken import option
from edge_client.sweeping.settings import Settings, difference
from shared_hooks.errors import SpecError

NAME: Final = "journal.jsonl"
FORMAT: Final = "isthmus sweep 1"
RESULTS: Final = (
    "rows.csv",
    "rows.parquet",
    "requests.csv",
    "requests.parquet",
    "summary.json",
    "report.html",
    "observations.jsonl",
)

Entry = dict[str, Any]
"""{"index", "input", "repetitions", "requests": columns, "rows": columns, "notes": [[column, status, note, count]]},
and "observed" where observers were asked for, with "picture" where the input is one of the first, and an image.
"""


_OURS: Final = b'{"format":"isthmus sweep '
_ENTRY: Final = re.compile(rb'\{"index":(\d+),')
"""How the line of an input begins."""


@dataclass
class Contents:
    """What a journal holds beside what was measured. ``done``: numbers of the inputs that were; ``skipped``: ways that
    this server does not go, and why.
    """

    settings: Settings | None = None
    prediction: dict[str, Any] | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)


class Journal:
    """The journal in a folder; made by `open_journal`. One process at a time (a lock that ends with the process)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self._file = JournalFile(self.path, option("out"), "sweep")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """One line, on the disk when this returns; all of it or nothing. Raises SpecError, for a full disk for one."""
        self._file.write(record)

    def begin(self, settings: Settings, fresh: bool) -> Contents:
        """Start, or go on; what there is. Raises SpecError naming what is not as it was, unless ``fresh``: then all
        starts over.
        """
        if fresh:
            with self.path.open("rb") as file:
                if (first := file.readline()) and not first.startswith(_OURS):
                    raise SpecError(f"{option('out')}: {self.path} does not belong to a sweep and is left alone")
            self._file.clear()
            for name in RESULTS:
                (self.folder / name).unlink(missing_ok=True)
        contents = self.read()
        if contents.settings is None:
            self.write({"format": FORMAT, "settings": settings})
            return Contents(settings)
        if changed := difference(contents.settings, settings):
            raise SpecError(
                f"{self.folder} holds another sweep ({changed}); give another folder, or {option('fresh')} to start "
                "over"
            )
        return contents

    def read(self) -> Contents:
        """All but what was measured; an end that was cut off is taken away. Raises SpecError for what is no journal."""
        contents = Contents()
        for number, line in self._file.lines():
            if (entry := _ENTRY.match(line)) and contents.settings is not None:
                contents.done.append(int(entry.group(1)))
                continue
            record = self._file.parsed(number, line)
            if number == 1:
                if record.get("format") != FORMAT or not isinstance(record.get("settings"), dict):
                    raise SpecError(f'{self.path}: not a journal of this version ("{FORMAT}"); give another folder')
                contents.settings = record["settings"]
            elif "prediction" in record:
                contents.prediction = record["prediction"]
            elif "skipped" in record:
                contents.skipped[record["skipped"]] = record["why"]
        return contents

    def entries(self) -> Iterator[Entry]:
        """What was measured, one input at a time: a sweep may be larger than memory likes."""
        for number, line in self._file.lines():
            if _ENTRY.match(line):
                yield self._file.parsed(number, line)


def open_journal(folder: str | os.PathLike[str]) -> Journal:
    """The journal of a folder, which is made. SpecError when it cannot be, or holds something else."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(entry.name for entry in path.iterdir()) if not (path / NAME).exists() else []
    except OSError as error:
        raise SpecError(f"{option('out')}: {path} cannot be a folder of results: {error.strerror}") from error
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise SpecError(f"{option('out')}: {path} holds something else ({shown}); give an empty or a new folder")
    return Journal(path)
