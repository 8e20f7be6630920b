"""The tail: the model's own Python runs again, the prefix takes its results from the recipe, the rest runs at full
speed.

Until the cut, every module call completely before it is replaced by its result (a *stub*), and every operation between
modules is *replayed*: it gives injected values and placeholders. What does not depend on the inputs simply runs. Right
after the cut the function mode is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shared_hooks.crossing import EarlyOutput, generators
from shared_hooks.errors import PlanMismatch
from shared_hooks.forward import (
    OTHER_MEMORY,
    REFLECTED,
    Allowance,
    CallKind,
    Placeholder,
    Session,
    arguments_of,
    check_real,
    is_form,
    is_mapped,
    kind_of,
    name_of,
    uninterrupted,
)
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.metrics import Measurement
from shared_hooks.modules import ModuleInfo, attach, running
from shared_hooks.state import first_few, lost
from shared_hooks.tail.recipe import (
    NOTHING,
    Enter,
    GiveResult,
    Hole,
    Injected,
    Nothing,
    Placing,
    ReachCut,
    ReadValue,
    Recipe,
    Run,
    Skip,
    Source,
    Step,
    Through,
    label,
    slots_of,
)
from shared_hooks.tail.rehearsal import arguments_from
from shared_hooks.tensors import ClassFinder, Structure, no_class, tensors_in, unflatten

Substitute = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs in place of a module's forward, which it is given with the arguments."""
Substitutes = Callable[[nn.Module], Substitute | None]
"""What runs in place of a module that is called behind the cut; None: the module itself."""


class _AfterCut(Allowance):
    """Counts what runs behind the cut: what comes before makes placeholders, and was rehearsed."""

    def __init__(self, session: TailSession, most: int) -> None:
        super().__init__(most, "on these values the model takes, after the cut,", alive=True)
        self._session = session

    def counts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._session.is_real and super().counts(func, args, kwargs)


