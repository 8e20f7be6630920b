"""Makes and keeps plans: by input signature, and within one signature by the path that an input takes."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import devices
from shared_hooks.crossing import Crossing
from shared_hooks.errors import CutRefused, IsthmusError, UnknownLayer
from shared_hooks.forward import MemoryKept, Placeholder, context, run_plain
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.modules import ModuleInfo
from shared_hooks.planning.cutting import Cutting
from shared_hooks.planning.lengths import Lengths, family_of
from shared_hooks.planning.plan import Cut, Plan
from shared_hooks.recording import Judge, Taint, Trace, depends, record
from shared_hooks.state import (
    MISSING,
    Dice,
    Numbers,
    PoisonRead,
    PythonState,
    Spot,
    first_few,
    lasting_name,
    portable,
    remains,
    spread,
)
from shared_hooks.tensors import Buffers, UnknownHolder, copied, flatten, identical, tensors_in

MAX_SIGNATURES = 64
MAX_TICKS_KEPT = 2_000_000
"""The maximum number of calls and operations in the plans of all signatures, at a kilobyte or two each."""
MAX_PATHS = 16
MAX_SAMPLE_BYTES = 16 << 20
MARGIN_BYTES, DYNAMIC_BYTES = 1 << 20, 16 << 20
"""What an answer may take beyond that of its plan; and if data decides on it."""


class Loads(Protocol):
    """Provides a model's weights for what needs all of them, though they are not in memory otherwise."""

    device: torch.device
    """The device on which the model runs, wherever its weights are."""

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context around what needs all weights."""
        ...

    def planned(self, plan: Plan) -> None:
        """Called with a new plan, while the weights are available. The planner raises its errors."""


class Planner:
    """The plans of one model. Thread-safe: planning is done by one thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        aliases: dict[str, str],
        depth: int | None,
        lifecycle: Lifecycle,
        loads: Loads | None = None,
    ) -> None:
        self._model = model
        self._loads = loads
        self._modules = modules
        self._aliases = aliases
        self._depth = depth
        self._lifecycle = lifecycle
        self._anchor = _find_anchor(model)
        self._plans: OrderedDict[Any, list[Plan]] = OrderedDict()
        self._numbers: Numbers | None = None
        self._own: set[Spot] = set()
        self._left = Left()
        self._built: set[str] = set()  # names of Python state that first runs built permanently
        self._original: PythonState | None = None  # before they did
        self._samples: deque[tuple[tuple[tuple[Any, ...], dict[str, Any]], Any]] = deque(maxlen=2)
        self._history = ""
        self._latest: Plan | None = None
        self._obstacle = "call plan() or forward() with example inputs first"
        self._impossible: set[Any] = set()
        self._refused: dict[str, str] = {}  # layers after which plans must not be cut, and why
        self._lengths = Lengths()
        self._lock = threading.RLock()
        self._most_output: tuple[int, dict[tuple[int, ...], int | None]] = (0, {})
        """By the elements of inputs, for the plans that existed at that number."""
        self.made = 0
        """The number of recordings."""
        self.allows_cuts = False
        """Whether any plan has a cut: the model then keeps no state between runs."""

    @property
    def latest(self) -> Plan:
        """The plan made or found last; `UnknownLayer`, with the reason, if there is none."""
        if self._latest is None:
            raise UnknownLayer(f"no plan yet: {self._obstacle}")
        return self._latest

    def most_output_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return a generous estimate of the bytes of the model's answer to these inputs, from all known plans: results
        grow at most with the square of the inputs, and data may decide their size. None without a plan.
        """
        given = tuple([one.numel() for one in flatten((args, kwargs))[1]])
        made, known = self._most_output
        if made == self.made and given in known:
            return known[given]
        most = None
        for plan in [plan for plans in list(self._plans.values()) for plan in plans]:
            planned = [math.prod(one.view.shape) for one in plan.trace.inputs]
            # of the one that has grown most: a longer text beside a picture
            pairs = zip(given, planned, strict=True) if len(given) == len(planned) else [(sum(given), sum(planned))]
            ratio = max([1.0, *(now / max(1, then) for now, then in pairs)])
            found = MARGIN_BYTES + 4 * int(plan.trace.output_bytes * ratio**2)
            if plan.trace.dynamic:
                found += DYNAMIC_BYTES + 16 * plan.trace.output_bytes
            most = max(found, most or 0)
        if made != self.made or len(known) >= MAX_SIGNATURES:
            known = {}
            self._most_output = self.made, known
        known[given] = most
        return most

    def weight(self) -> torch.Tensor | None:
        """Return the model's current first parameter or buffer.

        Needed for every forward, where walking the module tree would cost more than a small layer.
        """
        owner, name = self._anchor
        return None if owner is None else owner.get(name)

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU if it has none."""
        if self._loads is not None:
            return self._loads.device
        weight = self.weight()
        return devices.CPU if weight is None else weight.device

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Record the model on these inputs; for a known path, returns the known plan."""
        return self._plan_with_hooks(args, kwargs)[0]

    def _plan_with_hooks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, unless_known: bool = False
    ) -> list[Plan]:
        """`_plan` between two stages, whose hooks are called without the lock."""
        self._lifecycle.emit(Stage.BEFORE_PLAN, args=args, kwargs=kwargs)
        plans = self._plan(args, kwargs, unless_known)
        self._lifecycle.emit(Stage.AFTER_PLAN, plan=plans[0])
        return plans

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], unless_known: bool) -> list[Plan]:
        """Return the plan of these inputs; or those of their signature, if another thread has made any meanwhile."""
        with self._lock:
            if unless_known and (known := self._plans.get(self.key(args, kwargs))):
                return list(known)
            if self._loads is None:
                return self._noted(args, kwargs)
            with self._loads.reading():
                plans = self._noted(args, kwargs)
                self._loads.planned(plans[0])
            return plans

    def _noted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Plan]:
        """Return the plan of a new recording, which is kept; or the known plan of its path."""
        if any(one.is_conj() or one.is_neg() for one in flatten((args, kwargs))[1]):
            raise CutRefused("an input has the conjugate or negative bit, which does not cross: give it resolved")
        digest, around = context.signature(self._modules, args, kwargs)
        key = self.key(args, kwargs)
        with self._lock:
            self.made += 1
            if self._anchor[0] is None:
                self._anchor = _find_anchor(self._model)
            left = self._left.copy()
            # a context of its own, so that context variables do not keep what the model sets
            run = contextvars.copy_context().run
            trace = run(self._record_quietly, args, kwargs, settle=not self._plans.get(key))
            self.allows_cuts |= not trace.has_no_cut
            if self._left != left:
                self._plans.clear()  # another path may read the state that this one leaves behind
            key = self.key(args, kwargs)  # only now it is known what the model changes by itself
            paths = self._plans.setdefault(key, [])
            self._plans.move_to_end(key)
            leaves = frozenset(map(portable, self._left.names | self._built))
            plan = Plan(trace, digest, self._depth, around, self._aliases, leaves=leaves)
            for layer, reason in self._refused.items():
                _refuse(plan, layer, reason)
            for known in paths:
                if known.path == plan.path:
                    if not leaves <= known.leaves:
                        known.leaves |= leaves
                        known.forget_cuts()
                    self._latest = known
                    return [known]
            paths.insert(0, plan)
            del paths[MAX_PATHS:]
            for known in paths:
                known.siblings = paths
                known.forget_cuts()
            while len(self._plans) > MAX_SIGNATURES or (len(self._plans) > 1 and self._ticks() > MAX_TICKS_KEPT):
                self._plans.popitem(last=False)
            self._latest = plan
            family = self._family(args, kwargs)
            if family is not None:
                self._lengths.add(*family, plan)
            return [plan]

    def _family(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[int, ...]] | None:
        numbers, (structure, _, *around) = self.key(args, kwargs)
        return family_of((numbers, structure, *around), flatten((args, kwargs))[1])

    def predicted_plan(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut
    ) -> tuple[Plan, Cutting, Crossing] | None:
        """Return, for inputs without a plan, with this `key`, what plans of other sizes say of this cut (`lengths`), or
        None.
        """
        with self._lock:
            if self._plans.get(key) or self._refused or self._left != Left():
                return None  # the state left behind must be shown unread by runs of this size
            family = self._family(args, kwargs)
            return None if family is None else self._lengths.predicted_plan(*family, cut)

    def invalidate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget a prediction for these inputs, which was wrong."""
        with self._lock:
            family = self._family(args, kwargs)
            if family is not None:
                self._lengths.forget(family[0])

    def refuse(self, layer: str, reason: str) -> None:
        """Refuse cuts after the layer of this name ("input": before the first) in all plans, known and future."""
        with self._lock:
            self._refused[layer] = reason
            known = {id(plan): plan for paths in self._plans.values() for plan in paths}
            if self._latest is not None:
                known[id(self._latest)] = self._latest
            for plan in known.values():
                _refuse(plan, layer, reason)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the key by which plans are kept; valid until the model runs."""
        numbers = 0 if self._numbers is None else self._numbers.current()
        return numbers, context.key_of(self._modules, self.weight(), args, kwargs)

    def _ticks(self) -> int:
        return sum(plan.trace.end for paths in self._plans.values() for plan in paths)

    def plans_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any = None) -> list[Plan]:
        """Return the plans of these inputs' signature; made now if there is none. ``key``: theirs, if known."""
        return self._plans_of(self.key(args, kwargs) if key is None else key, args, kwargs)

    def _plans_of(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Plan]:
        with self._lock:
            known = list(self._plans.get(key, ()))
        return known or self._plan_with_hooks(args, kwargs, unless_known=True)

    def plans_if_possible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Plan]:
        """As `plans_for`, for a forward without a cut: a model that cannot be planned cannot be cut, but it can run."""
        key: Any = None
        try:
            key = self.key(args, kwargs)
            return [] if key in self._impossible else self._plans_of(key, args, kwargs)
        except UnknownHolder as error:
            self._obstacle = str(error)
        except Exception as error:  # if it is the model's own, the run that follows raises it
            self._obstacle = f"{type(error).__name__}: {error}"
            self._impossible.add(key)
        return []

    def _record_quietly(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, settle: bool) -> Trace:
        """Record the model without side effects: the caller's random numbers continue, memory and Python state are
        restored.

        Only Python state that is built once and depends on no input (a table of positions) stays: the plan is of runs
        that find it.
        """
        with torch.no_grad(), devices.forked(self.device):
            buffers, trial = Buffers(self._model), _Trial(self._model, self._modules, args, kwargs)
            trial.left = self._left
            try:
                trace = trial.run(settle=settle)
            finally:
                self._built |= trial.built
                trial.end()
                buffers.restore()
                if self._numbers is None or not trial.changed <= self._own:
                    self._own |= trial.changed
                    self._numbers = Numbers(PythonState(self._model), self._own)
            if self._original is None and trial.keeps_what_it_built:
                self._original = trial.before
            if self._original is not None and not trace.unsteady:
                self._history = self._history or self._history_reason(args, kwargs)
                trace.unsteady = self._history
                if self._history:
                    self._plans.clear()  # they are of runs that found less
            return trace

    def _history_reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why a run's answer depends on earlier runs, for a model that builds something permanent (a table).

        It does if these inputs give another answer with the model as it was at first, or earlier inputs do now.
        """
        assert self._original is not None
        now, dice, buffers = PythonState(self._model), Dice(), Buffers(self._model)

        def run(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            dice.restore()
            try:
                return run_plain(self._model, *copied(*inputs))
            finally:
                now.restore()
                buffers.restore()

        try:
            own = run((args, kwargs))
            self._original.restore()
            pairs = [(run((args, kwargs)), own), *((run(inputs), output) for inputs, output in self._samples)]
        except Exception:  # the model's own, which its next run raises
            return ""
        finally:
            dice.restore()
        if not all(itertools.starmap(identical, pairs)):
            return "what the model builds in one forward changes its answer to other inputs"
        if sum(one.nbytes for one in flatten((args, kwargs))[1]) <= MAX_SAMPLE_BYTES:
            self._samples.append((copied(args, kwargs), own))
        return ""


@dataclass
class Left:
    """What runs leave behind that no run reads, for all known paths: names of Python state, and the addresses of
    storages.
    """

    names: set[str] = field(default_factory=set)
    scratch: set[int] = field(default_factory=set)
    forms: dict[str, _Form] = field(default_factory=dict)
    """Forms of tensors that were under some of the names."""

    def copy(self) -> Left:
        return Left(set(self.names), set(self.scratch), dict(self.forms))


class _OnlyForm(Placeholder):
    """Takes the place of a tensor that a run has left; only its form may be read, to create zeros like it."""

    is_poison = True

    def refuse(self, what: str) -> NoReturn:
        raise PoisonRead


class _Trial:
    """The runs of a model that make one trace."""

    def __init__(
        self, model: nn.Module, modules: dict[nn.Module, ModuleInfo], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._model = model
        self._modules = modules
        self._inputs = args, kwargs
        self._dice = Dice()
        self.before = PythonState(model)
        self._memory = MemoryKept([*model.parameters(), *model.buffers(), *self.before.tensors()])
        self.keeps_what_it_built = False
        self._rewritten: set[int] = set()
        self.changed: set[Spot] = set()
        """The attributes that the model changes by itself."""
        self.left = Left()
        self.built: set[str] = set()
        """Names of what the first run built permanently."""

    def _fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._dice.restore()
        return copied(*self._inputs)

    def run(self, *, settle: bool) -> Trace:
        """``settle``: run once before, so that caches are built and the state is steady."""
        if self.before.unrepeatable:
            raise CutRefused(f"planning would change what cannot be put back: {first_few(self.before.unrepeatable)}")
        first = self._settled() if settle else None
        built = self.before.changes()
        self._rewritten |= self._memory.changed()
        state = self.before if self.before.is_same else PythonState(self._model)
        trace, second, judge = self._recorded(state, settle=settle)
        self.changed |= {change.spot for change in [*built, *judge.seen.values()] if change.spot is not None}
        changes = judge.changes()
        kept = [change.name for change in changes]
        if kept and not settle:
            self.before.restore()
            return self.run(settle=True)
        left = self.left.names | {lasting_name(change, state.places) for change in changes}
        if left:
            self.left.forms |= {
                portable(change.name): (one.shape, one.dtype, one.device)
                for change in changes
                if isinstance(one := change.now, torch.Tensor) and one.layout == torch.strided
            }
            taken = any(change.now is MISSING and not change.is_attribute for change in changes)  # by ``popitem``
            unread = not taken and _is_timeless(trace) and self._hangs_on_none(left, second)
            state.restore()
            if unread:
                self.left.names |= left
                kept = []
            else:
                kept = kept or sorted(left)
        kept += judge.from_data()
        if judge.log.reads_first(self.left.scratch):
            kept.append("memory that it uses as scratch on another path")
        self.left.scratch |= judge.log.addresses(judge.log.scratch)
        # state that every run sets again was not built once
        built = [change for change in built if lasting_name(change, self.before.places) not in left]
        self.built = {lasting_name(change, self.before.places) for change in built}
        once = judge.log.not_written(self._rewritten)
        if not kept and not once and any(Judge(self.before, judge.log).matters(change) for change in built):
            kept = self._built_from_inputs(left)
            self.keeps_what_it_built = True
        trace.trains = any(module.training for module in self._modules)
        if state.overflow:
            trace.unsteady = "the model keeps more Python objects than are looked at"
        elif kept:
            trace.unsteady = f"the model keeps state from one run to the next: {first_few(kept)}"
        elif once:  # the note would stay, and the state it is about be restored
            trace.unsteady = (
                f"only its first forward writes to {first_few(once)}, and it keeps a note of that: "
                "run the model once, on both sides and on the same input, before it is wrapped"
            )
        elif settle and not identical(first, second):
            trace.unsteady = "the model gives another answer each time it runs on the same input: it keeps state"
        self.keeps_what_it_built &= not trace.has_no_cut  # otherwise the source of its state is unknown
        return trace

    def _settled(self) -> Any:
        """Return the output of one run. Compiled modules run as they are; their writes are not observed."""
        if not any(info.opaque for info in self._modules.values()):
            with contextlib.suppress(Exception), self._memory:
                return run_plain(self._model, *self._fresh())
            _forget_compiled()
            self.before.restore()
        return run_plain(self._model, *self._fresh())

    def _recorded(self, state: PythonState, *, settle: bool) -> tuple[Trace, Any, Judge]:
        try:
            with self._memory:
                return record(self._model, self._modules, self._fresh, state)
        except IsthmusError:
            raise
        except Exception as error:
            _forget_compiled()
            if not settle:
                self.before.restore()
                run_plain(self._model, *self._fresh())  # raises the model's own error
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CutRefused(f"the model cannot be recorded, so no cut is possible: {what}") from error

    def _hangs_on_none(self, left: set[str], expected: Any) -> bool:
        """Return whether a run gives the same result with poison under these names, and overwrites all of it.

        A tensor's form may be read if three forms make no difference, not to the path either: its own, none and another
        one.
        """
        if self._is_same_over(left, {}, expected) is not None:
            return True
        paths = []
        for by in (0, -1, 3) if self.left.forms else ():
            values = {name: _changed(form, by) for name, form in self.left.forms.items()}
            paths.append(self._is_same_over(left, values, expected))
        return bool(paths) and paths[0] is not None and paths == [paths[0]] * len(paths)

    def _is_same_over(self, left: set[str], values: dict[str, _OnlyForm], expected: Any) -> list[str] | None:
        """Return the operations of a run that finds these ``values``, or poison; None if its result differs."""
        state, path = PythonState(self._model), _Path()
        try:
            if not spread(state, left, values):
                return None
            with self._memory, path:
                output = run_plain(self._model, *self._fresh())
            clean = not any(remains(change.now) for change in state.changes())
            return path.found if clean and identical(output, expected) else None
        except (PoisonRead, Exception):
            return None
        finally:
            state.restore()

    def _built_from_inputs(self, left: set[str]) -> list[str]:
        """Check that what the first run leaves permanently in the model's state depends on no input; return the names
        of what does.
        """
        self.before.restore()
        args, kwargs = self._fresh()
        taint = Taint((args, kwargs))
        with self._memory, taint:
            run_plain(self._model, args, kwargs)
        changes = [one for one in self.before.changes() if lasting_name(one, self.before.places) not in left]
        return [change.name for change in changes if depends(change, taint, self.before.reach)]

    def end(self) -> None:
        """Restore the model's state, except for what it keeps permanently."""
        self._dice.restore()
        self._memory.restore()
        if not self.keeps_what_it_built:
            self.before.restore()


