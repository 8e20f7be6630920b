"""What crosses a cut as tensors with names: for heads that are not torch's, such as an ONNX file.

A name is that of the module call in which the tensor first appears (``stage1.1``); a second one there has a number
after ``#``. An input that is read behind the cut is ``input.NAME``. Numbers that the model's Python read from data
before the cut are tensors, too: ``read.MODULE``; so is how many elements an operation gave whose shape depends on
data: ``count.MODULE``. Both sides work names out from the description.

Runtimes and protocols have no word for some of torch's dtypes: tensors of these are sent as others (`as_sent`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from shared_hooks.codecs import RAW, Coded
from shared_hooks.crossing.description import INPUTS, Crossing, Place, TensorForm
from shared_hooks.crossing.early import EarlyOutput
from shared_hooks.crossing.parcel import Packing, Parcel
from shared_hooks.errors import CutRefused, InputMismatch
from shared_hooks.tensors import Structure, View, dtype_name

OTHERWISE: Final = -(1 << 63)
"""What a head gives for a number of data where it was not made for the one that it finds."""


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is given a name: bfloat16 and floats of eight bits as float32, complex numbers as real ones
    with one more axis, (real, imaginary). All others are themselves.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    sent = _sent_dtype(tensor.dtype)
    return tensor if sent is tensor.dtype else tensor.to(sent)


def as_held(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the reverse: ``dtype`` is the model's."""
    if dtype.is_complex:
        return torch.view_as_complex(tensor.contiguous())
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _sent_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return dtype.to_real()
    return torch.float32 if dtype is torch.bfloat16 or "float8" in str(dtype) else dtype


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of a cut: the ``piece``-th that crosses, seen through ``view``; a ``part`` of a storage as it is.

    ``held``: its dtype in the model; ``dtype`` and ``shape`` are as it is sent.
    """

    name: str
    piece: int
    view: View
    held: torch.dtype
    part: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return _sent_dtype(self.held)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.view.shape, 2) if self.held.is_complex else self.view.shape

    @property
    def is_flat(self) -> bool:
        """Whether elements lie in memory as they are sent, row-major: what a codec counts on."""
        return not self.part and self.dtype is self.held and self.view.stride == _row_major(self.view.shape)

    def storage_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece that crosses, of a tensor as it was sent: a whole storage is flat."""
        tensor = as_held(tensor, self.held)
        if self.part:
            return tensor.contiguous()
        if self.view.stride == _row_major(self.view.shape):
            return tensor.contiguous().reshape(-1)
        flat = torch.empty(self.view.numel, dtype=self.held, device=tensor.device)
        flat.as_strided(self.view.shape, self.view.stride).copy_(tensor)
        return flat

    def view_of(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the reverse, as the model holds it."""
        return piece if self.part else piece.as_strided(self.view.shape, self.view.stride)

    def tensor_of(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the reverse, as it is sent."""
        return as_sent(self.view_of(piece))


@dataclass(frozen=True)
class NamedNumbers:
    """Whole numbers of data: what Python read at ``place``, of this ``form`` (`shared_hooks.tensors.form_of`), or, with
    ``count``, how many elements what is given there has.
    """

    name: str
    place: Place
    shape: tuple[int, ...]
    form: Structure
    count: int | None = None
    dtype = torch.int64

    @property
    def truth(self) -> bool:
        """Whether they are truth values."""
        return _leaf(self.form) == "bool"

    def value_of(self, tensor: torch.Tensor) -> Structure:
        """Return the structure of what was read. Raises InputMismatch for what cannot have been."""
        numbers = tensor.flatten().tolist()
        if OTHERWISE in numbers or (self.count is not None and numbers != [self.count]):
            raise InputMismatch(
                f'input "{self.name}": by these data the model may take a way for which the head was not made'
            )
        if self.truth and not all(number in (0, 1) for number in numbers):
            raise InputMismatch(f'input "{self.name}": a truth value is 0 or 1')
        kind = bool if self.truth else int
        found: Structure = _filled(self.form, iter([kind(number) for number in numbers]))
        return found

    def numbers_of(self, value: Structure) -> list[int]:
        """Return the reverse."""
        return [int(one) for one in _numbers(value)]


@dataclass(frozen=True)
class NamedCrossing:
    """What makes a request of a tail: ``tensors`` in the order of the pieces, then ``reads``, then ``counts``."""

    tensors: tuple[NamedTensor, ...]
    reads: tuple[NamedNumbers, ...] = ()
    counts: tuple[NamedNumbers, ...] = ()

    def __iter__(self) -> Iterator[NamedTensor | NamedNumbers]:
        yield from self.tensors
        yield from self.reads
        yield from self.counts

    @property
    def nbytes(self) -> int:
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self)

    def to_json(self) -> list[list[Any]]:
        """[name, dtype, shape] of each."""
        return [[one.name, dtype_name(one.dtype), list(one.shape)] for one in self]

    def early(self, crossing: Crossing, given: Mapping[str, torch.Tensor]) -> EarlyOutput:
        """Return a head's result made of tensors by name, whose shapes and dtypes are as said here. Raises
        InputMismatch.
        """
        pieces = tuple(one.storage_of(given[one.name]) for one in self.tensors)
        return EarlyOutput(crossing, pieces, self._values(given))

    def parcel(
        self, crossing: Crossing, given: Mapping[str, torch.Tensor], coded: Mapping[str, tuple[str, Coded]]
    ) -> Parcel:
        """Return the same, packed; some tensors are ``coded`` (codec, bytes and parameters), which the
        reader of the parcel checks. Raises InputMismatch.
        """
        packing = Packing()
        kept: list[torch.Tensor] = []
        for number, one in enumerate(self.tensors):
            if one.name not in coded:
                kept.append(one.storage_of(given[one.name]))
                packing.add(number, kept[-1], RAW)
            elif one.is_flat:
                name, data = coded[one.name]
                packing.add_coded(number, name, data, one.dtype, [one.view.numel], [1])
            else:
                raise InputMismatch(f'input "{one.name}" lies otherwise in memory than in its shape: no codec for it')
        numbers = sorted({*coded} - {one.name for one in self.tensors})
        if numbers:
            raise InputMismatch(f'input "{numbers[0][:80]}" is no tensor that a codec is for')
        values = self._values(given)
        meta = [crossing.digest, values, []] if values else crossing.digest
        return Parcel.packed(packing, meta, kept)

    def _values(self, given: Mapping[str, torch.Tensor]) -> tuple[Structure, ...]:
        for one in self.counts:
            one.value_of(given[one.name])
        return tuple(one.value_of(given[one.name]) for one in self.reads)


