"""A rehearsal: the tail's side runs the model's Python once on placeholders, and notes what the prefix of a cut does.

What it notes is the `Recipe`. No data is there and none is computed: the results of operations are worked out on the
meta device (`ghosts`), values that Python reads come with the request, and what crosses is taken up where the
`Crossing` marks it, if form and type are those found here. After the cut the run goes on, so that the model's Python
ends as it would and the work to come is counted, until something needs data.

Modules whose own Python is proven to write no state (`purity`) become one `Skip`; all others run again in each replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import generators
from shared_hooks.attach import running
from shared_hooks.crossing import INPUTS, Crossing, Given, Mark, Place, TensorForm
from shared_hooks.errors import CutRefused, Disagreement, IsthmusError, PlaceholderRead, PlanMismatch, TooLarge
from shared_hooks.ghosts import Budget, Ghosts, Unknown, form_of_tensor
from shared_hooks.hierarchy import ModuleInfo, call_name
from shared_hooks.operations import Kind, arguments_of, is_mapped, kind_of, name_of, unreflected
from shared_hooks.path_digest import PathDigest
from shared_hooks.placeholder import Placeholder
from shared_hooks.placing import Placing
from shared_hooks.purity import is_safe, pure_modules
from shared_hooks.python_state import PythonState
from shared_hooks.recipe import (
    Alias,
    Answer,
    Argument,
    End,
    Enter,
    Hole,
    Injected,
    ReadValue,
    Recipe,
    Run,
    Skip,
    Source,
    Step,
)
from shared_hooks.trees import ClassFinder, Structure, UnknownHolder, flatten, no_class, tensors_in, unflatten
from shared_hooks.views import View


@dataclass(frozen=True, eq=False)
class Facts:
    """What rehearsals of one model share as long as its Python ``state`` stays as it is: the tensors that are its own,
    and the modules whose Python writes no state.
    """

    state: PythonState
    tensors: list[torch.Tensor]
    pure: set[nn.Module]

    @classmethod
    def of(cls, model: nn.Module, modules: Iterable[nn.Module]) -> Facts:
        """As it is now."""
        state = PythonState(model, settings=False)
        tensors = [*model.parameters(), *model.buffers(), *state.tensors()]
        return cls(state, tensors, pure_modules(modules))


class Frame:
    """A module call that is running. ``start``: number of steps before it; ``wrote``: it writes to what it is given."""

    def __init__(self, path: str, number: int, start: int) -> None:
        self.path = path
        self.number = number
        self.start = start
        self.index = 0
        self.has_child = False
        self.wrote = False


class Rehearsal:
    """One rehearsal in one thread. ``values`` are those that the request at hand brings; ``facts``: what is known of
    the model.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        crossing: Crossing,
        values: tuple[Structure, ...],
        placing: Placing,
        budget: Budget,
        facts: Facts,
    ) -> None:
        self.model = model
        self.modules = modules
        self.crossing = crossing
        self.values = values
        self.placing = placing
        self.ghosts = Ghosts(placing, budget, facts.tensors)
        self.pure = facts.pure
        self.marks: dict[tuple[Place, int], Mark] = {(mark.place, mark.leaf): mark for mark in crossing.marks}
        self.given = {given.place: given for given in crossing.given}
        self.reads = {read.place: (number, read) for number, read in enumerate(crossing.reads)}
        self.fills = {fill.place: fill for fill in crossing.fills}
        self.layouts = {(layout.place, layout.leaf): layout.stride for layout in crossing.layouts}
        self.taken: set[int] = set()
        self.steps: list[Step] = []
        self.counts: dict[str, int] = {}
        self.layers = 0
        self.stack = [Frame("", 1, 0)]
        self.digest = PathDigest()
        self.inside = False
        self.muted = False
        self.in_opaque = 0
        self.at_input = self.done = self.ghosts.after_cut = crossing.layer_id < 0
        """Before the cut there is nothing: the model is run to see how much work comes after it."""
        self.failure: IsthmusError | None = None
        self.ended = False
        """The model returned: nothing after the cut needed data."""

    def recipe(self, find: ClassFinder) -> Recipe:
        """Run, and make the recipe. Raises an `IsthmusError` that says where the crossing does not fit the model."""
        started = time.perf_counter()
        inputs = tuple(self._input(leaf, form) for leaf, form in enumerate(self.crossing.inputs))
        tensors = [self.placing.tensor(source, []) for source in inputs]
        args, kwargs = arguments_from(self.crossing.input_structure, tensors, find)
        self._run(args, kwargs)
        if self.at_input:
            self._check_size()
        else:
            self._check()
        seconds = time.perf_counter() - started
        return Recipe(self.crossing, inputs, tuple(self.steps), self.counts, seconds)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token = running.set(self)
        try:
            # the generators are one for all threads: a tail that draws right now must not notice
            with generators.kept(generators.ALL), _Functions(self), _Kernels(self):
                self.model(*args, **kwargs)
            self.ended = True
        except Unknown as error:
            if not self.done:
                raise self.refusal(f"cannot work out {error}") from error
        except IsthmusError as error:
            self.failed(error)
        except Exception as error:
            # before the cut the model takes these inputs or not; after it, placeholders may be what it does not take
            if not self.done:
                raise self.refusal(
                    f"on placeholders the model raises {type(error).__name__}: {error!s:.200}"
                ) from error
        finally:
            running.reset(token)

    def _check_size(self) -> None:
        if isinstance(self.failure, TooLarge):
            raise self.failure
        if len(self.taken) < len(self.crossing.slots):
            raise self.refusal("a slot is none of the inputs")

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if not self.done:
            raise self.refusal("the model ended before the cut")
        missing = set(range(len(self.crossing.slots))) - self.taken
        if missing:
            raise self.refusal(f"slot {min(missing)} is not taken up anywhere before the cut")
        if self.digest_at_cut != self.crossing.path_digest:
            raise Disagreement(
                f"before the cut after {self.crossing.layer_name} the model's code took another path here than on the "
                "edge: other operations, or results of other shapes"
            )

    def refusal(self, what: str) -> CutRefused:
        """An error that says where; kept, in case the model catches it."""
        frame = self.stack[-1]
        where = f" (in {call_name(frame.path, frame.number)})" if frame.path else ""
        error = CutRefused(
            f"cannot resume after layer {self.crossing.layer_id} ({self.crossing.layer_name}): {what}{where}"
        )
        self.failed(error)
        return error

    def failed(self, error: BaseException) -> None:
        """Keep the first failure: a model that catches exceptions must not turn it into an answer."""
        if self.done and isinstance(error, PlaceholderRead):
            return  # after the cut there is no data to read
        if self.failure is None and isinstance(error, IsthmusError):
            self.failure = error

    # -- what crosses -------------------------------------------------------------------------------------------

    def _input(self, leaf: int, form: TensorForm) -> Source:
        mark = self.marks.get((INPUTS, leaf))
        return Hole(form) if mark is None else self._injected(mark, form)

    def _injected(self, mark: Mark, found: TensorForm) -> Injected:
        """A mark is believed where form and type are what this side finds; its strides are the edge's."""
        if mark.view.shape != found.shape or mark.dtype is not found.dtype:
            raise self.refusal(
                f"slot {mark.slot} is {mark.dtype} of shape {mark.view.shape} where this side finds {found.dtype} of "
                f"shape {found.shape}"
            )
        self.taken.add(mark.slot)
        return Injected(mark.slot, mark.view, mark.dtype, mark.flags)

    def _source(self, place: Place, leaf: int, tensor: torch.Tensor, arguments: list[torch.Tensor]) -> Source | None:
        """Where a result comes from; None for a tensor that does not depend on the inputs."""
        mark = self.marks.get((place, leaf))
        if mark is not None:
            return self._injected(mark, form_of_tensor(tensor))
        return self._plain_source(tensor, arguments, self.layouts.get((place, leaf)))

    def _plain_source(
        self, tensor: torch.Tensor, arguments: list[torch.Tensor], stride: tuple[int, ...] | None = None
    ) -> Source | None:
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

    # -- module calls -------------------------------------------------------------------------------------------

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The shim's entry."""
        info = self.modules.get(module)
        if info is None or self.done or self.inside or self.in_opaque:
            return forward(*args, **kwargs)
        number = self.counts[info.path] = self.counts.get(info.path, 0) + 1
        self.stack[-1].has_child = True
        self.digest.call(info.path, number)
        with torch._C.DisableTorchFunction():  # our own look at tensors is no operation of the model's
            arguments = list(tensors_in((args, kwargs)))
            tainted = any(map(self.placing.is_tainted, arguments))
        frame = Frame(info.path, number, len(self.steps))
        if info.opaque and tainted:
            with torch._C.DisableTorchFunction():
                output = self._opaque(frame, arguments)
        else:
            output = self._entered(frame, info, forward, args, kwargs)
        if not self.done:
            with torch._C.DisableTorchFunction():
                plain = tainted and all(map(is_safe, (*args, *kwargs.values())))
                self._left(frame, module, arguments, output, opaque=info.opaque and tainted, plain=plain)
        return output

    def _left(
        self,
        frame: Frame,
        module: nn.Module,
        arguments: list[torch.Tensor],
        output: Any,
        *,
        opaque: bool,
        plain: bool,
    ) -> None:
        """A module's call is over. ``plain``: it is given what `is_safe` says."""
        if frame.wrote:
            self.stack[-1].wrote = True
        skipped = opaque or (plain and self._collapse(frame, module, arguments, output))
        if not skipped and len(self.steps) == frame.start + 1:
            self.steps.pop()  # nothing in it hangs on the inputs: it runs, and nobody has to know
        if not frame.has_child:
            if self.layers == self.crossing.layer_id:
                self._reached(frame, ended=not skipped)
            self.layers += 1

    def _entered(
        self, frame: Frame, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.steps.append(Enter(info.path))
        self.stack.append(frame)
        self.in_opaque += info.opaque
        try:
            return forward(*args, **kwargs)
        finally:
            self.in_opaque -= info.opaque
            self.stack.pop()

    def _reached(self, frame: Frame, *, ended: bool) -> None:
        """The cut layer has returned."""
        name = call_name(frame.path, frame.number)
        if name != self.crossing.layer_name:
            raise self.refusal(f"layer {self.layers} is {name} here")
        if ended:
            self.steps.append(End(frame.path))
        self.counts = dict(self.counts)
        self.ghosts.after_cut = True
        self.digest_at_cut = self.digest.hexadecimal()
        self.done = True

    def _collapse(self, frame: Frame, module: nn.Module, arguments: list[torch.Tensor], output: Any) -> bool:
        """Make one step of a call whose Python leaves nothing behind but its result."""
        if frame.wrote or module not in self.pure:
            return False
        try:
            structure, tensors = flatten(output, plain=True)
        except UnknownHolder:
            return False
        steps = self.steps[frame.start :]
        if has_number(structure) and any(isinstance(step, ReadValue) for step in steps):
            return False
        sources = [self._plain_source(tensor, arguments) for tensor in tensors]
        if any(source is None or isinstance(source, Alias) for source in sources):
            return False
        kept = tuple(source for source in sources if source is not None)
        self.steps[frame.start :] = [Skip(frame.path, structure, kept)]
        return True

    def _opaque(self, frame: Frame, arguments: list[torch.Tensor]) -> Any:
        place = Place(frame.path, frame.number, -1)
        given = self.given.get(place)
        if given is None or given.name != frame.path or given.writes:
            raise self.refusal(f"{frame.path} is scripted or compiled, and what it gives is not told")
        sources = self._told(given, arguments)
        self.steps.append(Skip(frame.path, given.structure, sources))
        return unflatten(given.structure, [self._place(source, arguments) for source in sources], no_class)

    # -- operations ---------------------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function; the function mode is off while this runs."""
        name = name_of(func)
        arguments = arguments_of(args, kwargs)
        if self.done or self.in_opaque or is_mapped(arguments):
            return func(*args, **kwargs)
        frame = self.stack[-1]
        place = Place(frame.path, frame.number, frame.index)
        tainted = any(map(self.placing.is_tainted, arguments))
        number, read = self.reads.get(place, (0, None))
        if read is not None and read.name == name and tainted:
            frame.index += 1
            self.digest.operation(name, [])
            self.steps.append(ReadValue(name, number, frame.path))
            return unflatten(self.values[number], [], no_class)
        given = self.given.get(place)
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
        if self.in_opaque:
            return self.ghosts.run(func, args, kwargs)
        if self.inside or self.done:
            return self.ghosts.run(func, args, kwargs)
        # no torch function of the model's Python stands for it
        arguments = arguments_of(args, kwargs)
        frame = self.stack[-1]
        place = Place(frame.path, frame.number, frame.index)
        tainted = any(map(self.placing.is_tainted, arguments))
        given = self.given.get(place)
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
            raise self.refusal(f"{name} gives {error}") from error
        if not below:
            self.digest.operation(name, results)
        taints, drew = list(self.ghosts.taints), self.ghosts.drew
        if self.ghosts.reshaped:
            self.steps.append(Run(name, self.stack[-1].path, below))
            return result
        # by now the tensors of a draw count as depending on the inputs, too
        sources = [self._source(place, leaf, tensor, arguments) for leaf, tensor in enumerate(results)]
        if drew and not tainted:
            sources = [
                Hole(form_of_tensor(tensor)) if source is None else source
                for source, tensor in zip(sources, results, strict=True)
            ]
        if results and all(source is None for source in sources) and not taints:
            self.steps.append(Run(name, self.stack[-1].path, below))
            return result
        if any(source is None for source in sources):
            raise self.refusal(f"{name} gives a value that does not depend on the inputs, among others")
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
        fills = self._filled(place, arguments, written)
        self.steps.append(Answer(name, structure, sources, fills, written, below, drew, self.stack[-1].path))
        made = [self._tensor(source, arguments, tensor) for source, tensor in zip(sources, results, strict=True)]
        return unflatten(structure, made, no_class)

    def _tensor(self, source: Source, arguments: list[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
        if isinstance(source, Hole) and type(found) is Placeholder and tuple(found.stride()) == source.form.stride:
            return found
        if isinstance(source, (Alias, Argument)) or (isinstance(source, Injected) and type(found) is not Placeholder):
            return found
        return self._place(source, arguments)

    def _place(self, source: Source, arguments: list[torch.Tensor]) -> torch.Tensor:
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
            for frame in self.stack:
                frame.wrote = True
        return tuple(
            number
            for number, argument in enumerate(arguments)
            if type(argument) is not Placeholder and _storage_key(argument) in keys
        )

    def _filled(self, place: Place, arguments: list[torch.Tensor], written: tuple[int, ...]) -> tuple[Any, ...]:
        fill = self.fills.get(place)
        if fill is None:
            return ()
        if fill.argument not in written:
            raise self.refusal(f"slot {fill.slot} is to be written where nothing is written")
        argument, slot = arguments[fill.argument], self.crossing.slots[fill.slot]
        if (argument.dtype is torch.bool) != (slot.dtype is torch.bool):
            raise self.refusal(f"slot {fill.slot} is truth values, or is to be written to such")
        if not self.ghosts.owns(argument):
            raise self.refusal(f"slot {fill.slot} is to be written to memory of the model's own")
        if argument.untyped_storage().nbytes() < slot.storage_bytes:
            raise self.refusal(f"slot {fill.slot} is larger than what it is written to")
        self.taken.add(fill.slot)
        return (fill,)

    def _given(self, given: Given, arguments: list[torch.Tensor], *, below: bool = False) -> Any:
        """What cannot be worked out, as the edge tells it."""
        frame = self.stack[-1]
        frame.index += 1
        sources = self._told(given, arguments)
        taints: list[torch.Tensor] = []
        for number in given.writes:
            if number >= len(arguments):
                raise self.refusal(f"{given.name} writes an argument that it does not have")
            argument = arguments[number]
            if type(argument) is Placeholder or self.placing.is_tainted(argument):
                continue
            if not self.ghosts.owns(argument):
                raise self.refusal(f"{given.name} writes to memory that is not this request's")
            self.placing.taint(argument)
            taints.append(argument)
        written = self._written(arguments, taints)
        fills = self._filled(given.place, arguments, written)
        made = [self._place(source, arguments) for source in sources]
        if not below:
            self.digest.operation(given.name, made)
        self.steps.append(
            Answer(given.name, given.structure, sources, fills, written, below, not arguments, frame.path)
        )
        return unflatten(given.structure, made, no_class)

    def _told(self, given: Given, arguments: list[torch.Tensor]) -> tuple[Source, ...]:
        sources: list[Source] = []
        for leaf, told in enumerate(given.leaves):
            mark = self.marks.get((given.place, leaf))
            if isinstance(told, int):
                if told >= len(arguments) or not self.placing.is_tainted(arguments[told]):
                    raise self.refusal(f"{given.name} hands an argument through that does not depend on the inputs")
                sources.append(Argument(told))
            elif mark is not None:
                sources.append(self._injected(mark, told))
            else:
                self.ghosts.budget.spend(elements=View(told.shape, told.stride, 0).numel)
                sources.append(Hole(told))
        return tuple(sources)


class _Functions(TorchFunctionMode):
    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.rehearsal.inside:
            return func(*args, **(kwargs or {}))
        return self.rehearsal.operation(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rehearsal = rehearsal

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        rehearsal = self.rehearsal
        try:
            with torch._C.DisableTorchFunction():
                return rehearsal.kernel(func, args, kwargs or {})
        except IsthmusError as error:
            rehearsal.failed(error)
            raise


def arguments_from(
    structure: Structure, tensors: list[torch.Tensor], find: ClassFinder
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's (args, kwargs)."""
    value = unflatten(structure, tensors, find)
    if not (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
    ):
        raise PlanMismatch("the inputs are not positional and keyword arguments")
    return value


def has_number(structure: Any) -> bool:
    """Whether a structure holds a number."""
    if isinstance(structure, list):
        if len(structure) == 2 and structure[0] == "v":
            return structure[1] is not None and not isinstance(structure[1], str)
        return any(map(has_number, structure))
    return False


def _relative(tensor: torch.Tensor, slot: torch.Tensor) -> View:
    """The view that a tensor is of a slot, in elements of its own type."""
    start = int(slot.storage_offset()) * slot.itemsize
    first = int(tensor.storage_offset()) * tensor.itemsize
    offset, rest = divmod(first - start, tensor.itemsize)
    if rest or offset < 0:
        raise CutRefused("a view of other bytes than its elements begin at")
    return View(tuple(tensor.shape), tuple(tensor.stride()), offset)


def _storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
