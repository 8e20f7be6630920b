"""The result of a kernel some of whose tensors have no data, computed on the meta device.

A `Placeholder` is *tainted*, and so is a real tensor whose storage depends on the inputs. Kernels on constants run;
kernels on tainted ones give placeholders of the right form. Writes go to tainted tensors and to those that this run
created, never to the model's own memory. Everything is charged to a `Budget` before it is done.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks import devices
from shared_hooks.crossing import INPUTS, Crossing, Fill, Given, Mark, Place, TensorForm
from shared_hooks.errors import CutRefused, TooLarge
from shared_hooks.forward import (
    FORM_ONLY,
    Form,
    Placeholder,
    Same,
    Unforeseen,
    arguments_of,
    bytes_of_results,
    foreseen,
    written_by,
)
from shared_hooks.tail.recipe import Alias, Argument, Hole, Injected, Notes, Placing, Source
from shared_hooks.tensors import View

_INPLACE_VIEW = torch.Tag.inplace_view
_SEEDED = torch.Tag.nondeterministic_seeded
_TROUBLE = frozenset({"aten::resize_", "aten::set_", "aten::resize_as_"})


class Unknown(BaseException):
    """The result of an operation cannot be computed without data. No Exception, so that no model catches it."""


@dataclass
class Budget:
    """The limits for making one recipe. Raises `TooLarge` when one is reached.

    ``operations``: kernels; ``native_bytes``: of constants that are really computed; ``elements``: of all results,
    before and after the cut, as far as can be foreseen; ``held_bytes``: of results after the cut that exist at one
    time; ``seconds``: of wall-clock time.
    """

    operations: int = 400_000
    native_bytes: int = 1 << 30
    elements: int = 1 << 36
    seconds: float = 60.0
    held_bytes: int = 1 << 34

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds
        self._held: dict[weakref.ref[Any], int] = {}

    def hold(self, value: torch.Tensor) -> None:
        """Charge the memory of a tail's result as long as the model keeps it."""
        size = value.numel() * value.itemsize
        self.held_bytes -= size
        self._held[weakref.ref(value, self._released)] = size
        if self.held_bytes < 0:
            raise TooLarge("on inputs of this form the model needs too much memory after the cut")

    def _released(self, reference: weakref.ref[Any]) -> None:
        self.held_bytes += self._held.pop(reference, 0)

    def spend(self, operations: int = 0, native_bytes: int = 0, elements: int = 0) -> None:
        """Charge what is about to be done."""
        self.operations -= operations
        self.native_bytes -= native_bytes
        self.elements -= elements
        if self.operations < 0:
            raise TooLarge("the model runs too many operations on inputs of this form")
        if self.native_bytes < 0:
            raise TooLarge("on inputs of this form the model makes constants that are too large")
        if self.elements < 0:
            raise TooLarge("on inputs of this form the model computes too many elements")
        if time.monotonic() > self._until:
            raise TooLarge("working out what the tail does on inputs of this form takes too long")


