"""Runs a wrapped model, whole or in part, and keeps each thread's results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from shared_hooks.crossing import Crossing, EarlyOutput, generators
from shared_hooks.errors import CutRefused, Disagreement, PlanMismatch, UnknownLayer
from shared_hooks.forward import HookExitException, Session, context, interruptible
from shared_hooks.head import Attempt, BranchHead, Diverged, HeadSession, Stubs, WalkingHead, watching
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.metrics import Measurement, gpu_of
from shared_hooks.metrics.sampler import sampler
from shared_hooks.modules import attach, fast_path_off, tables
from shared_hooks.planning import Cut, Cutting, HeadWalk, Loads, Plan, Planner, members
from shared_hooks.purity import Turns, is_pure
from shared_hooks.tensors import classes_of, flatten

if TYPE_CHECKING:  # not imported where heads run
    from shared_hooks.middle import Span
    from shared_hooks.tail import RecipeBook, RehearsalLimits, Substitutes, TailSession


SPANS: Final = 256
"""Maximum number of middle parts kept; beyond it all are dropped."""


class LastForward(threading.local):
    """A thread's last forward, and whether the next ones are measured."""

    session: Session | None = None
    durations: Mapping[str, int] = MappingProxyType({})
    """Nanoseconds of its parts."""
    metrics = True


