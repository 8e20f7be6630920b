"""Outputs that `edge-client run --save` keeps: of every input a JSON file, and what does not belong into one beside it.

``0001_photo.jpg.json`` has the predictions and the output's structure, with tensors of up to `INLINE` values as lists;
``0001_photo.jpg.safetensors`` has the larger ones, by the names that the JSON gives them; ``0001_photo.jpg.drawn.png``
shows what the spec's [draw] finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from edge_client.commands.feed import Named
from edge_client.commands.heat_maps import file_name
from edge_client.screen.text import finite, one_line
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.models import InputItem, ModelSpec, Prediction

INLINE: Final = 64
"""Values of a tensor that a person may want to read: more go into safetensors."""


class Kept:
    """Writes into a folder, which is made; SpecError for one that cannot be. A disk that takes no more ends no run: it
    is said at the end.
    """

    def __init__(self, folder: str, spec: ModelSpec) -> None:
        self.folder, self.spec = Path(folder), spec
        self.saved = self.drawn = 0
        self._problem = ""
        self._undrawn = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--save: {folder} cannot be a folder: {error.strerror}") from error

    def write(self, number: int, item: Named, output: object, predictions: Sequence[Prediction]) -> None:
        """The output of input ``number`` (from 1)."""
        if self._problem:
            return
        stem = f"{number:04d}_{file_name(item.name)}"
        tensors: dict[str, torch.Tensor] = {}
        reported = {
            "file": item.origin,
            "predictions": [
                {"row": one.row, "label": one.label, "index": one.index, "score": one.score} for one in predictions
            ],
            "output": _told(output, "", tensors),
        }
        try:
            if tensors:
                reported["tensors"] = f"{stem}.safetensors"
                save_file(tensors, self.folder / f"{stem}.safetensors")
            text = json.dumps(finite(reported), indent=1, allow_nan=False) + "\n"
            (self.folder / f"{stem}.json").write_text(text, encoding="utf-8")
            self.saved += 1
            if self.spec.draws:
                self._draw(stem, item, output)
        except OSError as error:
            self._problem = f"--save: {self.folder / stem} cannot be written: {error.strerror or error}"

    def summary(self) -> str:
        """What was written. Raises SpecError where something could not be."""
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
            self.spec.draw(item, output).save(self.folder / f"{stem}.drawn.png", "PNG")
        except IsthmusError as error:  # such as an input that is no image
            self._undrawn = f"{item.name}: {error}"
        else:
            self.drawn += 1


def _told(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` for JSON; large tensors go into ``tensors`` and are named here."""

    def inner(key: object, one: object) -> Any:
        return _told(one, f"{name}.{key}" if name else str(key), tensors)

    if isinstance(value, torch.Tensor):
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        if value.is_complex():  # nor does safetensors have it in all releases
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
