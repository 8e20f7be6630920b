"""The operations of a rehearsal's prefix: run on placeholders, and noted as steps of the recipe."""

from __future__ import annotations

from typing import Any

import torch

from shared_hooks.crossing import Given, Place
from shared_hooks.forward import OTHER_MEMORY, Kind, Placeholder, arguments_of, is_mapped, kind_of, name_of, unreflected
from shared_hooks.tail.claims import Claims
from shared_hooks.tail.ghosts import Ghosts, Unknown, form_of_tensor
from shared_hooks.tail.notes import Notes
from shared_hooks.tail.placing import Placing
from shared_hooks.tail.recipe import Alias, Answer, Argument, Hole, Injected, ReadValue, Run, Source
from shared_hooks.tensors import Structure, UnknownHolder, flatten, no_class, unflatten


class Operations:
    """``values``: those read from data that the request at hand brings."""

    def __init__(
        self, notes: Notes, claims: Claims, placing: Placing, ghosts: Ghosts, values: tuple[Structure, ...]
    ) -> None:
        self.notes = notes
        self.claims = claims
        self.placing = placing
        self.ghosts = ghosts
        self.values = values
        self.inside = False
        self.muted = False

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function; the function mode is off while this runs."""
        name = name_of(func)
        arguments = arguments_of(args, kwargs)
        if name in OTHER_MEMORY and any(type(one) is Placeholder for one in arguments):
            raise Unknown(f"{name.partition('.')[0]} of a tensor that is set to another's")
        if self.notes.done or self.notes.in_opaque or is_mapped(arguments):
            return func(*args, **kwargs)
        frame = self.notes.frame
        place = Place(frame.path, frame.number, frame.index)
        tainted = any(map(self.placing.is_tainted, arguments))
        number, read = self.claims.reads.get(place, (0, None))
        if read is not None and read.name == name and tainted:
            frame.index += 1
            self.notes.digest.operation(name, [])
            self.notes.steps.append(ReadValue(name, number, frame.path))
            return unflatten(self.values[number], [], no_class)
        given = self.claims.given.get(place)
        if given is not None and unreflected(given.name) == unreflected(name) and (tainted or not arguments):
            return self._given(given, arguments)
        self.inside = True
        self.ghosts.begin()
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside = False
        kind = kind_of(name, bool(arguments), result)
        if kind is Kind.FORM:
            return result
        if kind is Kind.VALUE or not (tainted or self.ghosts.drew):
            return result
        frame.index += 1
        return self._answered(place, name, arguments, result, below=False, tainted=tainted)

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the dispatcher."""
        if self.muted:
            return func(*args, **kwargs)
        if self.notes.in_opaque:
            return self.ghosts.run(func, args, kwargs)
        if self.inside or self.notes.done:
            return self.ghosts.run(func, args, kwargs)
        # no torch function of the model's Python stands for it
        arguments = arguments_of(args, kwargs)
        frame = self.notes.frame
        place = Place(frame.path, frame.number, frame.index)
        tainted = any(map(self.placing.is_tainted, arguments))
        given = self.claims.given.get(place)
        if given is not None and given.name == str(func) and tainted:
            return self._given(given, arguments, below=True)
        self.ghosts.begin()
        result = self.ghosts.run(func, args, kwargs)
        if not (tainted or self.ghosts.drew):
            return result
        frame.index += 1
        return self._answered(place, str(func), arguments, result, below=True, tainted=tainted)

    def _answered(
        self, place: Place, name: str, arguments: list[torch.Tensor], result: Any, *, below: bool, tainted: bool
    ) -> Any:
        try:
            structure, results = flatten(result, plain=True)
        except UnknownHolder as error:
            if not tainted:
                return result
            raise self.notes.refusal(f"{name} gives {error}") from error
        if not below:
            self.notes.digest.operation(name, results)
        taints, drew = list(self.ghosts.taints), self.ghosts.drew
        if self.ghosts.reshaped:
            self.notes.steps.append(Run(name, self.notes.frame.path, below))
            return result
        # by now the tensors of a draw count as depending on the inputs, too
        sources = [self.claims.source(place, leaf, tensor, arguments) for leaf, tensor in enumerate(results)]
        if drew and not tainted:
            sources = [
                Hole(form_of_tensor(tensor)) if source is None else source
                for source, tensor in zip(sources, results, strict=True)
            ]
        if results and all(source is None for source in sources) and not taints:
            self.notes.steps.append(Run(name, self.notes.frame.path, below))
            return result
        if any(source is None for source in sources):
            raise self.notes.refusal(f"{name} gives a value that does not depend on the inputs, among others")
        known = tuple(source for source in sources if source is not None)
        return self._noted(
            place, name, structure, known, arguments, taints, results, below=below, drew=drew and not tainted
        )

    def _noted(
        self,
        place: Place,
        name: str,
        structure: Structure,
        sources: tuple[Source, ...],
        arguments: list[torch.Tensor],
        taints: list[torch.Tensor],
        results: list[torch.Tensor],
        *,
        below: bool,
        drew: bool,
    ) -> Any:
        written = self._written(arguments, taints)
        fills = self.claims.filled(place, arguments, written)
        self.notes.steps.append(Answer(name, structure, sources, fills, written, below, drew, self.notes.frame.path))
        made = [self._tensor(source, arguments, tensor) for source, tensor in zip(sources, results, strict=True)]
        return unflatten(structure, made, no_class)

    def _tensor(self, source: Source, arguments: list[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
        if isinstance(source, Hole) and type(found) is Placeholder and tuple(found.stride()) == source.form.stride:
            return found
        if isinstance(source, (Alias, Argument)) or (isinstance(source, Injected) and type(found) is not Placeholder):
            return found
        return self.placed(source, arguments)

    def placed(self, source: Source, arguments: list[torch.Tensor]) -> torch.Tensor:
        self.muted = True  # taking a view is no kernel of the model's
        try:
            return (
                self.placing.hole(source.form) if isinstance(source, Hole) else self.placing.tensor(source, arguments)
            )
        finally:
            self.muted = False

    def _written(self, arguments: list[torch.Tensor], taints: list[torch.Tensor]) -> tuple[int, ...]:
        """The arguments on storages that began as constants and depend on the inputs from now on."""
        keys = {tensor.untyped_storage()._cdata for tensor in taints}
        keys -= {slot.untyped_storage()._cdata for slot in self.placing.slots}
        if keys:
            for frame in self.notes.stack:
                frame.wrote = True
        return tuple(
            number
            for number, argument in enumerate(arguments)
            if type(argument) is not Placeholder and _storage_key(argument) in keys
        )

    def _given(self, given: Given, arguments: list[torch.Tensor], *, below: bool = False) -> Any:
        """What cannot be worked out, as the edge tells it."""
        frame = self.notes.frame
        frame.index += 1
        sources = self.claims.sources(given, arguments)
        taints: list[torch.Tensor] = []
        for number in given.writes:
            if number >= len(arguments):
                raise self.notes.refusal(f"{given.name} writes an argument that it does not have")
            argument = arguments[number]
            if type(argument) is Placeholder or self.placing.is_tainted(argument):
                continue
            if not self.ghosts.owns(argument):
                raise self.notes.refusal(f"{given.name} writes to memory that is not this request's")
            self.placing.taint(argument)
            taints.append(argument)
        written = self._written(arguments, taints)
        fills = self.claims.filled(given.place, arguments, written)
        made = [self.placed(source, arguments) for source in sources]
        if not below:
            self.notes.digest.operation(given.name, made)
        self.notes.steps.append(
            Answer(given.name, given.structure, sources, fills, written, below, not arguments, frame.path)
        )
        return unflatten(given.structure, made, no_class)


def _storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
