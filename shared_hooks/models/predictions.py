"""From a model's output to predictions: the built-in ranking of class scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared_hooks.config import Table, kind_of, looks_like_target, resolve
from shared_hooks.errors import InputMismatch, IsthmusError, SpecError


@dataclass(frozen=True)
class Prediction:
    """One answer: its class, the class' label and its score; ``row`` counts the inputs of a batch."""

    label: str
    index: int
    score: float
    row: int = 0


@dataclass(frozen=True)
class TopK:
    """The ``top_k`` highest of each row of class scores, best first, as probabilities if ``softmax``.

    ``output`` names the entry of a dictionary or attribute of an object, or the position in a sequence; None takes a
    tensor as it is, "logits" where there is one, else the first entry of a sequence.
    """

    top_k: int = 5
    softmax: bool = True
    output: str | int | None = None
    strict: bool = True
    """False when the spec says nothing about postprocessing: then other outputs have no predictions, and no error."""

    @classmethod
    def from_table(cls, table: Table) -> TopK:
        """Postprocessing as a spec's [postprocess] says. Raises SpecError."""
        top_k = table.take("top_k", int)
        softmax = table.take("softmax", bool)
        output = table.take_any("output")
        if output is not None and (isinstance(output, bool) or not isinstance(output, (str, int))):
            table.fail("output", f"expected the name or position of the scores in the output, found {kind_of(output)}")
        if top_k is not None and top_k < 1:
            table.fail("top_k", f"expected an integer of at least 1, found {top_k}")
        table.done()
        return cls(5 if top_k is None else top_k, softmax is not False, output)

    def __call__(self, output: object, labels: tuple[str, ...]) -> list[Prediction]:
        """Predictions of scores of shape (classes,) or (rows, classes), any real dtype.

        NaN scores are passed through. Raises InputMismatch when the output holds no such scores and ``strict``.
        """
        scores = self._scores(output)
        if scores is None or scores.dim() not in (1, 2) or scores.numel() == 0 or scores.is_complex():
            if not self.strict:
                return []
            what = type(output).__name__ if scores is None else f"a tensor of shape {tuple(scores.shape)}"
            raise InputMismatch(f"postprocess: expected class scores (rows, classes) in the output, found {what}")
        rows = scores.detach().reshape(-1, scores.shape[-1]).to("cpu", torch.float32)
        if self.softmax:
            rows = torch.softmax(rows, dim=1)
        best = torch.topk(rows, min(self.top_k, rows.shape[1]), dim=1)
        return [
            Prediction(labels[index] if index < len(labels) else str(index), index, score, row)
            for row, (values, indices) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True))
            for score, index in zip(values, indices, strict=True)
        ]

    def _scores(self, output: object) -> torch.Tensor | None:
        if isinstance(output, torch.Tensor):
            return output
        found: object = None
        if self.output is not None:
            found = _entry(output, self.output)
        elif (found := _entry(output, "logits")) is None:
            found = _entry(output, 0)
        return found if isinstance(found, torch.Tensor) else None


def _entry(output: object, key: str | int) -> object:
    if isinstance(key, str):
        return output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
    if isinstance(output, (tuple, list)) and -len(output) <= key < len(output):
        return output[key]
    return None


def read_labels(value: object, folder: Path, table: Table) -> tuple[str, ...]:
    """A spec's ``labels``: a list of strings, or a file beside the spec (one a line, or JSON). Raises SpecError."""
    expected = "expected a list of strings, or a file with one label a line or a JSON list"
    if value is None:
        return ()
    if isinstance(value, str):
        path = folder / value
        try:
            text = path.read_text(encoding="utf-8")
            value = json.loads(text) if path.suffix == ".json" else text.splitlines()
        except OSError as error:
            table.fail("labels", f"{path} cannot be read: {error.strerror or error}")
        except ValueError as error:
            raise SpecError(f"{table.origin}: labels: {path}: {error}; {expected}") from error
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        table.fail("labels", f"{expected}; found {kind_of(value)}")
    return tuple(value)


# The tokenizer that a spec names: ``module:callable``, or a folder that ``transformers`` reads. No downloads.


def load_tokenizer(reference: str, folder: Path, where: str) -> Any:
    """An object with ``decode`` or ``convert_ids_to_tokens``. ``where`` opens the messages. Raises SpecError."""
    made = _made(reference, folder, where) if looks_like_target(reference) else _read(folder / reference, where)
    if not any(callable(getattr(made, name, None)) for name in ("decode", "convert_ids_to_tokens")):
        raise SpecError(
            f'{where}: "{reference}" gave {kind_of(made)}, which has no decode and no convert_ids_to_tokens'
        )
    return made


def _made(reference: str, folder: Path, where: str) -> Any:
    make = resolve(reference, folder, where)
    try:
        return make()
    except IsthmusError:
        raise
    except Exception as error:
        raise SpecError(f'{where}: "{reference}" raised {type(error).__name__}: {error}') from error


def _read(path: Path, where: str) -> Any:
    if not path.is_dir():
        raise SpecError(f'{where}: expected "module:callable" or a folder that AutoTokenizer reads; no folder {path}')
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SpecError(f"{where}: a folder needs transformers: {error}") from error
    try:
        # code in the folder is not run
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise SpecError(f"{where}: {path}: {type(error).__name__}: {error}") from error