class _Path(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.append(f"{func} {[one.shape for one in tensors_in(result)]}")
        return result


_Form = tuple[torch.Size, torch.dtype, torch.device]


def _changed(form: _Form, by: int) -> _OnlyForm:
    """Return the form with no element (-1), or longer in each dimension."""
    shape, dtype, device = form
    changed = (0,) if by < 0 else tuple(size + by for size in shape) or ((by,) if by else ())
    return _OnlyForm(changed, torch.empty(changed, device="meta").stride(), dtype, device)


def _is_timeless(trace: Trace) -> bool:
    """Return whether every run on inputs of this form takes the path of this one."""
    return not trace.dynamic and not {"python", "numpy"} & set(trace.dice)


def _forget_compiled() -> None:
    """Drop what torch compiled under this package's modes (torch.cond, flex_attention), which fails without them."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def _refuse(plan: Plan, layer: str, reason: str) -> None:
    with contextlib.suppress(UnknownLayer):  # on another path the layer may not run
        plan.refuse(layer, reason)


def _find_anchor(model: nn.Module) -> tuple[dict[str, Any] | None, str]:
    """(dictionary, name) of the first parameter or buffer."""
    for tensors in ("_parameters", "_buffers"):
        for module in model.modules():
            kept = vars(module).get(tensors)
            if not isinstance(kept, dict):  # a scripted module has a wrapper of its own
                continue
            for name, tensor in kept.items():
                if tensor is not None:
                    return kept, name
    return None, ""
