"""Write the files of ``edge-client run``: its journal, outputs, attention pictures.

The journal (``--journal``) holds each input's outcome, which is on the disk before it is shown. Its first line
describes the run, every other one is an input with its outcome. The same command resumes where the last one ended: an
input is not run again if its path, size and modification time are in the file. Failures that are not the input's fault
(no server, too late) are not written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from edge_client.commands.feed import Named
from edge_client.request import NOT_SERVED
from edge_client.screen import finite, one_line
from shared_hooks.errors import BadFrame, Cancelled, DeadlineExceeded, IsthmusError, SpecError
from shared_hooks.files import JournalFile, write_text, write_whole
from shared_hooks.models import InputItem, ModelSpec, Prediction
from shared_hooks.observers.kinds.attention import coloured
from shared_hooks.observers.thumbnails import decoded

FORMAT: Final = "isthmus run 1"
MAY_PASS: Final = (*NOT_SERVED, DeadlineExceeded, Cancelled)
"""Errors after which the same input may be answered later."""

Key = tuple[str, int, int, int]


class RunJournal:
    """The journal of one run at a time. ``settings``: must be unchanged (model, weights). Raises SpecError naming the
    file.
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
        """Release the file for another run."""
        self._file.close()

    def left(self, items: Sequence[InputItem]) -> tuple[list[InputItem], list[dict[str, Any]]]:
        """Return the items still to be run, and the outcomes of the others."""
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
        """Add the outcome of an item that was `left`. Raises SpecError if it cannot be written."""
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
        except OSError:  # it will fail as an input
            known = str(path), -1, -1
        self._seen[known] += 1
        return (*known, self._seen[known])


# Outputs that `edge-client run --output` keeps: of every input a JSON file, with large values in files beside it.
#
# ``0001_photo.jpg.json`` has the predictions and the output's structure, with tensors of up to `INLINE` values as
# lists; ``0001_photo.jpg.safetensors`` has the larger ones, by the names that the JSON gives them;
# ``0001_photo.jpg.drawn.png`` draws what the spec's [draw] finds.


INLINE: Final = 64
"""Values of a tensor written as text; larger ones go into safetensors."""


class KeptFiles:
    """Writes to a folder, which is created; raises SpecError if that fails. A full disk does not end the run; it is
    reported at the end.
    """

    def __init__(self, folder: str, spec: ModelSpec) -> None:
        self.folder, self.spec = Path(folder), spec
        self.saved = self.drawn = 0
        self._problem = ""
        self._undrawn = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--output: {folder} cannot be a folder: {error.strerror}") from error

    def write(self, number: int, item: Named, output: object, predictions: Sequence[Prediction]) -> None:
        """Write the output of input ``number`` (from 1)."""
        if self._problem:
            return
        stem = f"{number:04d}_{file_name(item.name)}"
        tensors: dict[str, torch.Tensor] = {}
        reported = {
            "file": item.origin,
            "predictions": [
                {"row": one.row, "label": one.label, "index": one.index, "score": one.score} for one in predictions
            ],
            "output": _json_of(output, "", tensors),
        }
        try:
            if tensors:
                reported["tensors"] = f"{stem}.safetensors"
                write_whole(self.folder / f"{stem}.safetensors", lambda file: save_file(tensors, file))
            text = json.dumps(finite(reported), indent=1, allow_nan=False) + "\n"
            write_text(self.folder / f"{stem}.json", text)
            self.saved += 1
            if self.spec.draws:
                self._draw(stem, item, output)
        except SpecError as error:
            self._problem = f"--output: {error}"

    def summary(self) -> str:
        """Return what was written. Raises SpecError if something could not be."""
        if self._problem:
            raise SpecError(self._problem)
        drawn = f", {self.drawn} drawn" if self.spec.draws else ""
        why = f" (not drawn: {one_line(self._undrawn)})" if self._undrawn else ""
        return f"outputs: {self.saved} in {self.folder}{drawn}{why}"

    def _draw(self, stem: str, item: Named, output: object) -> None:
        if not isinstance(item, InputItem):
            self._undrawn = "frames are not kept until their answers come; draw on files"
            return
        try:
            picture = self.spec.draw(item, output)
        except IsthmusError as error:  # such as an input that is no image
            self._undrawn = f"{item.name}: {error}"
        else:
            write_whole(self.folder / f"{stem}.drawn.png", lambda file: picture.save(file, "PNG"))
            self.drawn += 1


def _json_of(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return JSON data of ``value``; large tensors are added to ``tensors`` and named in it."""

    def inner(key: object, one: object) -> Any:
        return _json_of(one, f"{name}.{key}" if name else str(key), tensors)

    if isinstance(value, torch.Tensor):
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        if value.is_complex():  # safetensors does not support complex numbers in all releases
            value, dtype = torch.view_as_real(value.resolve_conj()), f"{dtype} as pairs"
        if value.numel() <= INLINE and (not value.is_floating_point() or bool(value.isfinite().all())):
            return {"shape": shape, "dtype": dtype, "values": value.tolist()}
        key = name or "output"
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"shape": shape, "dtype": dtype, "tensor": key}
    if isinstance(value, Mapping):
        return {str(key): inner(key, one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {key: inner(key, one) for key, one in zip(value._fields, value, strict=True)}
    if isinstance(value, (tuple, list)):
        return [inner(at, one) for at, one in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return one_line(repr(value))[:200]


# Attention as PNG files: a folder for every input, in it one picture for each record, named by side and module.


LONGEST: Final = 80
"""Maximum characters of a name in a file's name."""


class HeatMaps:
    """Writes to a folder, which is created; raises SpecError if that fails. A full disk does not end the run; it is
    reported at the end.
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
        """Write the pictures of input ``number`` (from 1), called ``name``; ``observations``: side -> hook -> found."""
        folder = self.folder / f"{number:04d}_{file_name(name)}"
        for side, by_hook in observations.items():
            for place, record in enumerate(by_hook.get("attention", {}).get("records", [])):
                if record.get("picture") and self._problem is None:
                    self._one(folder, f"{side}_{place:03d}_{file_name(record['name'])}.png", record["picture"])

    def _one(self, folder: Path, name: str, picture: str) -> None:
        try:
            image = coloured(decoded(picture))
        except BadFrame:  # those of a server are broken; the others are good
            self.damaged += 1
            return
        try:
            folder.mkdir(exist_ok=True)
            write_whole(folder / name, lambda file: image.save(file, "PNG"), "--heat-maps")
        except OSError as error:
            self._problem = SpecError(f"--heat-maps: {folder} cannot be written: {error.strerror or error}")
            return
        except SpecError as error:
            self._problem = error
            return
        self.written += 1

    def summary(self) -> str:
        """Return what was written. Raises SpecError if something could not be."""
        if self._problem is not None:
            raise self._problem
        damaged = f"; {self.damaged} that came were damaged" if self.damaged else ""
        return f"heat maps: {self.written} in {self.folder}{damaged}"


def file_name(text: str) -> str:
    """Return ``text`` for a file name on any system: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:LONGEST].strip(".") or "_"
