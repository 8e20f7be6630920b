"""What the head's side says of a cut, believed where it fits what this side finds."""

from __future__ import annotations

import torch

from shared_hooks.crossing import INPUTS, Crossing, Fill, Given, Mark, Place, TensorForm
from shared_hooks.errors import CutRefused
from shared_hooks.forward import Placeholder
from shared_hooks.tail.meta_runner import MetaRunner, form_of_tensor
from shared_hooks.tail.notes import Notes
from shared_hooks.tail.placing import Placing
from shared_hooks.tail.recipe import Alias, Argument, Hole, Injected, Source
from shared_hooks.tensors import View


class Claims:
    """A `Crossing` by place. ``taken``: the slots that have been met."""

    def __init__(self, crossing: Crossing, notes: Notes, placing: Placing, runner: MetaRunner) -> None:
        self.notes = notes
        self.placing = placing
        self.runner = runner
        self.slots = crossing.slots
        self.marks: dict[tuple[Place, int], Mark] = {(mark.place, mark.leaf): mark for mark in crossing.marks}
        self.given = {given.place: given for given in crossing.given}
        self.reads = {read.place: (number, read) for number, read in enumerate(crossing.reads)}
        self.fills = {fill.place: fill for fill in crossing.fills}
        self.layouts = {(layout.place, layout.leaf): layout.stride for layout in crossing.layouts}
        self.taken: set[int] = set()

    def input(self, leaf: int, form: TensorForm) -> Source:
        """Where an input comes from."""
        mark = self.marks.get((INPUTS, leaf))
        return Hole(form) if mark is None else self._injected(mark, form)

    def _injected(self, mark: Mark, found: TensorForm) -> Injected:
        """A mark is believed where form and type are what this side finds; its strides are the edge's."""
        if mark.view.shape != found.shape or mark.dtype is not found.dtype:
            raise self.notes.refusal(
                f"slot {mark.slot} is {mark.dtype} of shape {mark.view.shape} where this side finds {found.dtype} of "
                f"shape {found.shape}"
            )
        self.taken.add(mark.slot)
        return Injected(mark.slot, mark.view, mark.dtype, mark.flags)

    def source(self, place: Place, leaf: int, tensor: torch.Tensor, arguments: list[torch.Tensor]) -> Source | None:
        """Where a result comes from; None for a tensor that does not depend on the inputs."""
        mark = self.marks.get((place, leaf))
        if mark is not None:
            return self._injected(mark, form_of_tensor(tensor))
        return self.plain_source(tensor, arguments, self.layouts.get((place, leaf)))

    def plain_source(
        self, tensor: torch.Tensor, arguments: list[torch.Tensor], stride: tuple[int, ...] | None = None
    ) -> Source | None:
        """The same for a tensor of which nothing crosses."""
        for number, argument in enumerate(arguments):
            if argument is tensor:
                return Argument(number)
        if type(tensor) is Placeholder:
            form = form_of_tensor(tensor)
            if stride is not None and len(stride) == len(form.shape):
                form = TensorForm(form.shape, stride, form.dtype)
            return Hole(form)
        if not self.placing.is_tainted(tensor):
            return None
        flags = ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")
        key = tensor.untyped_storage()._cdata
        for number, slot in enumerate(self.placing.slots):
            if slot.untyped_storage()._cdata == key:
                return Injected(number, _relative(tensor, slot), tensor.dtype, flags)
        for number, argument in enumerate(arguments):
            if type(argument) is not Placeholder and argument.untyped_storage()._cdata == key:
                return Alias(number, View.of(tensor), tensor.dtype, flags)
        # made and filled within one operation, of which nobody has seen anything else
        form = form_of_tensor(tensor)
        return Hole(form if stride is None or not tensor.numel() else TensorForm(form.shape, stride, form.dtype))

    def sources(self, given: Given, arguments: list[torch.Tensor]) -> tuple[Source, ...]:
        """Where the results come from that cannot be worked out here."""
        sources: list[Source] = []
        for leaf, form in enumerate(given.leaves):
            mark = self.marks.get((given.place, leaf))
            if isinstance(form, int):
                if form >= len(arguments) or not self.placing.is_tainted(arguments[form]):
                    raise self.notes.refusal(
                        f"{given.name} hands an argument through that does not depend on the inputs"
                    )
                sources.append(Argument(form))
            elif mark is not None:
                sources.append(self._injected(mark, form))
            else:
                self.runner.budget.spend(elements=View(form.shape, form.stride, 0).numel)
                sources.append(Hole(form))
        return tuple(sources)

    def filled(self, place: Place, arguments: list[torch.Tensor], written: tuple[int, ...]) -> tuple[Fill, ...]:
        """The slot, if any, whose memory an operation at this place has written for the last time."""
        fill = self.fills.get(place)
        if fill is None:
            return ()
        if fill.argument not in written:
            raise self.notes.refusal(f"slot {fill.slot} is to be written where nothing is written")
        argument, slot = arguments[fill.argument], self.slots[fill.slot]
        if (argument.dtype is torch.bool) != (slot.dtype is torch.bool):
            raise self.notes.refusal(f"slot {fill.slot} is truth values, or is to be written to such")
        if not self.runner.owns(argument):
            raise self.notes.refusal(f"slot {fill.slot} is to be written to memory of the model's own")
        if argument.untyped_storage().nbytes() < slot.storage_bytes:
            raise self.notes.refusal(f"slot {fill.slot} is larger than what it is written to")
        self.taken.add(fill.slot)
        return (fill,)


def _relative(tensor: torch.Tensor, slot: torch.Tensor) -> View:
    """The view that a tensor is of a slot, in elements of its own type."""
    start = int(slot.storage_offset()) * slot.itemsize
    first = int(tensor.storage_offset()) * tensor.itemsize
    offset, rest = divmod(first - start, tensor.itemsize)
    if rest or offset < 0:
        raise CutRefused("a view of other bytes than its elements begin at")
    return View(tuple(tensor.shape), tuple(tensor.stride()), offset)
