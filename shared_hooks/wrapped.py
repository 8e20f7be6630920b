"""Define `WrappedModel`, which plans, cuts, resumes, measures and verifies a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shared_hooks.crossing import Crossing, EarlyOutput
from shared_hooks.errors import CutRefused, InputMismatch, ModelFailed, UnknownLayer
from shared_hooks.forward import context
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.metrics import ForwardMetrics, LayerColumns, LayerMetrics
from shared_hooks.modules import INPUT, constants, tables
from shared_hooks.modules.manifest import Fact, manifest
from shared_hooks.planning import Cut, LayerInfo, Loads, Plan, PlanLayers
from shared_hooks.purity import Turns
from shared_hooks.runner import ModelRunner
from shared_hooks.showing import summary_of
from shared_hooks.state import PythonState, first_few
from shared_hooks.state.reach import ForwardCode, file_of, is_installed

if TYPE_CHECKING:  # not imported where heads run
    from shared_hooks.explaining import Explanation
    from shared_hooks.tail import RecipeBook, RehearsalLimits, Substitutes
    from shared_hooks.verification import Report


class WrappedModel:
    """A model that can be stopped after any layer, and resumed there by another `WrappedModel` of the same model.

    ``depth``: how far to descend into the module tree; None: to the leaves, 1: the model's children. The model is not
    edited; `detach`, or leaving the ``with`` block, removes exactly what was attached. Several threads may run requests
    at once; each thread has its own results of the last forward (`get_layer_metrics`, `banked_output`, `durations`).
    Hooks of ``lifecycle`` are called at the stages of planning, head, bank, inject and tail. ``rehearsals`` bounds the
    work of preparing tails. ``loads`` provides weights that are not in memory.

    Changes that a run makes to the model's Python state are reverted after it; but where no cut is allowed, a whole
    forward keeps what the model's own would keep, unless it is ``isolated`` (on a server, where callers share the
    model).
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
        isolated: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputMismatch(f"WrappedModel takes a torch.nn.Module, not {type(model).__name__}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise InputMismatch(f"depth is None or a number from 0 up, not {depth!r}")
        lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
        if lazy:
            raise InputMismatch(f"{first_few(lazy)}: a lazy layer has no weights yet: run the model once, then wrap it")
        # before anything runs: attributes may count calls
        code = ForwardCode(model)
        self._attributes = constants.attributes(model, code.attributes.__contains__, code.written_to.__contains__)
        self._held = _constants_in(code)
        self._tables = tables.tables(model, code.constants())
        self._loads = loads
        self._rehearsals = rehearsals
        self._isolated = isolated
        self.model = model
        self.depth = depth
        lifecycle = Lifecycle() if lifecycle is None else lifecycle
        self._runner = ModelRunner(model, depth, metrics, lifecycle, rehearsals, loads, isolated)
        self._planner = self._runner.planner

    def __repr__(self) -> str:
        modules, made = len(self.modules), self._planner.made
        plans = f"{made} plan{'' if made == 1 else 's'} made"
        return summary_of(
            self, type(self.model).__name__, f"{modules} modules", plans, "detached" if self._runner.is_detached else ""
        )

    def __enter__(self) -> WrappedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove what was attached; the model is as before. A second call has no effect."""
        self._runner.detach()

    def beside(self) -> WrappedModel:
        """Return another one of the same model, with its own plans, recipes and results, without hooks and metrics."""
        made = WrappedModel(self.model, self.depth, metrics=False, rehearsals=self._rehearsals, isolated=self._isolated)
        made._runner.turns = self.turns  # a model that keeps state runs once at a time, in all of its wrappers
        return made

    def turn(self) -> AbstractContextManager[Any]:
        """Hold the model while in the context, if it may keep state; reentrant within a thread."""
        return self.turns.one(foreseen=False)

    @property
    def turns(self) -> Turns:
        """The lock that all runs of the model take."""
        return self._runner.turns

    def renew(self) -> None:
        """Allow runs again: the owner has repaired the model after a run that raised `ModelChanged`."""
        self.turns.renew()

    @property
    def lifecycle(self) -> Lifecycle:
        """The hooks that are called at its stages; another may be put here."""
        return self._runner.lifecycle

    @lifecycle.setter
    def lifecycle(self, lifecycle: Lifecycle) -> None:
        self._runner.lifecycle = lifecycle

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        return self._runner.device

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Record the model on these inputs, after one forward for warm-up, and keep the plan.

        `forward` plans by itself for a new input signature. Inputs that take a new path add that path.
        """
        return self._runner.plan(args, kwargs)

    def refuse(self, layer: str, reason: str) -> None:
        """Refuse every later cut after the layer of this name ("input": before the first) with CutRefused and
        ``reason``.
        """
        self._planner.refuse(layer, reason)

    @property
    def layers(self) -> PlanLayers:
        """The layers of the latest plan, in execution order."""
        return self._planner.latest.layers

    @property
    def cuts(self) -> PlanLayers:
        """All possible cuts of the latest plan, in execution order: its layers, and the blocks with code after their
        last layer (a sum, an activation). A block's name is the cut after it has returned.
        """
        return self._planner.latest.cuts

    def resolve(self, cut: Cut) -> LayerInfo | None:
        """Return the layer or block of a cut in the latest plan; None for "input". Raises UnknownLayer with similar
        names.
        """
        return self._planner.latest.resolve(cut)

    def check_cut(self, cut: Cut, /, *args: Any, **kwargs: Any) -> None:
        """Check that inputs such as these can be cut there, planning them if needed. Raises UnknownLayer and
        CutRefused.

        A module that these inputs do not run passes, as others may run it.
        """
        self._runner.check_attached()
        wrong: UnknownLayer | CutRefused | None = None
        for plan in self._planner.plans_for(args, kwargs):
            try:
                plan.cutting(cut)
                return
            except (UnknownLayer, CutRefused) as error:
                wrong = error
        path = tables.call_parts(str(cut))[0]
        if isinstance(wrong, UnknownLayer) and any(info.path == path for info in self.modules.values()):
            return
        if wrong is not None:
            raise wrong

    def most_output_bytes(self, *args: Any, **kwargs: Any) -> int | None:
        """Return a generous bound on the bytes of this model's answer to such inputs, from the known plans; None
        without any. A larger answer from elsewhere cannot be this model's.
        """
        return self._planner.most_output_bytes(args, kwargs)

    @property
    def plans_made(self) -> int:
        """How often the model was recorded to plan it."""
        return self._planner.made

    @property
    def modules(self) -> dict[nn.Module, tables.ModuleInfo]:
        """The modules that it hooks, and their names; do not modify it."""
        return self._runner.modules

    def explain(self, cut: Cut, /, *args: Any, **kwargs: Any) -> Explanation:
        """Explain what crosses at a cut on these inputs and why, and what the tail skips, enters and replays; print the
        result.

        Plans, and rehearses the tail here; without inputs, uses the latest plan. Raises `UnknownLayer`, also without
        any plan, and `CutRefused` with the reason.
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
        `EarlyOutput` as its only argument and returns the model's own output; together with a later ``end`` it runs a
        middle part, and returns the `EarlyOutput` that a head would return there. A cut is a layer id, the name of a
        layer or block, or ``"input"``. Everything runs without gradients. Raises `UnknownLayer`, `CutRefused`,
        `PlanMismatch`, and whatever the model raises.
        """
        self._runner.check_attached()
        early = args[0] if len(args) == 1 and isinstance(args[0], EarlyOutput) else None
        if start is None and early is not None:  # an EarlyOutput names its cut
            start = early.layer_id
        if start is not None:
            if early is None or kwargs:
                raise InputMismatch("forward(early, start=...) takes an EarlyOutput and nothing else")
            return self._runner.tail(early, start) if end is None else self._runner.middle(early, start, end)
        if end is not None:
            return self.head(end, *args, **kwargs)
        return self._runner.whole(args, kwargs)

    __call__ = forward

    def whole(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the whole model, like `forward` without a cut, whatever its arguments are called."""
        return self._runner.whole(args, kwargs)

    def head(self, cut: Cut, /, *args: Any, **kwargs: Any) -> EarlyOutput:
        """Run up to and including the cut layer, like ``forward(..., end=cut)``, whatever the arguments are called."""
        self._runner.check_attached()
        self.lifecycle.emit(Stage.BEFORE_HEAD, split=cut)
        early = self._runner.head(cut, args, kwargs)
        self._runner.emit_after(Stage.AFTER_HEAD, split=early.layer_name, early=early)
        return early

    def crossing_at(self, early: EarlyOutput, end: Cut) -> Crossing:
        """Describe what `forward` with this later ``end`` would return, without running the model up to there.

        Raises `UnknownLayer` and `CutRefused`.
        """
        self._runner.check_attached()
        span = self._runner.span(early, end)
        return early.crossing if span is None else span.target

    def tail(self, early: EarlyOutput, /, *, substitutes: Substitutes | None = None, gradients: bool = False) -> Any:
        """Resume from a head's result, and return the model's own output.

        ``substitutes``: replacements of modules behind the cut (`shared_hooks.compiling`); layers inside of these are
        not seen. ``gradients``: autograd records what is computed from ``early.pieces``, and can differentiate with
        respect to them.
        """
        self._runner.check_attached()
        return self._runner.tail(early, early.layer_id, substitutes, gradients)

    @property
    def recipes(self) -> RecipeBook:
        """The recipes of its tails."""
        return self._runner.recipes

    # -- records of the last forward ----------------------------------------------------------------------------

    @property
    def metrics_enabled(self) -> bool:
        """Whether forwards are measured."""
        return self._runner.metrics_enabled

    @metrics_enabled.setter
    def metrics_enabled(self, enabled: bool) -> None:
        self._runner.metrics_enabled = enabled

    @property
    def save_layers(self) -> Set[int | str]:
        """Ids or names of layers whose output every forward keeps in `banked_output`."""
        return self._runner.save

    @save_layers.setter
    def save_layers(self, layers: Iterable[int | str]) -> None:
        self._runner.save = frozenset([layers] if isinstance(layers, str) else layers)

    @property
    def banked_output(self) -> Mapping[int | str, Any]:
        """Copies of the saved layers' outputs in this thread's last forward, by id and by name."""
        session = self._runner.last.session
        return {} if session is None else session.banked

    def measure(self, wanted: bool) -> None:
        """Set whether forwards of this thread measure their layers from now on, if `metrics` was given."""
        self._runner.last.metrics = wanted

    def get_layer_metrics(self) -> list[LayerMetrics]:
        """Return one record per layer call of this thread's last forward."""
        session = self._runner.last.session
        return [] if session is None else list(session.metrics())

    def get_forward_metrics(self) -> ForwardMetrics | None:
        """Return the record of this thread's last forward as a whole; None before the first, and without metrics."""
        session = self._runner.last.session
        return None if session is None or session.measurement is None else session.measurement.forward_metrics()

    def last_records(self) -> Callable[[], tuple[LayerColumns, ForwardMetrics | None]]:
        """Return a function that makes both for this thread's last forward, now or later."""
        session = self._runner.last.session
        measurement = None if session is None else session.measurement
        return lambda: (LayerColumns(), None) if measurement is None else measurement.records()

    def durations(self) -> dict[str, int]:
        """Return nanoseconds of this thread's last forward: ``head``, or ``inject`` and ``compute``, or ``whole``."""
        return dict(self._runner.last.durations)

    # -- agreement ----------------------------------------------------------------------------------------------

    def structure_digest(self) -> str:
        """Hexadecimal; see `constants.structure_digest`."""
        return constants.structure_digest(self.model, self.depth)

    def weights_hash(self) -> str:
        """Hexadecimal; see `constants.weights_hash`."""
        with nullcontext() if self._loads is None else self._loads.reading():
            return constants.weights_hash(self.model)

    def other_numbers(self, model: nn.Module) -> list[str]:
        """Return names of numbers that differ from those when this object was made.

        They are in modules of ``model``, a model with the same layers, and in objects that they hold, and the code of
        its forward reads and does not set them. Modules of libraries are left out: they set many by themselves.
        """
        own = {path for path, module in model.named_modules() if not is_installed(file_of(type(module)))}
        code = ForwardCode(model)
        names = code.attributes
        return sorted(
            f"{path}.{name}".lstrip(".")
            for path, each in constants.attributes(model, names.__contains__, code.written_to.__contains__).items()
            for name in each.keys() | self._attributes.get(path, {}).keys()
            if (path in own or "." in name)
            and repr(each.get(name)) != repr(self._attributes.get(path, {}).get(name))
            and names.issuperset(name.split("."))
        )

    def environment(self) -> dict[str, str]:
        """Return what else must be equal on both sides: settings that change kernels, the model's configuration and
        code.
        """
        configuration = constants.digest_of([constants.configuration_digest(self._attributes), self._held])
        own = {"model_configuration": configuration, "model_code": constants.code_digest(self.model)}
        if self._tables:
            own["model_tables"] = tables.digest(self._tables)
        return {**context.environment(), **own}

    def manifest(self, plan: Plan | None = None) -> dict[Fact, str]:
        """Return the contents of the digests, fact by fact (`shared_hooks.modules.manifest`), with a plan's operations,
        too.

        To be compared if the digests of two sides differ.
        """
        with nullcontext() if self._loads is None else self._loads.reading():
            operations = plan.names if plan is not None else ()
            return manifest(self.model, self._attributes, self.depth, operations, self._tables, self._held)

    # -- verification -------------------------------------------------------------------------------------------

    def verify(
        self,
        *args: Any,
        on_cut: Callable[[int, int, str, str], None] | None = None,
        cold: Callable[[], nn.Module] | None = None,
        processes: bool = False,
        first: Cut = INPUT,
        only: Sequence[Cut] | None = None,
        **kwargs: Any,
    ) -> Report:
        """Compare every cut, ``first`` before the others, or ``only`` these, through bytes, with the whole model on
        these inputs.

        ``on_cut(done, total, name, verdict)`` reports progress; a verdict is "exact", "refused" or "differs". ``cold``
        makes the same model again: then tails run on one that never ran before, as a server's may be, answers are
        compared with those of others, and generated inputs are tried, too. That finds what one model hides. With
        ``processes`` the tails and the whole models run in a process each, which calls ``cold``: that finds what one
        process hides. Raises ModelFailed if that is impossible: ``cold`` cannot be imported there, an output cannot be
        sent to another process, or one has ended. A cut that differs is refused from then on.
        """
        from shared_hooks.middle import Apart, Gone
        from shared_hooks.verification import Cold, cold_here, verify

        run = partial(verify, self.model, self.forward, self.plan(*args, **kwargs), args, kwargs, on_cut)
        if cold is None:
            return run(None, first, only)
        wrap = partial(WrappedModel, depth=self.depth, metrics=False, rehearsals=self._rehearsals)
        if processes:
            try:
                with Apart(cold, wrap) as reference, Apart(cold, wrap) as tails:
                    return run(Cold(reference.whole, tails.tail), first, only)
            except Gone as error:
                raise ModelFailed(str(error)) from error
        with wrap(cold()) as other:
            return run(cold_here(cold, other.tail), first, only)


def _constants_in(code: ForwardCode) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for name, value in code.constants():
        if text := constants.words_of(value, code.attributes.__contains__, code.written_to.__contains__):
            found.setdefault(name, set()).add(text)
    for name, function in code.sources():
        found.setdefault(f"code of {name}", set()).add(constants.function_digest(function))
    return {name: " ".join(sorted(several)) for name, several in sorted(found.items())}
