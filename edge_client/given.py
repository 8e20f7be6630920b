"""`Given`: one input that people hand over, be it a file or in memory; and all of them, from what they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import nn

from edge_client.call import Call
from edge_client.inputs import TAKEN, InputReader
from edge_client.inputs.kinds import is_picture, plain
from edge_client.screen.text import printable
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import Frame, InputItem, ModelSpec, find_inputs
from shared_hooks.tensors import copied, flatten

NAMELESS: Final = "input"
_KINDS: Final = (Call, tuple, Mapping, torch.Tensor, np.ndarray, bytes, bytearray, memoryview, Frame)


@dataclass(frozen=True)
class Given:
    """One input: a file, read again each time, or ``value``, which is in memory and is read as `EdgeClient.infer` reads
    it. ``label``: its truth, where no file says it.
    """

    name: str
    item: InputItem | None = None
    value: Any = None
    label: str | None = None
    made: bool = False
    """From the spec itself, which is compared otherwise."""

    @property
    def truth(self) -> str | None:
        """The label it should get, None where nothing says so."""
        return self.label if self.item is None else self.item.truth

    @property
    def shown_truth(self) -> str | None:
        """As text for tables."""
        return None if self.truth is None else printable(self.truth)

    @property
    def file_name(self) -> str:
        """Without its folder; the name of what is in memory."""
        return self.name if self.item is None else self.item.name

    @property
    def origin(self) -> str:
        """The file in full; the name of what is in memory."""
        return self.name if self.item is None else self.item.origin

    def read(self, spec: ModelSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) on the CPU, nobody else's. Raises InputMismatch."""
        if self.item is not None:
            return spec.preprocess(self.item)
        call = InputReader(nn.Module(), spec).read(self.value)
        return copied(call.args, dict(call.kwargs))

    def digest(self) -> str:
        """A digest of the file's bytes, or of what is in memory; empty for what is `made`. Raises SpecError."""
        if self.made:
            return ""
        if self.item is None:
            return _digest(self.value)
        try:
            return xxhash.xxh3_64_hexdigest(self.item.path.read_bytes())
        except OSError as error:
            raise SpecError(f"{self.item.path} cannot be read: {error.strerror}") from error


def given(inputs: Any) -> list[Given]:
    """All of ``inputs``, in order; none for None. A list holds several, all else is one: a tuple or a dictionary is the
    arguments of one call.

    Raises InputMismatch for a file that is not there, and for a kind of input that is not taken.
    """
    if inputs is None:
        return []
    if isinstance(inputs, list) and inputs and all(isinstance(each, (str, Path)) for each in inputs):
        found = named(find_inputs(inputs))  # each file once
    elif isinstance(inputs, list):
        found = [one for each in inputs for one in _one(each)]
    else:
        found = _one(inputs)
    if not found:
        raise InputMismatch("no input: the list is empty")
    return [replace(one, name=f"input {at}") if one.name == NAMELESS else one for at, one in enumerate(found)]


def _one(value: Any) -> list[Given]:
    if isinstance(value, Given):
        return [value]
    if isinstance(value, InputItem):
        return named([value])
    if isinstance(value, (str, Path)):
        return named(find_inputs(value))
    if isinstance(value, _KINDS) or is_picture(value):
        return [Given(NAMELESS, value=value)]
    raise InputMismatch(
        f"an input of type {type(value).__name__} is not taken: expected {TAKEN}; a folder, a glob, or a list of inputs"
    )


def named(items: Sequence[InputItem]) -> list[Given]:
    """By file name; by path where several files have one name."""
    names = [item.name for item in items]
    return [
        Given(printable(item.name if names.count(item.name) == 1 else str(Path(item.path))), item) for item in items
    ]


def labelled(pairs: Iterable[Any], what: str) -> list[Given]:
    """Inputs with labels, from pairs of an input in memory and its label. Raises InputMismatch for what is no pair."""
    found = []
    for at, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputMismatch(f"{what} is a folder, or a list of (input, label); entry {at} is no such pair")
        label = pair[1].item() if isinstance(pair[1], (torch.Tensor, np.generic)) else pair[1]
        (one,) = _one(pair[0])
        found.append(replace(one, name=f"input {at}", label=None if label is None else str(label)))
    return found


def _digest(value: Any) -> str:
    hasher = xxhash.xxh3_64()
    if isinstance(value, (bytes, bytearray, memoryview)):
        hasher.update(value)
    elif is_picture(value):
        hasher.update(f"{value.mode} {value.size}".encode() + value.tobytes())
    else:
        pixels = value.pixels if isinstance(value, Frame) else None
        call = Call.of(dict(value) if isinstance(value, Mapping) else value if pixels is None else pixels)
        structure, tensors = flatten(plain((call.args, dict(call.kwargs)), "the input"))
        hasher.update(repr(structure).encode())
        for tensor in tensors:
            hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