class TailSession(Session):
    """Replays the prefix of one recipe and then runs the rest like any session. ``ends``: whether it runs to the
    model's end.
    """

    ends = True

    def __init__(
        self,
        modules: dict[nn.Module, ModuleInfo],
        measurement: Measurement | None,
        save: set[int | str],
        early: EarlyOutput,
        recipe: Recipe,
        device: torch.device,
        lifecycle: Lifecycle,
        substitutes: Substitutes | None = None,
    ) -> None:
        super().__init__(modules, measurement, save)
        self.substitutes = substitutes
        self.lifecycle = lifecycle
        self.recipe = recipe
        self.crossing = early.crossing
        self.steps = recipe.steps
        self.position = 0
        self.in_opaque = 0
        self.through_calls = 0
        """How many calls behind the branch cut are running unwatched, one in another ..."""
        self.later_calls = 0
        """... and how many that are watched."""
        self.resumed = False
        self.resumed_at = 0
        self.values = early.values
        self.generators = early.generators
        shared = recipe.cache.get(device)
        self.shared: Shared = recipe.cache.setdefault(device, Shared(recipe)) if shared is None else shared
        self.placing = Placing(slots_of(early, device), device, self.shared.holes)
        self.device = device
        self.modes: list[Any] = []
        self.bounding = False
        self.allowance: _AfterCut | None = None
        """Bounds what could not be foreseen."""
        self.inside = False
        self.at_cut: tuple[list[int], dict[str, object]] | None = None
        """Where data may decide on what comes after the cut: what `check_left` compares with."""
        self.tagged = False
        """The model set an attribute on a placeholder."""

    @property
    def is_real(self) -> bool:
        """Whether the current call really runs on this side, and is no replay."""
        return bool(self.resumed or self.through_calls or self.later_calls)

    def inputs(self, find: ClassFinder) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's (args, kwargs): injected where they are read after the cut, placeholders elsewhere."""
        tensors = [self.placing.tensor(source, []) for source in self.recipe.inputs]
        return arguments_from(self.crossing.input_structure, tensors, find)

    # -- the replay ---------------------------------------------------------------------------------------------

    def next_step(self) -> Step | Nothing:
        """Return the next step."""
        return self.steps[self.position] if self.position < len(self.steps) else NOTHING

    def advance(self) -> None:
        """Move on to the next step; after the last one the cut is reached."""
        self.position += 1
        if self.position == len(self.steps):
            self.resume()

    def release(self) -> None:
        self.placing.release()
        if self.tagged:
            self.shared.forget()
        # they refer to this session: a cycle that would keep the frontier until the collector runs
        self.modes.clear()

    def resume(self) -> None:
        """Called at the cut: number layers from here, and leave the function mode."""
        with uninterrupted():
            self._resume()

    def _resume(self) -> None:
        self.resumed = True
        self.next_layer = self.crossing.layer_id + 1
        self.counts = dict(self.recipe.counts)
        self.leave(only_on_top=True)
        generators.at_cut(self.crossing.generators, self.generators)
        token = running.set(None)  # a hook that runs the model is outside of this forward
        try:
            self.lifecycle.emit(Stage.AFTER_INJECT, split=self.crossing.layer_name)
            self.lifecycle.emit(Stage.BEFORE_TAIL, split=self.crossing.layer_name)
        finally:
            running.reset(token)
        # nothing is left to do for the modules that run from here on
        self.is_bare = self.ends and not (self.measurement or self.save or self.substitutes or attach.watchers)
        if self.recipe.is_open:
            self.at_cut = self.recipe.versions(), generators.fingerprint(self.crossing.generators, self.device)
        self.resumed_at = time.perf_counter_ns()

    def begin(self) -> None:
        """Start watching the prefix; without one, the cut is where the model begins."""
        if self.recipe.most is not None:
            self.allowance = _AfterCut(self, self.recipe.most)
            self.allowance.__enter__()  # type: ignore[no-untyped-call]
            self.bounding = True
        if self.steps:
            self.enter()
        else:
            self.resume()

    def through(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's own output."""
        output = model(*args, **kwargs)
        check_real(tensors_in(output))
        return output

    def enter(self) -> None:
        """Enter the modes; below the function level there is rarely anything to replay."""
        for mode in (Replay(self), Below(self)) if self.shared.has_below else (Replay(self),):
            mode.__enter__()  # type: ignore[no-untyped-call]
            self.modes.append(mode)

    def leave(self, *, only_on_top: bool = False) -> None:
        """Leave the modes; in the middle of the model only if no other mode is on top of them, else at the end."""
        if self.bounding and not only_on_top:
            self.modes.append(self.allowance)
            self.bounding = False
        if not self.modes:
            return
        functions, dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        there = [*functions[-1:], *dispatches[-1:]] if only_on_top else [*functions, *dispatches]
        for mode in list(self.modes):
            if mode in there:
                self.modes.remove(mode)
                mode.__exit__(None, None, None)
        if not only_on_top:
            self.modes.clear()  # a run that was ended while torch had one off the stack has left it there

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Before the cut: the module's result from the recipe. A call behind it may be replaced by a substitute."""
        if self.resumed or self.through_calls:
            if self.substitutes is not None and (found := self.substitutes(module)) is not None:
                self.begun += 1
                return found(forward, args, kwargs)
            info = self.modules.get(module)
            return forward(*args, **kwargs) if info is None else self.run(info, forward, args, kwargs)
        info = self.modules.get(module)
        if info is None:
            return forward(*args, **kwargs)
        path, steps, position = info.path, self.steps, self.position
        step = steps[position] if position < len(steps) else NOTHING
        if type(step) is Skip and step.path == path:
            output = self.shared.ready.get(position)
            if output is None:
                output = self.skipped(step, args, kwargs)
            self.advance()
            return output
        if type(step) is Through and step.path == path:
            return self.ran_through(step, info, forward, args, kwargs)
        later = 0
        if type(step) is Enter and step.path == path:
            later = int(step.later)
            self.advance()
        self.stack.append((info, 0))
        self.in_opaque += info.opaque
        self.later_calls += later
        try:
            output = forward(*args, **kwargs)
        finally:
            self.stack.pop()
            self.in_opaque -= info.opaque
            self.later_calls -= later
        if not self.resumed:
            step = self.next_step()
            if type(step) is ReachCut and step.path == path:
                self.advance()
        return output

    def ran_through(
        self,
        step: Through,
        info: ModuleInfo,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a module behind the branch cut, run on what exists; it depends on the inputs."""
        self.next_layer, self.counts = step.layer, dict(step.counts)
        self.through_calls += 1
        try:
            output = self.run(info, forward, args, kwargs)
        finally:
            self.through_calls -= 1
        with torch._C.DisableTorchFunction():
            self.taint(output, step.hangs, [])
        self.advance()
        return output

    def skipped(self, step: Skip, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a module of the prefix; most give one placeholder, which is kept for the next
        request.
        """
        self.inside = True
        try:
            with torch._C.DisableTorchFunction():
                arguments = list(tensors_in((args, kwargs))) if step.sources and _takes_arguments(step.sources) else []
                output = self.answer(step.structure, step.sources, arguments)
        finally:
            self.inside = False
        if type(output) is Placeholder and type(step.sources[0]) is Hole:
            self.shared.ready[self.position] = output
        return output

    def answer(
        self, structure: Structure, sources: Sequence[Source], arguments: list[torch.Tensor], *, fresh: bool = False
    ) -> Any:
        """Return the result of a module or operation of the prefix. ``fresh``: autograd will mark the tensors."""
        try:
            tensors = [self.placing.tensor(source, arguments, fresh=fresh) for source in sources]
        except PlanMismatch as error:
            raise self.mismatch(str(error)) from error
        return unflatten(structure, tensors, no_class)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Process one torch function in the prefix; the function mode is off meanwhile."""
        ready = self.shared.answered.get(self.position)
        if ready is not None and ready[0] is func and not kwargs and _is_plainly_tainted(args):
            self.advance()
            return ready[1]
        name = name_of(func)
        arguments = arguments_of(args, kwargs)
        if is_mapped(arguments):
            return func(*args, **kwargs)
        if name in OTHER_MEMORY and any(type(one) is Placeholder for one in arguments):
            raise self.mismatch(f"{name}() ran")
        self.inside = True
        try:
            return self._operation(name, arguments, func, args, kwargs)
        finally:
            self.inside = False

    def _operation(
        self, name: str, arguments: list[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        step = self.next_step()
        # Python calls a subclass first, so that `constant < placeholder` arrives as `placeholder > constant`
        matches = isinstance(step, _OPERATIONS) and step.name in (name, REFLECTED.get(name))
        matches = matches and not getattr(step, "below", False)
        if not any(map(self.placing.is_tainted, arguments)):
            if not (matches and isinstance(step, GiveResult) and step.draws):
                return self.run_here(func, args, kwargs, arguments)
        elif not matches:
            if is_form(name):
                return self.run_here(func, args, kwargs, arguments)
            result = self.run_here(func, args, kwargs, arguments)
            if kind_of(name, bool(arguments), result) is CallKind.FORM:
                return result
            raise self.mismatch(f"{name}() ran")
        if isinstance(step, Run):
            result = self.run_here(func, args, kwargs, arguments)
            if step.later:
                self.taint(result, step.hangs, [arguments[number] for number in step.taints if number < len(arguments)])
        elif isinstance(step, ReadValue):
            result = unflatten(self.values[step.number], [], no_class)
        else:
            assert isinstance(step, GiveResult)
            result = self.answer(step.structure, step.sources, arguments)
            self.write(step, arguments)
            if type(result) is Placeholder and type(step.sources[0]) is Hole and not (step.taints or step.fills):
                self.shared.answered[self.position] = func, result
        self.advance()
        return result

    def taint(self, result: Any, hangs: Sequence[int], arguments: list[torch.Tensor]) -> None:
        """Mark results of what ran behind the branch cut, and what it wrote to, as depending on the inputs."""
        results = list(tensors_in(result)) if hangs else []
        for tensor in (*(results[number] for number in hangs if number < len(results)), *arguments):
            self.placing.taint(tensor)

    def run_here(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: list[torch.Tensor]) -> Any:
        """Return an operation that is run; what it makes is noted where something is written later."""
        result = func(*args, **kwargs)
        if self.shared.has_taints:
            self.placing.note_made(result, arguments)
        return result

    def write(self, step: GiveResult, arguments: list[torch.Tensor]) -> None:
        """Storages that began as constants depend on the inputs now, and may get their content."""
        for number in step.taints:
            try:
                self.placing.overwrite(arguments[number])
            except (PlanMismatch, IndexError) as error:
                raise self.mismatch(str(error)) from error
        for fill in step.fills:
            try:
                self.placing.fill(fill.slot, self.crossing.slots[fill.slot].pieces, arguments[fill.argument])
            except (PlanMismatch, IndexError) as error:
                raise self.mismatch(str(error)) from error

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return one operation of the dispatcher that no torch function of the prefix called."""
        arguments = arguments_of(args, kwargs)
        self.inside = True
        try:
            with torch._C.DisableTorchFunction():
                step = self.next_step()
                matches = isinstance(step, (GiveResult, Run)) and step.below and step.name == str(func)
                if not any(map(self.placing.is_tainted, arguments)):
                    if not (matches and isinstance(step, GiveResult) and step.draws):
                        return self.run_here(func, args, kwargs, arguments)
                elif not matches:
                    raise self.mismatch(f"{func} ran")
                if isinstance(step, Run):
                    result = self.run_here(func, args, kwargs, arguments)
                else:
                    assert isinstance(step, GiveResult)
                    result = self.answer(step.structure, step.sources, arguments, fresh=True)
                    self.write(step, arguments)
        finally:
            self.inside = False
        self.advance()
        return result

    def thread_starts(self) -> None:
        """The model starts one; behind the cut it may."""
        if not self.resumed:
            raise self.mismatch("a thread started")

    def check_left(self) -> None:
        """After a path that data may have decided on: Python state that was written there is put back when a tail ends,
        and the next forward would have found it; numbers that were drawn there are this side's. The edge's plan knows
        nothing of it, or it would have refused, or sent the generator's state.
        """
        if self.at_cut is None:
            return
        versions, drawn = self.at_cut
        state, known = self.recipe.state, frozenset(self.crossing.leaves)
        names = [] if state is None else lost(state, known)
        if self.recipe.versions() != versions:
            names.append("a parameter, buffer or other tensor, written in place")
        if names:
            raise PlanMismatch(
                f"after the cut the model took a path on which it keeps state that no plan has seen: {first_few(names)}"
            )
        now = generators.fingerprint(self.crossing.generators, self.device)
        moved = [name for name, mark in drawn.items() if now[name] != mark]
        if moved:
            raise PlanMismatch(
                f"after the cut the model took a path on which it draws random numbers ({', '.join(moved)}), "
                "which no plan has seen"
            )

    def mismatch(self, what: str) -> PlanMismatch:
        """Return an error that says where the replay left the plan; kept, in case the model catches it."""
        layer = f"the cut after layer {self.crossing.layer_id} ({self.crossing.layer_name})"
        due = label(self.next_step())
        error = PlanMismatch(f"resuming at {layer}: {what} where the plan has {due}; the code or its state differs")
        self.failed(error)
        return error


_OPERATIONS = (GiveResult, ReadValue, Run)
_PLAIN = frozenset({Placeholder, torch.nn.Parameter, bool, int, float, str, type(None)})


def _is_plainly_tainted(args: tuple[Any, ...]) -> bool:
    """Return whether a placeholder is among them, and nothing that would have to be looked into."""
    kinds = {type(value) for value in args}
    return Placeholder in kinds and kinds <= _PLAIN


def _takes_arguments(sources: Sequence[Source]) -> bool:
    return any(type(source) not in (Hole, Injected) for source in sources)


class Shared:
    """What the replays of one recipe on one device share: placeholders, by source and by skipped module."""

    def __init__(self, recipe: Recipe) -> None:
        self.holes: dict[Hole, Placeholder] = {}
        self.ready: dict[int, Placeholder] = {}
        self.answered: dict[int, tuple[Any, Placeholder]] = {}
        """The operation of a step, and what it is answered with in all requests."""
        self.has_below = any(isinstance(step, (GiveResult, Run)) and step.below for step in recipe.steps)
        self.has_taints = any(isinstance(step, GiveResult) and step.taints for step in recipe.steps)

    def forget(self) -> None:
        """A placeholder was changed: the next request gets new ones."""
        self.holes.clear()
        self.ready.clear()
        self.answered.clear()


class Replay(TorchFunctionMode):
    """Hands the prefix's operations to the session, which enters and leaves it: it ends inside the model."""

    def __init__(self, session: TailSession) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.session.resumed or self.session.in_opaque or self.session.through_calls:
            return func(*args, **(kwargs or {}))
        return self.session.operation(func, args, kwargs or {})


class Below(TorchDispatchMode):
    """The same for the kernels below, where the recipe has steps for them."""

    def __init__(self, session: TailSession) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session = self.session
        if session.resumed or session.in_opaque or session.inside or session.through_calls:
            return func(*args, **(kwargs or {}))
        return session.kernel(func, args, kwargs or {})
