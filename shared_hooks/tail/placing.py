"""The memory of one request on the tail's side: slots, placeholders, and what depends on the inputs.

All that a replay hands to the model is made here. A view is taken of a slot or of a tensor that depends on the inputs,
never of anything else, and torch checks it against the storage's real size; a write goes to storages that this request
made. What breaks these rules is an error, whatever the recipe says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks.crossing import TensorForm
from shared_hooks.errors import PlanMismatch
from shared_hooks.forward import Placeholder
from shared_hooks.tail.recipe import Alias, Argument, Hole, Injected, Source
from shared_hooks.tensors import View, tensors_in


class Placing:
    """``slots``: one flat tensor each. ``holes``: placeholders shared by all requests of a recipe."""

    def __init__(
        self, slots: list[torch.Tensor], device: torch.device, holes: dict[Hole, Placeholder] | None = None
    ) -> None:
        self.slots = slots
        self.device = device
        self.holes = {} if holes is None else holes
        self.tainted = {slot.untyped_storage()._cdata for slot in slots}
        self.kept: list[Any] = []
        self.filled: dict[int, torch.Tensor] | None = None
        """Slot -> the memory that got its content, where somebody wants to know."""
        self.made: set[int] = set()
        """Storages of constants that this request's Python made; noted only where some are written."""

    def release(self) -> None:
        """Let go of the frontier."""
        self.slots.clear()
        self.kept.clear()
        self.filled = None

    def is_tainted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the prefix depends on the inputs."""
        if type(tensor) is Placeholder:
            return True
        try:
            return tensor.untyped_storage()._cdata in self.tainted
        except (RuntimeError, NotImplementedError):
            return False

    def taint(self, tensor: torch.Tensor) -> None:
        """From here on the tensor's storage depends on the inputs."""
        if type(tensor) is not Placeholder:
            storage = tensor.untyped_storage()
            self.tainted.add(storage._cdata)
            self.kept.append(StorageWeakRef(storage))  # the address must not be used again for a constant

    def note_made(self, result: Any, arguments: Sequence[torch.Tensor]) -> None:
        """An operation on constants gave ``result``: storages that are none of its arguments' are this request's."""
        given = {
            a.untyped_storage()._cdata for a in arguments if type(a) is not Placeholder and a.layout == torch.strided
        }
        for tensor in tensors_in(result):
            if type(tensor) is torch.Tensor and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage.resizable():
                    self.made.add(storage._cdata)
                    self.kept.append(storage)  # the address must not be used again

    def overwrite(self, tensor: torch.Tensor) -> None:
        """A kernel that is not run would write here. What it would have overwritten may be anybody's memory: zeros,
        until it is filled. The model's own memory (a scratch buffer that is rewritten before it is read) stays as it
        is, whatever values the request brought.
        """
        if type(tensor) is Placeholder or self.is_tainted(tensor):
            return
        if tensor.untyped_storage()._cdata in self.made:
            whole_of(tensor, torch.uint8).zero_()
        self.taint(tensor)

    def tensor(self, source: Source, arguments: Sequence[torch.Tensor], *, fresh: bool = False) -> torch.Tensor:
        """One tensor of the prefix. ``fresh``: autograd will put its mark on it. Raises `PlanMismatch`."""
        if isinstance(source, Hole):
            if fresh or 0 in source.form.shape:
                return self.hole(source.form)
            # nobody writes to a placeholder: one serves all requests
            known = self.holes.get(source)
            if known is None:
                known = self.holes[source] = _placeholder(source.form, self.device)
            return known
        if isinstance(source, Injected):
            return _viewed(self.slots[source.slot], source.view, source.dtype, source.flags)
        if source.number >= len(arguments):
            raise PlanMismatch("an argument is missing")
        argument = arguments[source.number]
        if isinstance(source, Argument):
            return argument
        if type(argument) is Placeholder or not self.is_tainted(argument):
            raise PlanMismatch("a view of a tensor that is not this request's")
        return _aliased(argument, source)

    def hole(self, form: TensorForm) -> torch.Tensor:
        """A placeholder of its own; for no elements at all a real tensor, since there is nothing to read."""
        if 0 not in form.shape:
            return _placeholder(form, self.device)
        empty = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=self.device)
        self.kept.append(empty)
        self.tainted.add(empty.untyped_storage()._cdata)
        return empty

    def fill(self, number: int, pieces: Sequence[View], argument: torch.Tensor) -> None:
        """Put the pieces of a slot into the storage of a tensor that this request made. Raises `PlanMismatch`."""
        slot = self.slots[number]
        if type(argument) is Placeholder or argument.untyped_storage()._cdata not in self.made:
            raise PlanMismatch("a write to a tensor that is not this request's")
        whole = whole_of(argument, slot.dtype)
        if whole.numel() < slot.numel():
            raise PlanMismatch("a write beyond a tensor's memory")
        for piece in pieces:
            target = whole.as_strided(piece.shape, piece.stride, piece.offset)
            target.copy_(slot.as_strided(piece.shape, piece.stride, slot.storage_offset() + piece.offset))
        if self.filled is not None:
            self.filled[number] = whole


def _placeholder(form: TensorForm, device: torch.device) -> Placeholder:
    return Placeholder(form.shape, form.stride, form.dtype, device)


def _viewed(slot: torch.Tensor, view: View, dtype: torch.dtype, flags: str) -> torch.Tensor:
    whole = slot if dtype is slot.dtype else slot.view(dtype)
    return _flagged(whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset), flags)


def _aliased(argument: torch.Tensor, source: Alias) -> torch.Tensor:
    view = source.view
    whole = whole_of(argument, source.dtype)
    return _flagged(whole.as_strided(view.shape, view.stride, view.offset), source.flags)


def _flagged(tensor: torch.Tensor, flags: str) -> torch.Tensor:
    if "c" in flags:
        tensor = tensor.conj()
    negated: torch.Tensor = torch._neg_view(tensor) if "n" in flags else tensor
    return negated


def whole_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The storage of a tensor as one flat tensor.

    A view, so that what is written through it counts as written to the tensor.
    """
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = tensor.as_strided((elements,), (1,), 0)
    if dtype is tensor.dtype:
        return whole
    fits = elements * tensor.itemsize // dtype.itemsize * dtype.itemsize
    return whole.view(torch.uint8)[:fits].view(dtype)
