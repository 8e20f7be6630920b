"""Input files as a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_client.sources.source import Source
from shared_hooks.models.inputs import InputItem, find_inputs


def folder(*paths: str | Path) -> Files:
    """The images and tensors of a folder, by name; or a file, or of a glob; or of several of these.

    A file that is given twice comes twice. One that cannot be read fails at its place. Raises InputMismatch where there
    is none.
    """
    return Files(find_inputs(paths, once=False), ", ".join(map(str, paths)))


class Files(Source):
    """So many files; `len` says how many."""

    def __init__(self, items: Sequence[InputItem], name: str) -> None:
        super().__init__(name)
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def first(self) -> InputItem:
        return self.items[0]

    def _items(self) -> Iterator[InputItem]:
        return iter(self.items)