def named_crossing(crossing: Crossing, inputs: Sequence[str] = ()) -> NamedCrossing:
    """``inputs``: names of the model's inputs, by their number.

    Raises CutRefused where tensors do not make a request: Python read what is no whole number, the state of a random
    generator crosses, or memory that is in no tensor with a name.
    """
    where = f"the cut after {crossing.layer_name}"
    if crossing.generators:
        raise CutRefused(f"{where} needs the state of random generators: tensors alone are not enough")
    tensors: list[NamedTensor] = []
    taken: dict[str, int] = {}

    def name_of(base: str) -> str:
        taken[base] = taken.get(base, 0) + 1
        return base if taken[base] == 1 else f"{base}#{taken[base]}"

    for number, slot in enumerate(crossing.slots):
        marks = [one for one in crossing.marks if one.slot == number]
        whole = [one for one in marks if not one.flags and crossing.covers_its_slot(one)]
        mark = max(whole, key=lambda one: len(one.view.shape), default=None)
        for piece in slot.pieces:
            part = mark is None or piece.numel < slot.elements
            view = View(piece.shape, _row_major(piece.shape), 0) if mark is None or part else mark.view
            places = [one.place for one in (mark, *marks) if one] + [
                x.place for x in crossing.fills if x.slot == number
            ]
            if not places:
                raise CutRefused(f"{where}: memory crosses that is in no tensor with a name")
            base = places[0].path or "model"
            if places[0] == INPUTS:
                leaf = (mark or marks[0]).leaf
                base = f"input.{inputs[leaf] if leaf < len(inputs) else leaf}"
            tensors.append(NamedTensor(name_of(base), len(tensors), view, slot.dtype, part))
    reads = []
    for read in crossing.reads:
        found = _shape(read.form)
        if found is None:
            what = "a number with a fraction" if _leaf(read.form) == "float" else "what is no whole number"
            raise CutRefused(f"{where}: the model's Python reads {what} from data ({read.name}), which no tensor is")
        reads.append(NamedNumbers(name_of(f"read.{read.place.path or 'model'}"), read.place, found, read.form))
    counts = []
    for one in crossing.given:
        count = sum(math.prod(leaf.shape) for leaf in one.leaves if isinstance(leaf, TensorForm))
        counts.append(NamedNumbers(name_of(f"count.{one.place.path or 'model'}"), one.place, (), ["v", "int"], count))
    if not tensors:
        raise CutRefused(f"{where}: no tensor crosses")
    return NamedCrossing(tuple(tensors), tuple(reads), tuple(counts))


def _leaf(form: Structure) -> str | None:
    """Return the type of all of a form's leaves, where they have one."""
    if form[0] == "v":
        return str(form[1])
    kinds = {_leaf(item) for item in form[1]} if form[0] in ("list", "tuple") else {None}
    return kinds.pop() if len(kinds) == 1 else None


def _shape(form: Structure) -> tuple[int, ...] | None:
    """Return the shape of whole numbers in nested lists; None for others."""
    if form[0] == "v":
        return () if form[1] in ("bool", "int") else None
    if form[0] not in ("list", "tuple") or _leaf(form) is None:
        return None
    shapes = {_shape(item) for item in form[1]}
    inner = shapes.pop() if len(shapes) == 1 else None
    return None if inner is None else (len(form[1]), *inner)


def _filled(form: Structure, numbers: Iterator[int]) -> Structure:
    if form[0] == "v":
        return ["v", next(numbers)]
    return [form[0], [_filled(item, numbers) for item in form[1]]]


def _numbers(value: Structure) -> Iterator[int]:
    if value[0] == "v":
        yield value[1]
    else:
        for item in value[1]:
            yield from _numbers(item)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


# Names of a model's inputs and outputs: parameters of its ``forward``, keys and attributes of what it returns. A
# tensor within a list or tuple has its number after a point (``states.0``); an output without a name is ``output``.


OUTPUT = "output"


def leaves(structure: Structure, root: str = OUTPUT) -> Iterator[tuple[str, Structure]]:
    """Yield the leaves of a structure (`shared_hooks.tensors.trees`), tensors and literals, each with its name."""
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
    """Return the structure of (args, kwargs) as one dictionary, by the parameters of the model's forward."""
    _, ((_, args), (_, kwargs)) = structure
    parameters = list(inspect.signature(model.forward).parameters.values())
    entries: list[list[Any]] = []
    for number, item in enumerate(args):
        known = parameters[number] if number < len(parameters) else parameters[-1]
        rest = known.kind is known.VAR_POSITIONAL or number >= len(parameters)
        first = next((at for at, one in enumerate(parameters) if one.kind is one.VAR_POSITIONAL), 0)
        entries.append([["v", f"{known.name}.{number - first}" if rest else known.name], item])
    return ["dict", entries + kwargs]
