"""Describe one cut to the tail's side: the form of the inputs, what crosses, and where the tail takes it up.

It names no code and no memory. The tail's side computes by itself what happens before the cut (`rehearsal`), and takes
from here only what it cannot know: which storages arrive, in which layout, and results that cannot be computed without
data. All of it is compared with what the tail's side finds. It is written here and read in `crossing.format`.

A *place* is where a tensor first appears: an input, the result of a module call, or the result of the n-th operation
that a module call makes itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shared_hooks.codecs import Bound, Grain
from shared_hooks.codecs.basis import Basis, Book, Frames, References
from shared_hooks.forward import unreflected
from shared_hooks.forward.context import signature_digest
from shared_hooks.showing import short
from shared_hooks.tensors import Structure, View, dtype_name

# A digest over the path that a forward takes: module calls, operations, and the forms of their results.
#
# Both sides compute it by themselves, the edge from its trace and the tail's side from its rehearsal, and must agree
# at the cut. Strides and devices are left out: they may differ between machines.


CALL = "(call)"


class PathDigest:
    """A running digest of a path; `hexadecimal` at any time."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def call(self, path: str, number: int) -> None:
        """Add the ``number``-th call of a module."""
        self._digest.update(f"call {path} {number}\n".encode())

    def operation(self, name: str, results: Iterable[Any]) -> None:
        """Add a torch function with its ``results``: tensors or values of a trace, with shape and dtype."""
        self._operation(name, [f"{tuple(result.shape)}{result.dtype}" for result in results])

    def _operation(self, name: str, forms: list[str]) -> None:
        self._digest.update(f"{unreflected(name)} {forms}\n".encode())

    def item(self, item: tuple[Any, ...]) -> None:
        """Add one of `Trace.path_items`."""
        if item[0] == CALL:
            self.call(item[1], item[2])
        else:
            self._operation(item[0], [f"{shape}{dtype}" for shape, dtype in item[1]])

    def hexadecimal(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


FORMAT = 2


class Place(NamedTuple):
    """The ``index``-th operation made by the ``number``-th call of the module at ``path`` itself; -1: the call's
    result.

    ``Place("", 0, -1)`` is the model's inputs; path "" with number 1 is what runs around the model's own forward.
    """

    path: str
    number: int
    index: int  # type: ignore[assignment]  # tuples have a method of this name


INPUTS = Place("", 0, -1)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape, stride in elements, and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, repeated ones counted as often as they appear."""
        return View(self.shape, self.stride, 0).numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """One storage that crosses: its size in elements of ``dtype``, the pieces (disjoint views) that are sent, and
    whether the tail writes it.
    """

    dtype: torch.dtype
    elements: int
    pieces: tuple[View, ...]
    written: bool

    @property
    def piece_bytes(self) -> int:
        """Bytes that are sent."""
        return sum(piece.numel for piece in self.pieces) * self.dtype.itemsize

    @property
    def storage_bytes(self) -> int:
        """Bytes that the tail allocates."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Mark:
    """The ``leaf``-th tensor that appears at ``place`` is this view of slot ``slot``.

    ``flags``: c = conjugated, n = negated view.
    """

    place: Place
    leaf: int
    slot: int
    view: View
    dtype: torch.dtype
    flags: str = ""


@dataclass(frozen=True, slots=True)
class Fill:
    """The operation at ``place`` makes the last write before the cut to the storage of its ``argument``-th tensor,
    which began as a constant: the slot's pieces are its content from there on.
    """

    place: Place
    argument: int
    slot: int


@dataclass(frozen=True, slots=True)
class Given:
    """A place's result that cannot be computed without data: a shape that depends on values, a scripted module.

    ``name``: of the operation, or the module's path. ``leaves``: a form, or the index of an argument that is returned.
    ``writes``: arguments written in place.
    """

    place: Place
    name: str
    structure: Structure
    leaves: tuple[TensorForm | int, ...]
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadForm:
    """At ``place`` the operation ``name`` reads a Python value from data; every request sends one of this form
    (`trees.form_of`).
    """

    place: Place
    name: str
    form: Structure


@dataclass(frozen=True, slots=True)
class Layout:
    """The ``leaf``-th result at ``place``, of which nothing crosses, is not contiguous; Python may ask for strides."""

    place: Place
    leaf: int
    stride: tuple[int, ...]


@short
@dataclass(frozen=True, eq=False)
class Crossing:
    """One cut of one signature and path. ``layer_id`` is -1 and ``layer_name`` "input" for the cut before any layer.

    ``inputs``: the forms of the tensors of ``input_structure``, which is (args, kwargs). ``path_digest``: over the
    operations and calls before the cut, with the forms of their results; both sides must find the same.
    ``plan_digest``: of the edge's plan (`Plan.digest`), which includes what comes after the cut; compared if the tail's
    side has one. ``generators``: states of random number generators that arrive with every request: of ``"torch"`` as
    it is at the cut, of ``"python"`` and ``"numpy"`` as they are when the forward begins. ``leaves``: names of Python
    state that a forward was seen to change without any effect on later ones. ``books``: for each piece, the book of the
    codec "basis"; empty without a calibration. ``calls`` and ``later``: of a branch cut, the names of its calls, and
    the places of operations, and of whole calls (index -1), that come before its end and run in the tail; empty for a
    plain cut.
    """

    layer_id: int
    layer_name: str
    depth: int | None
    context: dict[str, Any]
    input_structure: Structure
    inputs: tuple[TensorForm, ...]
    slots: tuple[Slot, ...]
    marks: tuple[Mark, ...]
    fills: tuple[Fill, ...]
    given: tuple[Given, ...]
    reads: tuple[ReadForm, ...]
    layouts: tuple[Layout, ...]
    path_digest: str
    plan_digest: str = ""
    generators: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    books: tuple[Book | None, ...] = ()
    calls: tuple[str, ...] = ()
    later: tuple[Place, ...] = ()
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def name(self) -> str:
        """The cut's name: the layer's or block's; of a branch cut all of its calls' names."""
        return " + ".join(self.calls) or self.layer_name

    @cached_property
    def payload_bytes(self) -> int:
        """Raw bytes of the frontier."""
        return sum(slot.piece_bytes for slot in self.slots)

    @cached_property
    def storage_bytes(self) -> int:
        """Bytes the tail allocates for the slots."""
        return sum(slot.storage_bytes for slot in self.slots)

    @property
    def working_bytes(self) -> int:
        """Bytes that decoding by its books keeps in memory, which are not in the text."""
        return sum(8 * book.coefficients for book in self.books if book is not None)

    @cached_property
    def bound(self) -> Bound:
        """Return, for each piece, codecs bound to its book, if they need nothing else."""
        return self.bound_to(lambda number: None)

    def bound_to(self, references: Callable[[int], References | None]) -> Bound:
        """Return the same, with this side's earlier frames of the piece of that number."""
        return tuple(
            {Basis.name: Basis(book), Frames.name: Frames(book, references(number))}
            for number, book in enumerate(self.books)
        )

    def with_books(self, books: tuple[Book | None, ...]) -> Crossing:
        """Return the same cut with books for its pieces, and therefore another digest. Raises ValueError."""
        if len(books) != len(self.grains):
            raise ValueError(f"{len(books)} books for {len(self.grains)} pieces")
        return replace(self, books=books, cache={})

    @cached_property
    def views(self) -> tuple[View, ...]:
        """The layout of each piece: one that is a whole storage is flat, and its marks describe what it holds."""
        shapes: dict[int, View] = {}
        for mark in self.marks:
            known = len(shapes[mark.slot].shape) if mark.slot in shapes else 0
            if len(mark.view.shape) > known and self.covers_its_slot(mark):
                shapes[mark.slot] = mark.view
        found = []
        for number, slot in enumerate(self.slots):
            for piece in slot.pieces:
                found.append(shapes.get(number, piece) if piece.numel == slot.elements else piece)
        return tuple(found)

    @cached_property
    def grains(self) -> tuple[Grain, ...]:
        """The channel layout of each piece."""
        return tuple(Grain.of(view.shape, view.stride) for view in self.views)

    def covers_its_slot(self, mark: Mark) -> bool:
        """Return whether the mark's view is every element of a storage, in order."""
        if not 0 <= mark.slot < len(self.slots):
            return False
        slot, view = self.slots[mark.slot], mark.view
        same_elements = view.offset == 0 and view.numel == slot.elements and mark.dtype is slot.dtype
        return same_elements and view.is_run()

    @cached_property
    def truths(self) -> frozenset[int]:
        """Slots that hold booleans."""
        whole = {number for number, slot in enumerate(self.slots) if slot.dtype is torch.bool}
        return frozenset(whole | {mark.slot for mark in self.marks if mark.dtype is torch.bool})

    @cached_property
    def signature(self) -> str:
        """Digest of the form of the inputs, autocast and training flags; see `forward.context.signature`."""
        shapes = [[list(form.shape), dtype_name(form.dtype)] for form in self.inputs]
        return signature_digest(self.input_structure, shapes, self.context)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of `to_bytes`, by which both sides name it."""
        return digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return UTF-8 JSON; the same crossing gives the same bytes."""
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        data = {
            "format": FORMAT,
            "cut": [self.layer_id, self.layer_name],
            "depth": self.depth,
            "context": self.context,
            "inputs": [self.input_structure, [_form(form) for form in self.inputs]],
            "slots": [
                [dtype_name(s.dtype), s.elements, s.written, [[p.shape, p.stride, p.offset] for p in s.pieces]]
                for s in self.slots
            ],
            "marks": [
                [m.place, m.leaf, m.slot, m.view.shape, m.view.stride, m.view.offset, dtype_name(m.dtype), m.flags]
                for m in self.marks
            ],
            "fills": [[f.place, f.argument, f.slot] for f in self.fills],
            "given": [
                [
                    g.place,
                    g.name,
                    g.structure,
                    [leaf if isinstance(leaf, int) else _form(leaf) for leaf in g.leaves],
                    g.writes,
                ]
                for g in self.given
            ],
            "reads": [[r.place, r.name, r.form] for r in self.reads],
            "layouts": [[x.place, x.leaf, x.stride] for x in self.layouts],
            "path": self.path_digest,
            "plan": self.plan_digest,
            "generators": self.generators,
        }
        if self.leaves:
            data["leaves"] = self.leaves
        if self.later:
            data["later"] = self.later
            data["calls"] = self.calls
        if self.books:
            data["books"] = [None if book is None else book.to_json() for book in self.books]
        return json.dumps(data, separators=(",", ":")).encode()


def _form(form: TensorForm) -> list[Any]:
    return [form.shape, form.stride, dtype_name(form.dtype)]


def digest_of(data: bytes) -> str:
    """Return the digest by which both sides name a crossing."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def mixes_truth(slots: tuple[Slot, ...], marks: tuple[Mark, ...]) -> bool:
    """Return whether memory is marked as booleans and as another type, too.

    A write through the other type, in the tail, could make booleans that are neither 0 nor 1, and kernels that count
    them and then copy would exceed their memory.
    """
    seen: dict[int, set[bool]] = {}
    for mark in marks:
        seen.setdefault(mark.slot, {slots[mark.slot].dtype is torch.bool}).add(mark.dtype is torch.bool)
    return any(len(kinds) > 1 for kinds in seen.values())
