"""The inputs of a sweep: files, the images that come with a model, or its example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from edge_client.call import Call
from edge_client.screen.text import printable
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import BUILT_IN, InputItem, ModelSpec, find_inputs
from shared_hooks.tensors import copied

HANDFUL: Final = 5
"""Of the images that come with a model, as many, spread over all."""


@dataclass(frozen=True)
class SweepInput:
    """One input: a file, read anew for every request, or a call as it is."""

    name: str
    item: InputItem | None = None
    call: Call = field(default_factory=Call)

    @property
    def truth(self) -> str | None:
        return printable(self.item.truth) if self.item and self.item.truth is not None else None

    def read(self, spec: ModelSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) on the CPU, nobody else's. Raises InputMismatch."""
        if self.item is not None:
            return spec.preprocess(self.item)
        return copied(self.call.args, dict(self.call.kwargs))

    def digest(self) -> str:
        """Of the file's bytes. An example is made from the spec, which is compared otherwise. Raises SpecError."""
        if self.item is None:
            return ""
        try:
            return xxhash.xxh3_64_hexdigest(self.item.path.read_bytes())
        except OSError as error:
            raise SpecError(f"--input: {self.item.path} cannot be read: {error.strerror}") from error


def inputs_of(spec: ModelSpec, patterns: Sequence[str] | None) -> list[SweepInput]:
    """The files of --input; without them the shipped images, else the example. Raises SpecError when there is none."""
    if patterns:
        try:
            return named(find_inputs(patterns))
        except InputMismatch as error:
            raise SpecError(f"--input: {error}") from error
    images = spec.folder / "images"
    if images.is_dir() and spec.folder in {path.parent.resolve() for path in BUILT_IN.values()}:
        found = find_inputs(images)
        return named(found[:: max(1, len(found) // HANDFUL)][:HANDFUL])
    example = spec.example()
    if example is None:
        raise SpecError(f"{spec.origin}: the spec has no example input; give inputs with --input")
    return [SweepInput("example", call=Call(*example))]


def named(items: Sequence[InputItem]) -> list[SweepInput]:
    """By file name; by path where several files have one name."""
    names = [item.name for item in items]
    return [
        SweepInput(printable(item.name if names.count(item.name) == 1 else str(Path(item.path))), item)
        for item in items
    ]