class ModelRunner:
    """Runs heads, middle parts, tails and whole forwards of one model: it has the planner, the recipes, the shims, and
    each thread's last forward. Thread-safe. The arguments are those of `WrappedModel`.
    """

    def __init__(
        self,
        model: nn.Module,
        depth: int | None,
        metrics: bool,
        lifecycle: Lifecycle,
        rehearsals: RehearsalLimits | None,
        loads: Loads | None,
        isolated: bool,
    ) -> None:
        self.model = model
        self.depth = depth
        self.metrics_enabled = metrics
        self.lifecycle = lifecycle
        self.modules = tables.walk(model, depth)
        self._aliases = tables.aliases(model)
        self._find = classes_of(tables.holder_modules(model))
        self.save: frozenset[int | str] = frozenset()
        self.planner = Planner(model, self.modules, self._aliases, depth, self.lifecycle, loads)
        self.turns = Turns(model)
        self._isolated = isolated
        self._rehearsals = rehearsals
        self._recipes: RecipeBook | None = None
        self._pure: dict[nn.Module, bool] = {}
        self._spans: dict[tuple[str, Cut], tuple[int, Span]] = {}
        """Middle parts by the cut's digest and their end, with the number of plans at that time."""
        self._making = threading.Lock()
        self.last = LastForward()
        self.is_attached = self.is_detached = False

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        return self.planner.device

    @property
    def recipes(self) -> RecipeBook:
        """The recipes of its tails."""
        self.check_attached()
        with self._making:
            if self._recipes is None:
                from shared_hooks.tail import RecipeBook, RehearsalLimits

                limits = self._rehearsals or RehearsalLimits()
                self._recipes = RecipeBook(self.model, self.modules, self._find, limits, self.turns)
            return self._recipes

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Record the model on these inputs, and keep the plan."""
        self.check_attached()
        if self.metrics_enabled:
            sampler.touch(gpu_of(self.device))  # so that sensors are found before the first forward
        return self.planner.plan(args, kwargs)

    def check_attached(self) -> None:
        """Attach shims to the modules before the first run, so that a model that is never run stays untouched."""
        if self.is_attached:
            return
        if self.is_detached:
            raise PlanMismatch("this WrappedModel is detached; make a new one")
        with self.turns.alone(), attach.lock:  # between runs of others
            if not self.is_attached and not self.is_detached:
                for module in self.modules:
                    attach.attach(module)
                self.is_attached = True

    def detach(self) -> None:
        """Remove the shims, for good. A second call has no effect."""
        with attach.lock:
            modules = self.modules if self.is_attached else ()
            self.is_attached, self.is_detached = False, True
            for module in modules:
                attach.detach(module)

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole model."""
        self.check_attached()
        measurement, made = self._measurement(), self.planner.made
        plans = self.planner.plans_if_possible(args, kwargs)
        self._check_saved(plans)
        if self.planner.made != made:
            measurement = self._measurement()  # looking a plan up belongs to the forward, making one does not
        started = time.perf_counter_ns()
        session = Session(self.modules, measurement, self.save)
        # where no cut is allowed the model may keep state; otherwise later heads and tails would find it
        if self._isolated or self.planner.allows_cuts:
            turn = self.turns.one(
                writes=any(plan.trace.writes_kept for plan in plans),
                foreseen=bool(plans) and not any(plan.trace.dynamic for plan in plans),
            )
        else:
            turn = self.turns.alone()
        with turn:
            output = self._run_whole(session, args, kwargs)
        self._finish(session, {"whole": _ended(session) - started})
        return output

    def _check_saved(self, plans: list[Plan]) -> None:
        """Check that the names and ids in `save_layers` exist, on this path or another."""
        for layer in self.save:
            path = tables.call_parts(layer)[0] if isinstance(layer, str) else None
            known = {info.path for info in self.modules.values()}
            if path not in known and self._aliases.get(path or "") not in known:
                for plan in plans:
                    plan.layer_id(layer)

    def _measurement(self) -> Measurement | None:
        """Begin a measurement, if wanted."""
        wanted = self.metrics_enabled and self.last.metrics
        return Measurement(self.device) if wanted else None

    def _session(self, kind: Callable[..., Any], *more: Any) -> Any:
        return kind(self.modules, self._measurement(), self.save, *more)

    def _run_whole(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), _running(session), fast_path_off(), interruptible():
            return self.model(*args, **kwargs)

    def head(self, end: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EarlyOutput:
        key = self.planner.key(args, kwargs)
        predicted_plan = None if members(end) is not None else self.planner.predicted_plan(key, args, kwargs, end)
        if predicted_plan is not None:
            with Attempt(predicted_plan[0].trace, args, kwargs) as attempt:
                return self._head_as(*predicted_plan, args, kwargs)
            assert attempt.failed
            self.planner.invalidate(args, kwargs)
            key = None  # the model has run
        for again in range(2):
            plans = self.planner.plans_for(args, kwargs, key) if not again else [self.plan(args, kwargs)]
            unknown: UnknownLayer | None = None
            for plan in plans:
                try:
                    cutting, crossing = plan.cutting(end)
                except UnknownLayer as error:
                    unknown = error
                    continue
                if (walk := self._walk(plan, cutting, crossing)) is not None:
                    with Attempt(plan.trace, args, kwargs):
                        return self._head_as(plan, cutting, crossing, args, kwargs, walk)
                    plan.forget_walk(cutting)
                with Attempt(plan.trace, args, kwargs):
                    return self._head_as(plan, cutting, crossing, args, kwargs)
            if unknown is not None and len(plans) == 1:
                raise unknown
        raise CutRefused("the model takes another path each time it runs on this input: its Python state differs")

    def _walk(self, plan: Plan, cutting: Cutting, crossing: Crossing) -> HeadWalk | None:
        """Return what a head compares if layers are neither saved nor observed; None: all that it can."""
        if self.save or attach.watchers or crossing.layer_id < 0 or cutting.branch is not None:
            return None
        return plan.walk(cutting, plan.place_at(crossing.layer_id, crossing.layer_name), self.modules)

    def _head_as(
        self,
        plan: Plan,
        cutting: Cutting,
        crossing: Crossing,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        walk: HeadWalk | None = None,
    ) -> EarlyOutput:
        if self.save:
            self._check_saved([plan])
        started = time.perf_counter_ns()
        more = plan, cutting, crossing, flatten((args, kwargs))[1]
        session: HeadSession
        if cutting.branch is not None:
            session = self._session(BranchHead, plan.kept_for(cutting, Stubs.of), self._is_pure, self.device, *more)
        elif walk is None:
            session = self._session(HeadSession, *more)
        else:
            session = WalkingHead(self.modules, self._measurement(), walk, *more)
        try:
            with self.turns.one(writes=plan.trace.writes_kept, foreseen=not plan.trace.dynamic), torch.no_grad():
                if walk is not None:  # which needs no modes
                    with _running(session), fast_path_off():
                        self._until_cut(session, args, kwargs)
                elif crossing.layer_id >= 0:
                    with _running(session), fast_path_off(), watching(session):
                        self._until_cut(session, args, kwargs)
                self.lifecycle.emit(Stage.BEFORE_BANK, split=crossing.layer_name)
                early = session.early()
                self.lifecycle.emit(Stage.AFTER_BANK, split=crossing.layer_name, early=early)
        finally:
            session.release()
        self._finish(session, {"head": _ended(session) - started})
        return early

    def _is_pure(self, module: nn.Module) -> bool:
        """Return whether calls of a module have no effect but their result; checked once."""
        found = self._pure.get(module)
        if found is None:
            found = self._pure[module] = is_pure(module)
        return found

    def _until_cut(self, session: HeadSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.model(*args, **kwargs)
        except HookExitException as leaving:
            if leaving is not session.exit:
                raise
        if not session.stopped:
            raise Diverged

    def middle(self, early: EarlyOutput, start: Cut, end: Cut) -> EarlyOutput:
        from shared_hooks.middle import MiddleSession

        self._check_start(early.crossing, start)
        span = self.span(early, end)
        return early if span is None else self._resumed(early, partial(MiddleSession, span))

    def span(self, early: EarlyOutput, end: Cut) -> Span | None:
        """Return the part between two cuts, planned the first time; None if nothing lies between them."""
        from shared_hooks.middle import span_between

        crossing = early.crossing
        if crossing.later or members(end) is not None:
            raise CutRefused("a middle part is between two plain cuts, not along branches")
        if end in (crossing.layer_id, crossing.layer_name):
            return None
        with context.restored(crossing.context):
            # building it is bounded, and planning runs the model on inputs of this form
            self.recipes.recipe(early, self.device)
            key = crossing.digest, end
            made, span = self._spans.get(key, (-1, None))
            if span is None or made != self.planner.made or early.values:
                span = span_between(self.planner, early, end, self.device, self._find)
                if len(self._spans) >= SPANS:
                    self._spans.clear()
                self._spans[key] = self.planner.made, span
        # the same cut may have another name
        return None if span.target.layer_name == crossing.layer_name else span

    def tail(
        self, early: EarlyOutput, start: Cut, substitutes: Substitutes | None = None, gradients: bool = False
    ) -> Any:
        from shared_hooks.tail import TailSession

        self._check_start(early.crossing, start)
        return self._resumed(early, partial(TailSession, substitutes=substitutes), gradients)

    def _check_start(self, crossing: Crossing, start: Cut) -> None:
        if (
            start not in (crossing.layer_id, crossing.layer_name, str(crossing.layer_id))
            and self._aliases.get(str(start)) != crossing.layer_name
            and not crossing.layer_name.startswith(f"{start}.")  # a block: its last layer is known with a plan only
        ):
            raise UnknownLayer(
                f"start={start!r}, but this EarlyOutput was cut at {crossing.layer_id} ({crossing.layer_name})"
            )
        if crossing.depth != self.depth:
            raise Disagreement(f"the head was planned with depth={crossing.depth}, this side has depth={self.depth}")
        context.check(crossing.context, self.modules, crossing.cache)

    def _resumed(self, early: EarlyOutput, kind: Callable[..., TailSession], gradients: bool = False) -> Any:
        """Run a session of this kind from a cut on."""
        crossing = early.crossing
        self.lifecycle.emit(Stage.BEFORE_INJECT, split=crossing.layer_name, early=early)
        started = time.perf_counter_ns()
        recipe = self.recipes.recipe(early, self.device)
        session: TailSession = self._session(kind, early, recipe, self.device, self.lifecycle)
        with (
            self.turns.one(writes=session.shared.has_taints, foreseen=not recipe.is_open),
            torch.set_grad_enabled(gradients),
            _running(session),
            fast_path_off(),
            context.restored(crossing.context),
            generators.kept(crossing.generators, alone=recipe.is_open),
        ):
            try:
                generators.restore(crossing.generators, early.generators)
                args, kwargs = session.inputs(self._find)
                session.begin()
                with interruptible():
                    output = session.through(self.model, args, kwargs)
                if session.failure is None and session.ends:
                    session.check_left()
            finally:
                session.leave()
                session.release()
        if session.allowance is not None and session.allowance.failure is not None:  # the model's code has caught it
            raise session.allowance.failure
        if session.failure is not None:
            raise session.failure
        if not session.resumed:
            raise session.mismatch("the model returned")
        now = _ended(session)
        self._finish(session, {"inject": session.resumed_at - started, "compute": now - session.resumed_at})
        self.emit_after(Stage.AFTER_TAIL, split=crossing.layer_name, output=output)
        return output

    def _finish(self, session: Session, durations: dict[str, int]) -> None:
        self.last.session = session
        self.last.durations = durations

    def emit_after(self, stage: Stage, **facts: Any) -> None:
        """Call the hooks. If one runs the model, that does not become this thread's last forward."""
        session, durations = self.last.session, self.last.durations
        try:
            self.lifecycle.emit(stage, **facts)
        finally:
            self.last.session, self.last.durations = session, durations


def _ended(session: Session) -> int:
    """Return the time of the end; with metrics that is when the device is done, too."""
    if session.measurement is not None:
        session.measurement.end()
    return time.perf_counter_ns()


class _running:  # used as a function
    """Mark the block as a forward of this session."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._token = attach.running.set(self._session)

    def __exit__(self, *_: object) -> None:
        attach.running.reset(self._token)