class MetaRunner:
    """Runs kernels for one rehearsal. ``models``: the model's own tensors.

    Since `begin`: ``taints``, the tensors whose storages received values that depend on the inputs; ``drew``: random
    numbers were drawn; ``reshaped``: a tensor changed its shape in place.
    """

    def __init__(self, placing: Placing, budget: Budget, models: list[torch.Tensor]) -> None:
        self.placing = placing
        self.budget = budget
        self.made: set[int] = set()
        self.models = {_key(tensor) for tensor in models} - {None}
        self.after_cut = False
        self._is_tainted_now = False
        self.taints: list[torch.Tensor] = []
        self.drew = False
        self.reshaped = False
        self._alive: list[StorageWeakRef] = []

    def begin(self) -> None:
        """Called when an operation begins."""
        self.taints = []
        self.drew = False
        self.reshaped = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one kernel. Raises `Unknown`, `CutRefused`, `TooLarge`, and what the kernel raises."""
        self.budget.spend(operations=1)
        tensors = arguments_of(args, kwargs)
        self._is_tainted_now = any(map(self.placing.is_tainted, tensors))
        if self._is_tainted_now:
            return self._without_data(func, args, kwargs, tensors)
        return self._on_constants(func, args, kwargs, tensors)

    # -- constants ----------------------------------------------------------------------------------------------

    def _on_constants(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        written = self._check_writes(func, args, kwargs)
        if not _is_view(func):
            self._foresee(func, args, kwargs)
        draws = _SEEDED in func.tags
        before = devices.rng_state() if draws else None
        result = func(*args, **kwargs)
        made = arguments_of((result,), {})
        self._note_made(made, tensors)
        if before is not None and not torch.equal(before, devices.rng_state()):
            self.drew = True
            for tensor in made:
                self.placing.taint(tensor)
            self.taints += written  # random numbers drawn into existing memory
        return result

    def _foresee(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Charge the memory of a kernel on constants before it runs."""
        known = bytes_of_results(func, args, kwargs)
        size = _guessed(args, kwargs) if known is None else known
        self.budget.spend(native_bytes=size, elements=size)

    def _note_made(self, made: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        known = {_key(tensor) for tensor in given}
        for tensor in made:
            key = _key(tensor)
            if key is not None and key not in known and key not in self.made:
                self.made.add(key)
                self._alive.append(StorageWeakRef(tensor.untyped_storage()))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether this run created a tensor's memory."""
        return _key(tensor) in self.made

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that are written; raises if one is the model's own and the tail would really write it."""
        written = written_by(func, args, kwargs)
        for tensor in written:
            if _key(tensor) in self.models and (self.after_cut or not self._is_tainted_now):
                where = "after" if self.after_cut else "before"
                raise CutRefused(f"{func._schema.name} writes to memory of the model's own {where} the cut")
        return written

    # -- tensors without data -----------------------------------------------------------------------------------

    def _without_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        name = func._schema.name
        if name in FORM_ONLY:
            self._foresee(func, args, kwargs)
            result = func(*_swapped(args, _uninitialised), **_swapped(kwargs, _uninitialised))
            self._note_made(arguments_of((result,), {}), tensors)
            return result
        if _INPLACE_VIEW in func.tags or name in _TROUBLE:
            if name in _TROUBLE or any(type(tensor) is Placeholder for tensor in tensors):
                raise Unknown(f"{name} changes the shape of a value that does not cross")
            self.reshaped = True
            return func(*args, **kwargs)
        if _is_view(func) and not any(type(tensor) is Placeholder for tensor in tensors):
            return func(*args, **kwargs)
        for tensor in self._check_writes(func, args, kwargs):
            if type(tensor) is not Placeholder:
                self.placing.taint(tensor)
                self.taints.append(tensor)
        if _SEEDED in func.tags:
            self.drew = True
        return self._on_meta(func, args, kwargs, tensors)

    def _on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
        found = foreseen(func, args, kwargs)
        if isinstance(found, Unforeseen):
            raise Unknown(f"{func._schema.name}: {found.why}")
        return self._given(found, tensors, held=self.after_cut and not _is_view(func))

    def _given(self, found: Any, tensors: list[Any], *, held: bool) -> Any:
        if isinstance(found, Form):
            if found.shape is None or found.stride is None:
                raise Unknown("an operation gives a tensor that is not strided")
            form = TensorForm(found.shape, found.stride, found.dtype)
            self.budget.spend(elements=View(form.shape, form.stride, 0).numel)
            hole = self.placing.hole(form)
            if held:
                self.budget.hold(hole)
            return hole
        if isinstance(found, Same):
            return tensors[found.number]
        if isinstance(found, (list, tuple)):
            return tuple(self._given(item, tensors, held=held) for item in found)
        if found is not None:
            raise Unknown("an operation gives a number that depends on data")
        return None


_SENTINEL = 1 << 62


def _guessed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return an upper estimate of the bytes that a kernel takes if nothing is known: all its sizes multiplied, or some
    copies of its tensors.
    """
    size, waiting = 8, [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting += value
        elif type(value) is int and 1 < value < _SENTINEL:
            size *= value
    return max(size, 8 * sum(tensor.numel() * tensor.itemsize for tensor in arguments_of(args, kwargs)))


def form_of_tensor(tensor: torch.Tensor) -> TensorForm:
    """Shape, stride and dtype of a tensor."""
    return TensorForm(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return (
        bool(returns)
        and not func._schema.is_mutable
        and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    )


def _key(tensor: torch.Tensor) -> int | None:
    try:
        return None if type(tensor) is Placeholder else int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def _uninitialised(value: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory for a placeholder, for kernels that use the form only."""
    if type(value) is not Placeholder:
        return value
    # memory that is never touched costs nothing
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _swapped(value: Any, into: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return into(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_swapped(item, into) for item in value)
    if isinstance(value, dict):
        return {key: _swapped(item, into) for key, item in value.items()}
    return value


# The head's description of a cut, accepted where it fits what this side finds.


class Claims:
    """A `Crossing` by place. ``taken``: the slots that were used."""

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
        """Return the source of an input."""
        mark = self.marks.get((INPUTS, leaf))
        return Hole(form) if mark is None else self._injected(mark, form)

    def _injected(self, mark: Mark, found: TensorForm) -> Injected:
        """Return the slot's view at a mark, if form and type match what this side finds; its strides are the edge's."""
        if mark.view.shape != found.shape or mark.dtype is not found.dtype:
            raise self.notes.refusal(
                f"slot {mark.slot} is {mark.dtype} of shape {mark.view.shape} where this side finds {found.dtype} of "
                f"shape {found.shape}"
            )
        self.taken.add(mark.slot)
        return Injected(mark.slot, mark.view, mark.dtype, mark.flags)

    def source(self, place: Place, leaf: int, tensor: torch.Tensor, arguments: list[torch.Tensor]) -> Source | None:
        """Return the source of a result; None for a tensor that does not depend on the inputs."""
        mark = self.marks.get((place, leaf))
        if mark is not None:
            return self._injected(mark, form_of_tensor(tensor))
        return self.plain_source(tensor, arguments, self.layouts.get((place, leaf)))

    def plain_source(
        self, tensor: torch.Tensor, arguments: list[torch.Tensor], stride: tuple[int, ...] | None = None
    ) -> Source | None:
        """Return the source of a tensor of which nothing crosses."""
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
        key = tensor.untyped_storage()._cdata
        for number, slot in enumerate(self.placing.slots):
            if slot.untyped_storage()._cdata == key:
                return Injected(number, _relative(tensor, slot), tensor.dtype, _flags(tensor))
        if (alias := self.alias(tensor, arguments)) is not None:
            return alias
        # made and filled within one operation, seen by no other
        form = form_of_tensor(tensor)
        return Hole(form if stride is None or not tensor.numel() else TensorForm(form.shape, stride, form.dtype))

    def alias(self, tensor: torch.Tensor, arguments: list[torch.Tensor]) -> Alias | None:
        """Return the view of an argument that a result is, or None."""
        key = storage_key(tensor)
        for number, argument in enumerate(arguments):
            if key is not None and type(argument) is not Placeholder and storage_key(argument) == key:
                return Alias(
                    number, View.of(tensor), tensor.dtype, _flags(tensor), not self.placing.is_tainted(argument)
                )
        return None

    def sources(self, given: Given, arguments: list[torch.Tensor]) -> tuple[Source, ...]:
        """Return the sources of results that cannot be computed here."""
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
        """Return the slots whose memory an operation at this place writes for the last time."""
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


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identifies a tensor's memory; None if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def _flags(tensor: torch.Tensor) -> str:
    return ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")


def _relative(tensor: torch.Tensor, slot: torch.Tensor) -> View:
    """Return the view of a slot that a tensor is, in elements of its own type."""
    start = int(slot.storage_offset()) * slot.itemsize
    first = int(tensor.storage_offset()) * tensor.itemsize
    offset, rest = divmod(first - start, tensor.itemsize)
    if rest or offset < 0:
        raise CutRefused("a view of other bytes than its elements begin at")
    return View(tuple(tensor.shape), tuple(tensor.stride()), offset)
