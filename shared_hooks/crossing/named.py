"""What crosses a cut as tensors with names: for heads that are not torch's, such as an ONNX file.

A name is that of the module call in which the tensor first appears (``stage1.1``); a second one there has a number
after ``#``. An input that is read behind the cut is ``input.NAME``. Both sides work names out from the description.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from shared_hooks.crossing.description import INPUTS, Crossing, Mark
from shared_hooks.crossing.early import EarlyOutput
from shared_hooks.errors import CutRefused
from shared_hooks.tensors import Structure, View, dtype_name


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of a cut: the ``piece``-th that crosses, seen through ``view``. ``source``: of a piece that is only a
    part of a tensor's memory, the tensor; `part_of` picks the piece out of it.
    """

    name: str
    piece: int
    view: View
    dtype: torch.dtype
    source: View | None = None
    places: tuple[int, ...] = ()
    """Where each element of a part lies in the source, row-major."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    def storage_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece that crosses: a whole storage is flat."""
        if self.source is not None:
            return tensor.contiguous()
        if self.view.stride == _row_major(self.shape):
            return tensor.contiguous().reshape(-1)
        flat = torch.empty(self.view.numel, dtype=self.dtype, device=tensor.device)
        flat.as_strided(self.view.shape, self.view.stride).copy_(tensor)
        return flat

    def tensor_of(self, piece: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        return piece if self.source is not None else piece.as_strided(self.view.shape, self.view.stride)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece of the tensor that ``source`` describes; the tensor itself where all of it crosses."""
        return tensor if self.source is None else tensor.flatten()[list(self.places)].reshape(self.shape)


def named_tensors(crossing: Crossing, inputs: Sequence[str] = ()) -> tuple[NamedTensor, ...]:
    """In the order of the pieces. ``inputs``: names of the model's inputs, by their number.

    Raises CutRefused where tensors alone do not make a request: a number that Python read from data crosses, too, or
    the state of a random generator, or a part of memory that is in no tensor with a name.
    """
    where = f"the cut after {crossing.layer_name}"
    if crossing.reads or crossing.given:
        raise CutRefused(f"{where} needs values that the model's Python read from data: tensors alone are not enough")
    if crossing.generators:
        raise CutRefused(f"{where} needs the state of random generators: tensors alone are not enough")
    found: list[NamedTensor] = []
    taken: dict[str, int] = {}
    for number, slot in enumerate(crossing.slots):
        marks = [one for one in crossing.marks if one.slot == number and not one.flags and one.dtype is slot.dtype]
        for piece in slot.pieces:
            mark, places = _holding(marks, piece, slot.elements)
            if mark is None:
                raise CutRefused(f"{where}: a part of memory crosses that is in no tensor with a name")
            base = mark.place.path or "model"
            if mark.place == INPUTS:
                base = f"input.{inputs[mark.leaf] if mark.leaf < len(inputs) else mark.leaf}"
            taken[base] = taken.get(base, 0) + 1
            name = base if taken[base] == 1 else f"{base}#{taken[base]}"
            if places is None:
                found.append(NamedTensor(name, len(found), mark.view, mark.dtype))
            else:
                view = View(piece.shape, _row_major(piece.shape), 0)
                found.append(NamedTensor(name, len(found), view, mark.dtype, mark.view, places))
    if not found:
        raise CutRefused(f"{where}: no tensor crosses")
    return tuple(found)


def _holding(marks: Sequence[Mark], piece: View, elements: int) -> tuple[Mark | None, tuple[int, ...] | None]:
    """The mark that holds a piece; and, where the piece is a part of it, the places of its elements there."""
    whole = [one for one in marks if one.view.offset == 0 and one.view.numel == elements and one.view.is_run()]
    if whole and piece.numel == elements:
        return max(whole, key=lambda one: len(one.view.shape)), None
    if elements > MOST_PLACES:
        return None, None
    ours = _places(piece)
    for mark in sorted(marks, key=lambda one: -len(one.view.shape)):
        at = {place: number for number, place in enumerate(_places(mark.view))}
        if all(place in at for place in ours):
            return mark, tuple(at[place] for place in ours)
    return None, None


MOST_PLACES: Final = 1 << 20
"""Elements of a storage of which parts are looked for in tensors."""


def _places(view: View) -> list[int]:
    """Where the elements of a view lie in its storage, row-major."""
    found = [view.offset]
    for size, stride in zip(view.shape, view.stride, strict=True):
        found = [place + stride * step for place in found for step in range(size)]
    return found


def early_of(crossing: Crossing, named: Sequence[NamedTensor], tensors: Mapping[str, torch.Tensor]) -> EarlyOutput:
    """A head's result made of tensors by name, whose shapes and dtypes are those of ``named``."""
    return EarlyOutput(crossing, tuple(one.storage_of(tensors[one.name]) for one in named), ())


def described(named: Sequence[NamedTensor]) -> list[list[object]]:
    """[name, dtype, shape] of each, for JSON."""
    return [[one.name, dtype_name(one.dtype), list(one.shape)] for one in named]


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


# Names of what goes into a model and comes out: parameters of its ``forward``, keys and attributes of what it returns.
# A tensor within a list or tuple has its number after a point (``states.0``); an output without a name is ``output``.


OUTPUT = "output"


def leaves(structure: Structure, root: str = OUTPUT) -> Iterator[tuple[str, Structure]]:
    """The leaves of a structure (`shared_hooks.tensors.trees`), tensors and literals, each with its name."""
    kind = structure[0]
    if kind in ("t", "v", "x", "enum"):
        yield root, structure
    elif kind in ("list", "tuple"):
        yield from _numbered(structure[1], root)
    elif kind == "named":
        yield from _numbered(structure[2], root)
    else:
        entries = structure[1] if kind == "dict" else [(["v", key], item) for key, item in structure[2]]
        inner = "" if root in ("", OUTPUT) else f"{root}."
        for key, item in entries:
            yield from leaves(item, f"{inner}{key[1]}")


def _numbered(items: list[Structure], root: str) -> Iterator[tuple[str, Structure]]:
    for number, item in enumerate(items):
        yield from leaves(item, f"{root}.{number}" if root else str(number))


def by_parameter(model: nn.Module, structure: Structure) -> Structure:
    """The structure of (args, kwargs) as one dictionary, by the parameters of the model's forward."""
    _, ((_, args), (_, kwargs)) = structure
    parameters = list(inspect.signature(model.forward).parameters.values())
    entries: list[list[Any]] = []
    for number, item in enumerate(args):
        known = parameters[number] if number < len(parameters) else parameters[-1]
        rest = known.kind is known.VAR_POSITIONAL or number >= len(parameters)
        first = next((at for at, one in enumerate(parameters) if one.kind is one.VAR_POSITIONAL), 0)
        entries.append([["v", f"{known.name}.{number - first}" if rest else known.name], item])
    return ["dict", entries + kwargs]
