"""Attention as PNG files: of every input a folder, in it one picture for each record, named by side and module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shared_hooks.errors import BadFrame, SpecError
from shared_hooks.observers.pictures import coloured
from shared_hooks.observers.thumbnails import decoded

LONGEST: Final = 80
"""Characters of a name that go into a file's."""


class HeatMaps:
    """Writes into a folder, which is made; SpecError for one that cannot be. A disk that takes no more ends no run: it
    is said at the end.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.written = 0
        self.damaged = 0
        self._problem: SpecError | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--heat-maps: {folder} cannot be a folder: {error.strerror}") from error

    def write(self, number: int, name: str, observations: Mapping[str, Mapping[str, Any]]) -> None:
        """The pictures of input ``number`` (from 1), called ``name``; ``observations``: side -> hook -> found."""
        folder = self.folder / f"{number:04d}_{file_name(name)}"
        for side, by_hook in observations.items():
            for place, record in enumerate(by_hook.get("attention", {}).get("records", [])):
                if record.get("picture") and self._problem is None:
                    self._one(folder, f"{side}_{place:03d}_{file_name(record['name'])}.png", record["picture"])

    def _one(self, folder: Path, name: str, picture: str) -> None:
        try:
            image = coloured(decoded(picture))
        except BadFrame:  # a server's; the others are good
            self.damaged += 1
            return
        try:
            folder.mkdir(exist_ok=True)
            image.save(folder / name, "PNG")
        except OSError as error:
            self._problem = SpecError(f"--heat-maps: {folder / name} cannot be written: {error.strerror or error}")
            return
        self.written += 1

    def summary(self) -> str:
        """What was written. Raises SpecError where something could not be."""
        if self._problem is not None:
            raise self._problem
        damaged = f"; {self.damaged} that came were damaged" if self.damaged else ""
        return f"heat maps: {self.written} in {self.folder}{damaged}"


def file_name(text: str) -> str:
    """``text`` as a part of a file's name on any system: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:LONGEST].strip(".") or "_"
