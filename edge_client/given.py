"""`Given`: one input that people hand over, be it a file or in memory; and all of them, from what they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash

from edge_client.call import Call
from edge_client.screen.text import printable
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import InputItem, ModelSpec, find_inputs
from shared_hooks.tensors import copied, flatten

NAMELESS: Final = "input"
TAKEN: Final = (
    "a file, a folder or a glob; a tensor or an array; a tuple of positional, a dictionary of keyword arguments; "
    "or a list of any of these"
)


@dataclass(frozen=True)
class Given:
    """One input: a file, read anew each time, or a call as it is. ``label``: its truth, where no file says it."""

    name: str
    item: InputItem | None = None
    call: Call = field(default_factory=Call)
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
        args, kwargs = copied(self.call.args, dict(self.call.kwargs))
        return args, {**spec.call_kwargs, **kwargs}

    def digest(self) -> str:
        """Of the file's bytes, or the call's tensors; empty for a call without any. Raises SpecError."""
        if self.made:
            return ""
        if self.item is None:
            _, tensors = flatten((self.call.args, dict(self.call.kwargs)))
            hasher = xxhash.xxh3_64()
            for tensor in tensors:
                hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            return hasher.hexdigest() if tensors else ""
        try:
            return xxhash.xxh3_64_hexdigest(self.item.path.read_bytes())
        except OSError as error:
            raise SpecError(f"{self.item.path} cannot be read: {error.strerror}") from error


def given(inputs: Any) -> list[Given]:
    """All of ``inputs``, in order; none for None. A tuple is one call, a list holds several.

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
    return [Given(NAMELESS, call=call_of(value))]


def call_of(value: Any) -> Call:
    """One input in memory as a call of the model, arrays as tensors. Raises InputMismatch."""
    if isinstance(value, Call):
        return value
    if isinstance(value, tuple):
        return Call(tuple(map(_tensor, value)))
    if isinstance(value, Mapping):
        return Call((), {str(name): _tensor(each) for name, each in value.items()})
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return Call((_tensor(value),))
    raise InputMismatch(f"an input is {TAKEN}; not {type(value).__name__}")


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.from_numpy(np.array(value, order="C"))  # a copy: from_numpy warns about read-only memory
    except TypeError as error:
        raise InputMismatch(f"an array of {value.dtype} is no tensor: {error}") from error


def named(items: Sequence[InputItem]) -> list[Given]:
    """By file name; by path where several files have one name."""
    names = [item.name for item in items]
    return [
        Given(printable(item.name if names.count(item.name) == 1 else str(Path(item.path))), item) for item in items
    ]


def labelled(pairs: Iterable[Any], what: str) -> list[Given]:
    """Of pairs of an input in memory and its label. Raises InputMismatch for what is no pair."""
    found = []
    for at, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputMismatch(f"{what} is a folder, or a list of (input, label); entry {at} is no such pair")
        label = pair[1].item() if isinstance(pair[1], (torch.Tensor, np.generic)) else pair[1]
        found.append(Given(f"input {at}", call=call_of(pair[0]), label=None if label is None else str(label)))
    return found
