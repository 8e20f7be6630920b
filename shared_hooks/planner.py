"""Makes plans, and keeps them: by input signature, and within one signature by the path that an input takes."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from shared_hooks import context
from shared_hooks.copies import Buffers, copied
from shared_hooks.dice import Dice
from shared_hooks.errors import CutRefused, IsthmusError, UnknownLayer
from shared_hooks.hierarchy import ModuleInfo
from shared_hooks.lifecycle.registry import Lifecycle
from shared_hooks.lifecycle.stages import Stage
from shared_hooks.plan import Plan
from shared_hooks.recorder import record
from shared_hooks.report import identical
from shared_hooks.session import run_plain
from shared_hooks.trace import Trace
from shared_hooks.trees import UnknownHolder

MAX_SIGNATURES = 64
MAX_PATHS = 16


class Planner:
    """The plans of one model; safe with threads, which wait for each other to plan."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        aliases: dict[str, str],
        depth: int | None,
        lifecycle: Lifecycle,
    ) -> None:
        self._model = model
        self._modules = modules
        self._aliases = aliases
        self._depth = depth
        self._lifecycle = lifecycle
        self._anchor = _find_anchor(model)
        self._plans: OrderedDict[str, list[Plan]] = OrderedDict()
        self._latest: Plan | None = None
        self._obstacle = "call plan() or forward() with example inputs first"
        self._impossible: set[str] = set()
        self._refused: dict[str, str] = {}  # layers that no plan is to be cut after, and why
        self._lock = threading.RLock()
        self.made = 0
        """How often the model was recorded."""

    @property
    def latest(self) -> Plan:
        """The plan made or found last; `UnknownLayer`, with what was in the way, if there is none."""
        if self._latest is None:
            raise UnknownLayer(f"no plan yet: {self._obstacle}")
        return self._latest

    def weight(self) -> torch.Tensor | None:
        """The model's first parameter or buffer, as it is now.

        Asked for at every forward: walking the module tree each time would cost more than a small layer.
        """
        owner, name = self._anchor
        return next(self._model.parameters(), None) if owner is None else owner.get(name)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Record the model on these inputs; a path that is known already gives the plan that is known."""
        return self._told(args, kwargs)[0]

    def _told(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, unless_known: bool = False) -> list[Plan]:
        """`_plan` between two stages, whose hooks are called without the lock."""
        self._lifecycle.emit(Stage.BEFORE_PLAN, args=args, kwargs=kwargs)
        plans = self._plan(args, kwargs, unless_known)
        self._lifecycle.emit(Stage.AFTER_PLAN, plan=plans[0])
        return plans

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], unless_known: bool) -> list[Plan]:
        """The plan of these inputs; or those of their signature, if another thread has made any meanwhile."""
        key, digest, around = context.signature(self._modules, self.weight(), args, kwargs)
        with self._lock:
            if unless_known and self._plans.get(key):
                return list(self._plans[key])
            self.made += 1
            paths = self._plans.setdefault(key, [])
            self._plans.move_to_end(key)
            trace = self._record_quietly(args, kwargs, settle=not paths)
            plan = Plan(trace, digest, self._depth, around, self._aliases)
            for layer, reason in self._refused.items():
                _refuse(plan, layer, reason)
            for known in paths:
                if known.path == plan.path:
                    self._latest = known
                    return [known]
            paths.insert(0, plan)
            del paths[MAX_PATHS:]
            for known in paths:
                known.siblings = paths
                known.forget_cuts()
            while len(self._plans) > MAX_SIGNATURES:
                self._plans.popitem(last=False)
            self._latest = plan
            return [plan]

    def refuse(self, layer: str, reason: str) -> None:
        """No plan, known or still to be made, is cut after the layer of this name ("input": before the first)."""
        with self._lock:
            self._refused[layer] = reason
            known = {id(plan): plan for paths in self._plans.values() for plan in paths}
            if self._latest is not None:
                known[id(self._latest)] = self._latest
            for plan in known.values():
                _refuse(plan, layer, reason)

    def plans_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Plan]:
        """The plans of these inputs' signature; made now if there is none."""
        key = context.signature(self._modules, self.weight(), args, kwargs)[0]
        with self._lock:
            known = list(self._plans.get(key, ()))
        return known or self._told(args, kwargs, unless_known=True)

    def plans_if_possible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Plan]:
        """The same for a forward without a cut: a model that cannot be planned cannot be cut, but it can run."""
        key = ""
        try:
            key = context.signature(self._modules, self.weight(), args, kwargs)[0]
            return [] if key in self._impossible else self.plans_for(args, kwargs)
        except UnknownHolder as error:
            self._obstacle = str(error)
        except Exception as error:  # if it is the model's own, the run that follows raises it
            self._obstacle = f"{type(error).__name__}: {error}"
            self._impossible.add(key)
        return []

    def _record_quietly(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, settle: bool) -> Trace:
        """As if nobody had planned: the caller's random numbers go on, and buffers are put back."""
        weight = self.weight()
        with torch.random.fork_rng(devices=[weight.device] if weight is not None and weight.is_cuda else []):
            buffers, dice = Buffers(self._model), Dice()
            try:
                return self._record(args, kwargs, settle=settle)
            finally:
                buffers.restore()
                dice.restore()

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, settle: bool) -> Trace:
        """``settle``: run once before, so that caches are built and the state is steady."""
        dice = Dice()

        def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
            dice.restore()
            return copied(args, kwargs)

        first = run_plain(self._model, *fresh()) if settle else None
        try:
            trace, second = record(self._model, self._modules, fresh)
        except IsthmusError:
            raise
        except Exception as error:
            if "torch._dynamo" in sys.modules:
                # what it compiled under our modes (torch.cond, flex_attention) fails outside of them, too
                sys.modules["torch._dynamo"].reset()
            if not settle:
                run_plain(self._model, *fresh())  # raises what is the model's own
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CutRefused(f"the model cannot be recorded, so that no cut is possible: {what}") from error
        if settle and not identical(first, second):
            trace.unsteady = "the model gives another answer each time it runs on the same input: it keeps state"
        return trace


def _refuse(plan: Plan, layer: str, reason: str) -> None:
    with contextlib.suppress(UnknownLayer):  # on another path the layer may not run
        plan.refuse(layer, reason)


def _find_anchor(model: nn.Module) -> tuple[dict[str, Any] | None, str]:
    """Where the first parameter or buffer is kept: (the dictionary, its name)."""
    for tensors in ("_parameters", "_buffers"):
        for module in model.modules():
            kept = vars(module).get(tensors)
            if not isinstance(kept, dict):  # a scripted module has a wrapper of its own
                continue
            for name, tensor in kept.items():
                if tensor is not None:
                    return kept, name
    return None, ""
