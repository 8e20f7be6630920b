"""A rehearsal: the tail's side runs the model's Python once on placeholders, and records what the prefix of a cut does.

The record is the `Recipe`. There is no data and none is computed: the forms of results come from the meta device
(`meta_runner`), values that Python reads come with the request, and what crosses is used where the `Crossing` marks it,
if form and type are those found here. After the cut the run continues until something needs data, so that the model's
Python ends as it would and the work to come is counted.

Modules whose own Python provably writes no state (`purity`) become one `Skip`; all others run again in each replay.
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

from shared_hooks.crossing import Crossing, Given, Place
from shared_hooks.errors import Disagreement, IsthmusError, PlanMismatch, TooLarge
from shared_hooks.forward import (
    OTHER_MEMORY,
    CallKind,
    Placeholder,
    arguments_of,
    interruptible,
    is_mapped,
    kind_of,
    name_of,
    unreflected,
)
from shared_hooks.forward.foresight import watch_threads
from shared_hooks.modules import ModuleInfo, call_name, running
from shared_hooks.purity import is_pure, is_safe, pure_modules
from shared_hooks.state import PythonState
from shared_hooks.tail.meta_runner import Budget, Claims, MetaRunner, Unknown, form_of_tensor, storage_key
from shared_hooks.tail.recipe import (
    Alias,
    Argument,
    Enter,
    GiveResult,
    Hole,
    Injected,
    Notes,
    Placing,
    ReachCut,
    ReadValue,
    Recipe,
    RecipeFrame,
    Run,
    Skip,
    Source,
    Through,
)
from shared_hooks.tensors import ClassFinder, Structure, UnknownHolder, flatten, no_class, tensors_in, unflatten

# The operations of a rehearsal's prefix: run on placeholders, and recorded as steps of the recipe.


class Operations:
    """``values``: those read from data in this request."""

    def __init__(
        self, notes: Notes, claims: Claims, placing: Placing, runner: MetaRunner, values: tuple[Structure, ...]
    ) -> None:
        self.notes = notes
        self.claims = claims
        self.placing = placing
        self.runner = runner
        self.values = values
        self.later = frozenset(notes.crossing.later)
        """The places behind the branch cut."""
        self.inside = False
        self.muted = False

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Process one torch function; the function mode is off meanwhile."""
        name = name_of(func)
        arguments = arguments_of(args, kwargs)
        if name in OTHER_MEMORY and any(type(one) is Placeholder for one in arguments):
            raise Unknown(f"{name.partition('.')[0]} of a tensor that is set to another's")
        if self.notes.done or self.notes.in_opaque or is_mapped(arguments):
            return func(*args, **kwargs)
        frame = self.notes.frame
        place = Place(frame.path, frame.number, frame.index)
        tainted = any(map(self.placing.is_tainted, arguments))
        if self.later and tainted and (frame.later or place in self.later):
            return self._later(name, func, args, kwargs, arguments)
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
        self.runner.begin()
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside = False
        kind = kind_of(name, bool(arguments), result)
        if kind is CallKind.FORM:
            return result
        if kind is CallKind.VALUE or not (tainted or self.runner.drew):
            return result
        frame.index += 1
        return self._answered(place, name, arguments, result, below=False, tainted=tainted)

    def _later(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: list[torch.Tensor]
    ) -> Any:
        """Process an operation behind the branch cut: its result's form is computed as usual, and a tail runs it."""
        self.inside = True
        self.runner.begin()
        before, self.runner.after_cut = self.runner.after_cut, True
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside, self.runner.after_cut = False, before
        kind = kind_of(name, bool(arguments), result)
        if kind is CallKind.FORM:
            return result
        # a kernel that may draw does not draw if the edge's plan has seen no random numbers, or it would have refused
        if kind is CallKind.VALUE or self.runner.reshaped:
            raise self.notes.refusal(f"{name} cannot run behind the branch cut")
        try:
            _, results = flatten(result, plain=True)
        except UnknownHolder as error:
            raise self.notes.refusal(f"{name} gives {error}") from error
        frame = self.notes.frame
        frame.index += 1
        self.notes.digest.operation(name, results)
        taints = self._written(arguments, list(self.runner.taints))
        hangs = tuple(number for number, one in enumerate(tensors_in(result)) if self.placing.is_tainted(one))
        self.notes.steps.append(Run(name, frame.path, later=True, taints=taints, hangs=hangs))
        return result

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Process one operation of the dispatcher."""
        if self.muted:
            return func(*args, **kwargs)
        if self.notes.in_opaque:
            return self.runner.run(func, args, kwargs)
        if self.inside or self.notes.done:
            return self.runner.run(func, args, kwargs)
        # it is not called by a torch function of the model's Python
        arguments = arguments_of(args, kwargs)
        frame = self.notes.frame
        place = Place(frame.path, frame.number, frame.index)
        tainted = any(map(self.placing.is_tainted, arguments))
        given = self.claims.given.get(place)
        if given is not None and given.name == str(func) and tainted:
            return self._given(given, arguments, below=True)
        self.runner.begin()
        result = self.runner.run(func, args, kwargs)
        if not (tainted or self.runner.drew):
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
        taints, drew = list(self.runner.taints), self.runner.drew
        if self.runner.reshaped:
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
        # constants that it spreads or cuts like the others: views of its arguments
        sources = [
            self.claims.alias(tensor, arguments) if source is None else source
            for source, tensor in zip(sources, results, strict=True)
        ]
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
        self.notes.steps.append(
            GiveResult(name, structure, sources, fills, written, below, drew, self.notes.frame.path)
        )
        made = [self._tensor(source, arguments, tensor) for source, tensor in zip(sources, results, strict=True)]
        return unflatten(structure, made, no_class)

    def _tensor(self, source: Source, arguments: list[torch.Tensor], found: torch.Tensor) -> torch.Tensor:
        if isinstance(source, Hole) and type(found) is Placeholder and tuple(found.stride()) == source.form.stride:
            return found
        if isinstance(source, (Alias, Argument)) or (isinstance(source, Injected) and type(found) is not Placeholder):
            return found
        return self.placed(source, arguments)

    def placed(self, source: Source, arguments: list[torch.Tensor]) -> torch.Tensor:
        self.muted = True  # taking a view is not a kernel of the model
        try:
            return (
                self.placing.hole(source.form) if isinstance(source, Hole) else self.placing.tensor(source, arguments)
            )
        finally:
            self.muted = False

    def _written(self, arguments: list[torch.Tensor], taints: list[torch.Tensor]) -> tuple[int, ...]:
        """Return the arguments on storages that began as constants and depend on the inputs from now on."""
        keys = {tensor.untyped_storage()._cdata for tensor in taints}
        keys -= {slot.untyped_storage()._cdata for slot in self.placing.slots}
        if keys:
            for frame in self.notes.stack:
                frame.wrote = True
        return tuple(
            number
            for number, argument in enumerate(arguments)
            if type(argument) is not Placeholder and storage_key(argument) in keys
        )

    def _given(self, given: Given, arguments: list[torch.Tensor], *, below: bool = False) -> Any:
        """Return the result of an operation that only the edge can know."""
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
            if not self.runner.owns(argument):
                raise self.notes.refusal(f"{given.name} writes to memory that is not this request's")
            self.placing.taint(argument)
            taints.append(argument)
        written = self._written(arguments, taints)
        fills = self.claims.filled(given.place, arguments, written)
        made = [self.placed(source, arguments) for source in sources]
        if not below:
            self.notes.digest.operation(given.name, made)
        self.notes.steps.append(
            GiveResult(given.name, given.structure, sources, fills, written, below, not arguments, frame.path)
        )
        return unflatten(given.structure, made, no_class)


@dataclass(frozen=True, eq=False)
class RehearsalFacts:
    """What rehearsals of one model share while its Python ``state`` is unchanged: its own tensors, and the modules
    whose Python writes no state.
    """

    state: PythonState
    tensors: list[torch.Tensor]
    pure: set[nn.Module]
    all_pure: bool

    @classmethod
    def of(cls, model: nn.Module, modules: Iterable[nn.Module]) -> RehearsalFacts:
        """Return the current facts."""
        state = PythonState(model, settings=False)
        tensors = [*model.parameters(), *model.buffers(), *state.tensors()]
        known = set(modules)
        pure = pure_modules(known)
        return cls(state, tensors, pure, pure == known)


class Rehearsal:
    """One rehearsal in one thread. ``values``: those of the current request; ``facts``: what is known of the model."""

    is_bare = False

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        crossing: Crossing,
        values: tuple[Structure, ...],
        placing: Placing,
        budget: Budget,
        facts: RehearsalFacts,
    ) -> None:
        self.model = model
        self.modules = modules
        self.crossing = crossing
        self.placing = placing
        self.facts, self.pure = facts, facts.pure
        self.notes = Notes(crossing)
        self.runner = MetaRunner(placing, budget, facts.tensors)
        self.runner.after_cut = self.notes.done
        self.claims = Claims(crossing, self.notes, placing, self.runner)
        self.operations = Operations(self.notes, self.claims, placing, self.runner, values)
        self.counts: dict[str, int] = {}
        self.layers = 0
        self.ended = False
        """Whether the model returned: nothing after the cut needed data."""

    def thread_starts(self) -> None:
        """Refuse a thread that the model starts: failures on placeholders in it would go unnoticed."""
        raise Unknown("what a thread of the model's own does")

    def failed(self, error: BaseException) -> None:
        """Record that a placeholder could not be read."""
        self.notes.failed(error)

    def recipe(self, find: ClassFinder) -> Recipe:
        """Run, and make the recipe. Raises an `IsthmusError` that says where the crossing does not fit the model."""
        watch_threads()
        started = time.perf_counter()
        inputs = tuple(self.claims.input(leaf, form) for leaf, form in enumerate(self.crossing.inputs))
        tensors = [self.placing.tensor(source, []) for source in inputs]
        args, kwargs = arguments_from(self.crossing.input_structure, tensors, find)
        self._run(args, kwargs)
        if self.crossing.layer_id < 0:
            self._check_size()
        else:
            self._check()
        seconds = time.perf_counter() - started
        return Recipe(self.crossing, inputs, tuple(self.notes.steps), self.counts, seconds)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token = running.set(self)
        try:
            with _Functions(self), _Kernels(self), interruptible(self.runner.budget.seconds):
                self.model(*args, **kwargs)
            self.ended = True
        except Unknown as error:
            if not self.notes.done:
                raise self.notes.refusal(f"cannot work out {error}") from error
        except IsthmusError as error:
            self.notes.failed(error)
        except Exception as error:
            # before the cut the model accepts these inputs or not; after it, placeholders may be unacceptable
            if not self.notes.done:
                raise self.notes.refusal(
                    f"on placeholders the model raises {type(error).__name__}: {error!s:.200}"
                ) from error
        finally:
            running.reset(token)

    def _check_size(self) -> None:
        if isinstance(self.notes.failure, TooLarge):
            raise self.notes.failure
        if len(self.claims.taken) < len(self.crossing.slots):
            raise self.notes.refusal("a slot is not one of the inputs")

    def _check(self) -> None:
        if self.notes.failure is not None:
            raise self.notes.failure
        if not self.notes.done:
            raise self.notes.refusal("the model ended before the cut")
        missing = set(range(len(self.crossing.slots))) - self.claims.taken
        if missing:
            raise self.notes.refusal(f"slot {min(missing)} is not used anywhere before the cut")
        if self.digest_at_cut != self.crossing.path_digest:
            raise Disagreement(
                f"before the cut after {self.crossing.layer_name} the model's code took another path here than on the "
                "edge: other operations, or results of other shapes"
            )

    # -- module calls -------------------------------------------------------------------------------------------

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called by the shim of a module."""
        info = self.modules.get(module)
        if info is None or self.notes.done or self.operations.inside or self.notes.in_opaque:
            return forward(*args, **kwargs)
        number = self.counts[info.path] = self.counts.get(info.path, 0) + 1
        self.notes.frame.has_child = True
        self.notes.digest.call(info.path, number)
        with torch._C.DisableTorchFunction():  # our own reads of tensors are not operations of the model
            arguments = list(tensors_in((args, kwargs)))
            tainted = any(map(self.placing.is_tainted, arguments))
        frame = RecipeFrame(info.path, number, len(self.notes.steps))
        if later := self.operations.later:
            frame.later = self.notes.frame.later or Place(info.path, number, -1) in later
            frame.layer, frame.counts = self.layers, dict(self.counts) if frame.later else {}
        if info.opaque and tainted:
            with torch._C.DisableTorchFunction():
                output = self._opaque(frame, arguments)
        else:
            output = self._entered(frame, info, forward, args, kwargs)
        if not self.notes.done:
            with torch._C.DisableTorchFunction():
                plain = tainted and all(map(is_safe, (*args, *kwargs.values())))
                self._left(frame, module, arguments, output, opaque=info.opaque and tainted, plain=plain)
        return output

    def _left(
        self,
        frame: RecipeFrame,
        module: nn.Module,
        arguments: list[torch.Tensor],
        output: Any,
        *,
        opaque: bool,
        plain: bool,
    ) -> None:
        """Called after a module's call. ``plain``: its arguments are what `is_safe` says."""
        if frame.wrote:
            self.notes.frame.wrote = True
        skipped = opaque or (plain and self._collapse(frame, module, arguments, output))
        if frame.later and runs_later(self.notes.steps[frame.start :]):
            skipped = skipped or self._run_through(frame, module, output)
        if not skipped and len(self.notes.steps) == frame.start + 1:
            self.notes.steps.pop()  # nothing in it depends on the inputs: it runs, and need not be recorded
        if not frame.has_child:
            self.layers += 1
        if self.layers > self.crossing.layer_id and call_name(frame.path, frame.number) == self.crossing.layer_name:
            self._reached(frame, ended=not skipped)
        elif not frame.has_child and self.layers > self.crossing.layer_id:
            self._check_within(frame)

    def _entered(
        self,
        frame: RecipeFrame,
        info: ModuleInfo,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.notes.steps.append(Enter(info.path, frame.later))
        self.notes.stack.append(frame)
        self.notes.in_opaque += info.opaque
        try:
            return forward(*args, **kwargs)
        finally:
            self.notes.in_opaque -= info.opaque
            self.notes.stack.pop()

    def _check_within(self, frame: RecipeFrame) -> None:
        """Called after the last layer before a cut that is after a block around it."""
        around = any(call_name(one.path, one.number) == self.crossing.layer_name for one in self.notes.stack)
        if not around or self.layers > self.crossing.layer_id + 1:
            raise self.notes.refusal(f"layer {self.layers - 1} is {call_name(frame.path, frame.number)} here")

    def _reached(self, frame: RecipeFrame, *, ended: bool) -> None:
        """Called after the layer or block that the cut is after."""
        if self.layers != self.crossing.layer_id + 1:
            name = call_name(frame.path, frame.number)
            raise self.notes.refusal(f"{name} is layer {self.layers - 1} here")
        if ended:
            self.notes.steps.append(ReachCut(frame.path))
        self.counts = dict(self.counts)
        self.runner.after_cut = True
        self.digest_at_cut = self.notes.digest.hexadecimal()
        self.notes.done = True

    def _collapse(self, frame: RecipeFrame, module: nn.Module, arguments: list[torch.Tensor], output: Any) -> bool:
        """Make one step of a call whose Python has no effect but its result."""
        if frame.wrote or module not in self.pure or not self._is_still_pure(module):
            return False
        try:
            structure, tensors = flatten(output, plain=True)
        except UnknownHolder:
            return False
        steps = self.notes.steps[frame.start :]
        if runs_later(steps):
            return False
        if has_number(structure) and any(isinstance(step, ReadValue) for step in steps):
            return False
        sources = [self.claims.plain_source(tensor, arguments) for tensor in tensors]
        if any(source is None or isinstance(source, Alias) for source in sources):
            return False
        kept = tuple(source for source in sources if source is not None)
        self.notes.steps[frame.start :] = [Skip(frame.path, structure, kept)]
        return True

    def _run_through(self, frame: RecipeFrame, module: nn.Module, output: Any) -> bool:
        """Make one step of a call behind the branch cut whose Python has no effect but its result, and which writes to
        nothing that was a constant before.
        """
        if frame.wrote or module not in self.pure or not self._is_still_pure(module):
            return False
        counts = {**frame.counts, frame.path: frame.number - 1}
        hangs = tuple(number for number, one in enumerate(tensors_in(output)) if self.placing.is_tainted(one))
        self.notes.steps[frame.start :] = [Through(frame.path, frame.layer, tuple(counts.items()), hangs)]
        return True

    def _is_still_pure(self, module: nn.Module) -> bool:
        """Return whether a proof in `RehearsalFacts` still holds: it was made before the model set any attribute (such
        as a list to which the module appends, instead of None). If Python has read data, it may set others in another
        request.
        """
        if self.facts.all_pure:
            return True
        if any(isinstance(step, ReadValue) for step in self.notes.steps):
            return all(type(one).__module__.startswith("torch.nn.") for one in module.modules())
        return self.facts.state.is_same or is_pure(module)

    def _opaque(self, frame: RecipeFrame, arguments: list[torch.Tensor]) -> Any:
        place = Place(frame.path, frame.number, -1)
        given = self.claims.given.get(place)
        if given is None or given.name != frame.path or given.writes:
            raise self.notes.refusal(f"{frame.path} is scripted or compiled, and its result is not described")
        sources = self.claims.sources(given, arguments)
        self.notes.steps.append(Skip(frame.path, given.structure, sources))
        return unflatten(given.structure, [self.operations.placed(source, arguments) for source in sources], no_class)


def runs_later(steps: Iterable[Any]) -> bool:
    """Return whether some of these steps run behind the branch cut."""
    return any(isinstance(step, Through) or (isinstance(step, Run) and step.later) for step in steps)


class _Functions(TorchFunctionMode):
    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.rehearsal.operations.inside:
            return func(*args, **(kwargs or {}))
        return self.rehearsal.operations.operation(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rehearsal = rehearsal

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        rehearsal = self.rehearsal
        try:
            with torch._C.DisableTorchFunction():
                return rehearsal.operations.kernel(func, args, kwargs or {})
        except IsthmusError as error:
            rehearsal.notes.failed(error)
            raise


def arguments_from(
    structure: Structure, tensors: list[torch.Tensor], find: ClassFinder
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's (args, kwargs)."""
    value = unflatten(structure, tensors, find)
    if not (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
    ):
        raise PlanMismatch("the inputs are not positional and keyword arguments")
    return value


def has_number(structure: Any) -> bool:
    """Return whether a structure contains a number."""
    if isinstance(structure, list):
        if len(structure) == 2 and structure[0] == "v":
            return structure[1] is not None and not isinstance(structure[1], str)
        return any(map(has_number, structure))
    return False
