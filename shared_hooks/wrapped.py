"""`WrappedModel`: the one object people use. It walks a model, plans, cuts, resumes, measures, verifies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shared_hooks.crossing import Crossing, EarlyOutput, generators
from shared_hooks.errors import CutRefused, Disagreement, InputMismatch, PlanMismatch, UnknownLayer
from shared_hooks.forward import HookExitException, Session, context, interruptible
from shared_hooks.head import Attempt, Diverged, HeadSession, watching
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.metrics import ForwardMetrics, LayerMetrics, Measurement, gpu_of
from shared_hooks.metrics.sampler import sampler
from shared_hooks.modules import agreement, attach, fast_path_off, hierarchy, tables
from shared_hooks.modules.manifest import Fact, manifest
from shared_hooks.planning import Cut, Cutting, Layers, Loads, Plan, Planner
from shared_hooks.purity import Turns
from shared_hooks.showing import told
from shared_hooks.state import PythonState
from shared_hooks.tensors import classes_of, flatten

if TYPE_CHECKING:  # where heads run, these are not loaded
    from shared_hooks.explanation import Explanation
    from shared_hooks.report import Report
    from shared_hooks.tail import RecipeBook, RehearsalLimits, Substitutes, TailSession


class WrappedModel:
    """A model that can be stopped after any layer, and resumed there by another `WrappedModel` of the same model.

    ``depth``: how far to descend into the module tree; None = down to the leaves, 1 = the model's children. The model
    is not edited; `detach`, or leaving the ``with`` block, removes exactly what was attached. Several threads may run
    requests at once; each thread has its own results of the last forward (`get_layer_metrics`, `banked_output`,
    `durations`). Hooks of ``lifecycle`` are called at the stages of planning, head, bank, inject and tail.
    ``rehearsals`` bounds what working out tails may cost. ``loads`` has weights at hand that are not in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        depth: int | None = None,
        *,
        metrics: bool = True,
        lifecycle: Lifecycle | None = None,
        rehearsals: RehearsalLimits | None = None,
        loads: Loads | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputMismatch(f"WrappedModel takes a torch.nn.Module, not {type(model).__name__}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise InputMismatch(f"depth is None or a number from 0 up, not {depth!r}")
        self.model = model
        self.depth = depth
        self.metrics_enabled = metrics
        self.lifecycle = Lifecycle() if lifecycle is None else lifecycle
        self._modules = hierarchy.walk(model, depth)
        self._aliases = hierarchy.aliases(model)
        # before anything runs: attributes may count calls
        self._attributes = agreement.attributes(model)
        self._tables = tables.tables(model)
        self._find = classes_of(hierarchy.holder_modules(model))
        self._save: frozenset[int | str] = frozenset()
        self._planner = Planner(model, self._modules, self._aliases, depth, self.lifecycle, loads)
        self._turns = Turns(model)
        self._rehearsals = rehearsals
        self._loads = loads
        self._recipes: RecipeBook | None = None
        self._making = threading.Lock()
        self._python: PythonState | None = None
        self._own = threading.local()
        self._attached = True
        for module in self._modules:
            attach.attach(module)

    def __repr__(self) -> str:
        modules, made = len(self._modules), self._planner.made
        plans = f"{made} plan{'' if made == 1 else 's'} made"
        return told(self, type(self.model).__name__, f"{modules} modules", plans, "" if self._attached else "detached")

    def __enter__(self) -> WrappedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove what was attached; the model is as before. A second call does nothing."""
        if self._attached:
            self._attached = False
            for module in self._modules:
                attach.detach(module)

    def beside(self) -> WrappedModel:
        """Another one of the same model, with plans, recipes and results of its own, without hooks and metrics."""
        made = WrappedModel(self.model, self.depth, metrics=False, rehearsals=self._rehearsals)
        made._turns = self._turns  # a model that keeps state runs once at a time, whoever runs it
        return made

    def turn(self) -> AbstractContextManager[Any]:
        """Meanwhile nobody else runs the model, if it may keep state; nests in one thread."""
        return self._turns.one()

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Record the model on these inputs, after one forward to let it settle, and remember the path taken.

        `forward` plans by itself on a new input signature. An input that takes a new path adds that path.
        """
        self._check_attached()
        if self.metrics_enabled:
            sampler.touch(gpu_of(self.device))  # so that sensors are found by the time of the first forward
        return self._planner.plan(args, kwargs)

    @property
    def recipes(self) -> RecipeBook:
        """The recipes of its tails."""
        with self._making:
            if self._recipes is None:
                from shared_hooks.tail import RecipeBook, RehearsalLimits

                limits = self._rehearsals or RehearsalLimits()
                self._recipes = RecipeBook(self.model, self._modules, self._find, limits, self._turns)
            return self._recipes

    def refuse(self, layer: str, reason: str) -> None:
        """Refuse every later cut after the layer of this name ("input": before the first): CutRefused, ``reason``."""
        self._planner.refuse(layer, reason)

    @property
    def layers(self) -> Layers:
        """The layers of the latest plan, in execution order."""
        return self._planner.latest.layers

    def check_cut(self, cut: Cut, /, *args: Any, **kwargs: Any) -> None:
        """Whether inputs such as these can be cut there; they are planned if none such was. Raises UnknownLayer and
        CutRefused. A module that these do not run passes: others may run it.
        """
        wrong: UnknownLayer | CutRefused | None = None
        for plan in self._planner.plans_for(args, kwargs):
            try:
                plan.cutting(cut)
                return
            except (UnknownLayer, CutRefused) as error:
                wrong = error
        path = str(cut).partition("#")[0]
        if isinstance(wrong, UnknownLayer) and any(info.path == path for info in self._modules.values()):
            return
        if wrong is not None:
            raise wrong

    @property
    def plans_made(self) -> int:
        """How often the model was recorded to plan it."""
        return self._planner.made

    @property
    def modules(self) -> dict[nn.Module, hierarchy.ModuleInfo]:
        """The modules that it hooks, and their names; do not change it."""
        return self._modules

    def explain(self, cut: Cut, /, *args: Any, **kwargs: Any) -> Explanation:
        """What crosses at a cut on these inputs and why, and what the tail skips, enters and replays; print it.

        Plans, and rehearses the tail here; without inputs, of the latest plan. Raises `UnknownLayer`, for want of any
        plan, too, and `CutRefused` with the reason.
        """
        from shared_hooks.explaining import explain

        plan = self.plan(*args, **kwargs) if args or kwargs else self._planner.latest
        cutting, crossing = plan.cutting(cut)
        values = tuple(plan.trace.ops[ordinal].structure or ["v", None] for ordinal in cutting.banked)
        state = PythonState(self.model)
        try:
            recipe = self.recipes.recipe(EarlyOutput(crossing, (), values), self.device)
        finally:
            state.restore()  # the rehearsal runs the model's Python
        return explain(plan, cutting, crossing, recipe)

    # -- running ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, end: Cut | None = None, start: Cut | None = None, **kwargs: Any) -> Any:
        """Run the head (``end``), the tail (``start``) or the whole model (neither).

        ``end=cut`` runs up to and including the cut layer and returns an `EarlyOutput`. ``start=cut`` takes that
        `EarlyOutput` as its only argument and returns the model's own output; with a later ``end``, too, a middle part,
        it gives the `EarlyOutput` that a head would have given there. A cut is a layer id, the name of a
        layer or block, or ``"input"``. Everything runs without gradients. Raises `UnknownLayer`, `CutRefused`,
        `PlanMismatch`, and whatever the model raises.
        """
        self._check_attached()
        early = args[0] if len(args) == 1 and isinstance(args[0], EarlyOutput) else None
        if start is None and early is not None:  # an EarlyOutput says where it was cut
            start = early.layer_id
        if start is not None:
            if early is None or kwargs:
                raise InputMismatch("forward(early, start=...) takes an EarlyOutput and nothing else")
            return self._tail(early, start) if end is None else self._middle(early, start, end)
        if end is not None:
            return self.head(end, *args, **kwargs)
        return self._without_cut(args, kwargs)

    def _without_cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_attached()
        measurement, made = self._measurement(), self._planner.made
        self._check_saved(self._planner.plans_if_possible(args, kwargs))
        if self._planner.made != made:
            measurement = self._measurement()  # looking a plan up belongs to the forward, making one does not
        started = time.perf_counter_ns()
        session = Session(self._modules, measurement, self._save)
        output = self._whole(session, args, kwargs)
        self._finish(session, {"whole": _ended(session) - started})
        return output

    __call__ = forward

    def whole(self, /, *args: Any, **kwargs: Any) -> Any:
        """The whole model. Like `forward` without a cut, for models whose own arguments are called start or end."""
        return self._without_cut(args, kwargs)

    def head(self, cut: Cut, /, *args: Any, **kwargs: Any) -> EarlyOutput:
        """Run up to and including the cut layer. Like ``forward(..., end=cut)``, whatever the arguments are called."""
        self._check_attached()
        self.lifecycle.emit(Stage.BEFORE_HEAD, split=cut)
        early = self._head(cut, args, kwargs)
        with self._last_forward_kept():
            self.lifecycle.emit(Stage.AFTER_HEAD, split=early.layer_name, early=early)
        return early

    def tail(self, early: EarlyOutput, /, *, substitutes: Substitutes | None = None) -> Any:
        """Resume from what a head gave; the model's own output. ``substitutes``: what runs in place of modules
        behind the cut (`shared_hooks.compiling`); layers inside of these are not seen.
        """
        self._check_attached()
        return self._tail(early, early.layer_id, substitutes)

    def _check_saved(self, plans: list[Plan]) -> None:
        """Names and ids in `save_layers` must exist; a layer of another path does."""
        for layer in self._save:
            path = layer.partition("#")[0] if isinstance(layer, str) else None
            known = {info.path for info in self._modules.values()}
            if path not in known and self._aliases.get(path or "") not in known:
                for plan in plans:
                    plan.layer_id(layer)

    def _measurement(self) -> Measurement | None:
        """Begins now."""
        return Measurement(self.device) if self.metrics_enabled else None

    def _session(self, kind: Callable[..., Any], *more: Any) -> Any:
        return kind(self._modules, self._measurement(), self._save, *more)

    def _whole(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._turns.one(), torch.no_grad(), _running(session), fast_path_off(), interruptible():
            return self.model(*args, **kwargs)

    def _head(self, end: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EarlyOutput:
        foretold = self._planner.foretold(args, kwargs, end)
        if foretold is not None:
            with Attempt(foretold[0].trace, args, kwargs) as attempt:
                return self._head_as(*foretold, args, kwargs)
            assert attempt.failed
            self._planner.not_so(args, kwargs)
        for again in range(2):
            plans = self._planner.plans_for(args, kwargs) if not again else [self.plan(*args, **kwargs)]
            unknown: UnknownLayer | None = None
            for plan in plans:
                try:
                    cutting, crossing = plan.cutting(end)
                except UnknownLayer as error:
                    unknown = error
                    continue
                with Attempt(plan.trace, args, kwargs):
                    return self._head_as(plan, cutting, crossing, args, kwargs)
            if unknown is not None and len(plans) == 1:
                raise unknown
        raise CutRefused("the model takes another path each time it runs on this input: its Python state differs")

    def _head_as(
        self, plan: Plan, cutting: Cutting, crossing: Crossing, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> EarlyOutput:
        self._check_saved([plan])
        started = time.perf_counter_ns()
        session: HeadSession = self._session(HeadSession, plan, cutting, crossing, flatten((args, kwargs))[1])
        # what the rest of the forward would have put back is put back for it; unwinding alone may not do it
        half_done = crossing.layer_id in plan.trace.half_done
        # and where data decides on the path, the run may leave this one anywhere
        state = self._python_now() if half_done or plan.trace.dynamic else None
        complete = False
        try:
            with self._turns.one(), torch.no_grad():
                if crossing.layer_id >= 0:
                    with _running(session), fast_path_off(), watching(session):
                        self._until_cut(session, args, kwargs)
                self.lifecycle.emit(Stage.BEFORE_BANK, split=crossing.layer_name)
                early = session.early()
                self.lifecycle.emit(Stage.AFTER_BANK, split=crossing.layer_name, early=early)
            complete = True
        finally:
            session.release()
            if state is not None and (half_done or not complete):
                state.restore()
        self._finish(session, {"head": _ended(session) - started})
        return early

    def _python_now(self) -> PythonState:
        """Looked at anew only where something has changed."""
        state = self._python
        if state is None or not state.is_same:
            state = self._python = PythonState(self.model)
        return state

    def _until_cut(self, session: HeadSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.model(*args, **kwargs)
        except HookExitException as leaving:
            if leaving is not session.exit:
                raise
        if not session.stopped:
            raise Diverged

    def _middle(self, early: EarlyOutput, start: Cut, end: Cut) -> EarlyOutput:
        from shared_hooks.middle import MiddleSession, span_between

        crossing = early.crossing
        self._check_start(crossing, start)
        if end in (crossing.layer_id, crossing.layer_name):
            return early
        with context.restored(crossing.context):
            span = span_between(self._planner, early, end, self.device, self._find)
        if span.target.layer_id == crossing.layer_id:  # by another name: nothing lies between
            return early
        found: EarlyOutput = self._resumed(early, partial(MiddleSession, span))
        return found

    def _tail(self, early: EarlyOutput, start: Cut, substitutes: Substitutes | None = None) -> Any:
        from shared_hooks.tail import TailSession

        self._check_start(early.crossing, start)
        return self._resumed(early, partial(TailSession, substitutes=substitutes))

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
        context.check(crossing.context, self._modules, crossing.cache)

    def _resumed(self, early: EarlyOutput, kind: Callable[..., TailSession]) -> Any:
        """From a cut on, as far as a session of this kind goes."""
        crossing = early.crossing
        self.lifecycle.emit(Stage.BEFORE_INJECT, split=crossing.layer_name, early=early)
        started = time.perf_counter_ns()
        recipe = self.recipes.recipe(early, self.device)
        session: TailSession = self._session(kind, early, recipe, self.device, self.lifecycle)
        with (
            self._turns.one(),
            torch.no_grad(),
            _running(session),
            fast_path_off(),
            context.restored(crossing.context),
            generators.kept(crossing.generators, alone=recipe.is_open),
        ):
            ended = False
            try:
                generators.restore(crossing.generators, early.generators)
                args, kwargs = session.inputs(self._find)
                session.begin()
                with interruptible():
                    output = session.through(self.model, args, kwargs)
                ended = session.failure is None and session.ends
                if ended:
                    session.check_left()
            finally:
                session.leave()
                session.release()
                if recipe.state is not None and (recipe.leaves or not ended):
                    recipe.state.restore()
                if recipe.settings is not None and not ended:
                    recipe.settings.restore()  # what the model would have put back; others run in this process, too
        if session.failure is not None:
            raise session.failure
        if not session.resumed:
            raise session.mismatch("the model returned")
        now = _ended(session)
        self._finish(session, {"inject": session.resumed_at - started, "compute": now - session.resumed_at})
        with self._last_forward_kept():
            self.lifecycle.emit(Stage.AFTER_TAIL, split=crossing.layer_name, output=output)
        return output

    def _finish(self, session: Session, durations: dict[str, int]) -> None:
        self._own.session = session
        self._own.durations = durations

    @contextmanager
    def _last_forward_kept(self) -> Iterator[None]:
        """A hook that runs the model is not this thread's last forward."""
        session, durations = self._own.session, self._own.durations
        try:
            yield
        finally:
            self._own.session, self._own.durations = session, durations

    # -- what the last forward left -----------------------------------------------------------------------------

    @property
    def save_layers(self) -> Set[int | str]:
        """Ids or names of layers whose output every forward keeps in `banked_output`."""
        return self._save

    @save_layers.setter
    def save_layers(self, layers: Iterable[int | str]) -> None:
        self._save = frozenset([layers] if isinstance(layers, str) else layers)

    @property
    def banked_output(self) -> Mapping[int | str, Any]:
        """Copies of the saved layers' outputs in this thread's last forward, by id and by name."""
        session: Session | None = getattr(self._own, "session", None)
        return {} if session is None else session.banked

    def get_layer_metrics(self) -> list[LayerMetrics]:
        """One record per layer call of this thread's last forward."""
        session: Session | None = getattr(self._own, "session", None)
        return [] if session is None else session.metrics()

    def get_forward_metrics(self) -> ForwardMetrics | None:
        """This thread's last forward as a whole; None before the first, and without metrics."""
        session: Session | None = getattr(self._own, "session", None)
        return None if session is None or session.measurement is None else session.measurement.forward_metrics()

    def last_records(self) -> Callable[[], tuple[list[LayerMetrics], ForwardMetrics | None]]:
        """Makes both for this thread's last forward, some microseconds a layer: call it now, or when there is time."""
        session: Session | None = getattr(self._own, "session", None)
        measurement = None if session is None else session.measurement
        return lambda: (
            ([], None) if measurement is None else (measurement.layer_metrics(), measurement.forward_metrics())
        )

    def durations(self) -> dict[str, int]:
        """Nanoseconds of this thread's last forward: ``head``, or ``inject`` and ``compute``, or ``whole``."""
        return dict(getattr(self._own, "durations", {}))

    # -- agreement ----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        tensor = self._planner.weight()
        return torch.device("cpu") if tensor is None else tensor.device

    def structure_digest(self) -> str:
        """Hexadecimal; see `agreement.structure_digest`."""
        return agreement.structure_digest(self.model, self.depth)

    def weights_hash(self) -> str:
        """Hexadecimal; see `agreement.weights_hash`."""
        with self._looked_at():
            return agreement.weights_hash(self.model)

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """Around what reads all weights."""
        if self._loads is None:
            yield
            return
        self._loads.before_reading()
        try:
            yield
        finally:
            self._loads.release()

    def environment(self) -> dict[str, str]:
        """What else must be the same on both sides: settings that change kernels, the model's configuration and
        code.
        """
        configuration = agreement.configuration_digest(self._attributes)
        own = {"model_configuration": configuration, "model_code": agreement.code_digest(self.model)}
        if self._tables:
            own["model_tables"] = tables.digest(self._tables)
        return {**context.environment(), **own}

    def manifest(self, plan: Plan | None = None) -> dict[Fact, str]:
        """What the digests are made of, fact by fact (`shared_hooks.modules.manifest`); with a plan, its operations,
        too. To be compared where the digests of two sides differ.
        """
        with self._looked_at():
            operations = plan.names if plan is not None else ()
            return manifest(self.model, self._attributes, self.depth, operations, self._tables)

    # -- verification -------------------------------------------------------------------------------------------

    def verify(self, *args: Any, on_cut: Callable[[int, int], None] | None = None, **kwargs: Any) -> Report:
        """Compare every cut, through bytes, with the whole model on these inputs.

        ``on_cut(done, total)`` shows progress. A cut that differs is refused from then on.
        """
        from shared_hooks.verification import verify

        return verify(self.model, self.forward, self.plan(*args, **kwargs), args, kwargs, on_cut)

    def _check_attached(self) -> None:
        if not self._attached:
            raise PlanMismatch("this WrappedModel is detached; make a new one")


def _ended(session: Session) -> int:
    """Now; with metrics that is when the device is done, too."""
    if session.measurement is not None:
        session.measurement.end()
    return time.perf_counter_ns()


class _running:  # used as a function
    """The block is a forward of this session."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._token = attach.running.set(self._session)

    def __exit__(self, *_: object) -> None:
        attach.running.reset(self._token)
