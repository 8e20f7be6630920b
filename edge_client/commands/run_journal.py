"""``edge-client run --journal FILE``: what became of each input, on the disk before it is shown.

The first line says what is run, every other one is an input with its outcome. The same command continues where the last
one ended: an input is not run again if its path, size and time of change are in the file. Failures that are no input's
fault (no server, too late) are not written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from edge_client.journal import JournalFile
from edge_client.request import NOT_SERVED
from edge_client.screen.text import finite
from shared_hooks.errors import Cancelled, DeadlineExceeded, SpecError
from shared_hooks.models import InputItem

FORMAT: Final = "isthmus run 1"
MAY_PASS: Final = (*NOT_SERVED, DeadlineExceeded, Cancelled)
"""Errors after which the same input may be answered another time."""

Key = tuple[str, int, int, int]


class RunJournal:
    """The journal of one run at a time. ``settings``: what must be as it was (model, weights). Raises SpecError naming
    the file.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self._file = JournalFile(Path(path), "--journal", "run")
        try:
            self._entries = self._read(settings)
        except BaseException:
            self._file.close()
            raise
        self._seen: Counter[tuple[str, int, int]] = Counter()
        self._keys: dict[int, Key] = {}

    def close(self) -> None:
        """Another run may use it."""
        self._file.close()

    def left(self, items: Sequence[InputItem]) -> tuple[list[InputItem], list[dict[str, Any]]]:
        """The items that are still to be run, and the outcomes of the others."""
        left, known = [], []
        for item in items:
            key = self._key(item)
            if (entry := self._entries.get(key)) is not None:
                known.append(entry)
            else:
                self._keys[id(item)] = key
                left.append(item)
        return left, known

    def add(self, item: InputItem, outcome: dict[str, Any], error: Exception | None) -> None:
        """What became of an item that was `left`. Raises SpecError when it cannot be written."""
        if not isinstance(error, MAY_PASS):
            self._file.write({"input": self._keys[id(item)], "outcome": finite(outcome)})

    def _read(self, settings: dict[str, Any]) -> dict[Key, dict[str, Any]]:
        entries: dict[Key, dict[str, Any]] = {}
        empty = True
        for number, line in self._file.lines():
            record, empty = self._file.parsed(number, line), False
            if number == 1:
                if record.get("format") != FORMAT:
                    raise SpecError(f"--journal: {self._file.path} is no journal of a run; give another file")
                then = record.get("settings")
                if then != settings:
                    what = f"{then} then, {settings} now"
                    raise SpecError(f"--journal: {self._file.path} holds another run ({what}); give another file")
            elif isinstance(record.get("input"), list) and isinstance(record.get("outcome"), dict):
                path, size, changed, nth = record["input"]
                entries[path, size, changed, nth] = record["outcome"]
            else:
                raise SpecError(f"{self._file.path}, line {number}: no input and its outcome")
        if empty:
            self._file.write({"format": FORMAT, "settings": settings})
        return entries

    def _key(self, item: InputItem) -> Key:
        path = item.path.resolve()
        try:
            about = path.stat()
            known = str(path), about.st_size, about.st_mtime_ns
        except OSError:  # it will fail, as an input
            known = str(path), -1, -1
        self._seen[known] += 1
        return (*known, self._seen[known])
