"""The recipes of one model: each rehearsed once, kept while they are used, made within a budget."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

import torch
from torch import nn

from shared_hooks import context
from shared_hooks.dice import Dice
from shared_hooks.early import EarlyOutput
from shared_hooks.errors import CutRefused, Disagreement, IsthmusError, PlanMismatch, ServerUnavailable
from shared_hooks.fastpath import fast_path_off
from shared_hooks.ghosts import Budget
from shared_hooks.hierarchy import ModuleInfo
from shared_hooks.placing import Placing
from shared_hooks.recipe import Recipe
from shared_hooks.rehearsal import Facts, Rehearsal
from shared_hooks.settings import Settings
from shared_hooks.slots import blank_slots
from shared_hooks.trees import ClassFinder


@dataclass(frozen=True)
class RehearsalLimits:
    """What rehearsals may use: each one (`ghosts.Budget`), and all together.

    ``recipes`` and ``steps`` that are kept; ``seconds_a_minute``: of rehearsing in any minute; beyond it new cuts are
    put off.
    """

    operations: int = 400_000
    native_bytes: int = 1 << 30
    elements: int = 1 << 36
    seconds: float = 60.0
    recipes: int = 1024
    steps: int = 4_000_000
    seconds_a_minute: float = 60.0


class RecipeBook:
    """Safe with threads: one rehearses at a time."""

    def __init__(
        self, model: nn.Module, modules: dict[nn.Module, ModuleInfo], find: ClassFinder, limits: RehearsalLimits
    ) -> None:
        self._model = model
        self._modules = modules
        self._find = find
        self._limits = limits
        self._kept: OrderedDict[str, Recipe | IsthmusError] = OrderedDict()
        self._steps = 0
        self._spent: deque[tuple[float, float]] = deque()
        self._facts: Facts | None = None
        self._lock = threading.RLock()
        self.rehearsals = 0
        """How often the model was rehearsed."""

    def recipe(self, early: EarlyOutput, device: torch.device) -> Recipe:
        """How to resume from ``early``. Raises `CutRefused`, `Disagreement`, `PlanMismatch`, `TooLarge`, and
        `ServerUnavailable` when too much was rehearsed lately.
        """
        digest = early.crossing.digest
        with self._lock:
            known = self._kept.get(digest)
            if known is None:
                known = self._made(early, device)
            else:
                self._kept.move_to_end(digest)
        if isinstance(known, IsthmusError):
            raise known.with_traceback(None)
        return known

    def _made(self, early: EarlyOutput, device: torch.device) -> Recipe | IsthmusError:
        self._check_time()
        started = time.monotonic()
        found: Recipe | IsthmusError
        try:
            found = self._rehearsed(early, device)
        except (CutRefused, Disagreement, PlanMismatch) as error:
            if early.values:
                raise  # with other values it may be another path
            found = error
        finally:
            self._spent.append((time.monotonic(), time.monotonic() - started))
        self._keep(early.crossing.digest, found)
        return found

    def _rehearsed(self, early: EarlyOutput, device: torch.device) -> Recipe:
        limits = self._limits
        budget = Budget(limits.operations, limits.native_bytes, limits.elements, limits.seconds)
        placing = Placing(blank_slots(early.crossing.slots, device), device)
        if self._facts is None or not self._facts.state.is_same:
            self._facts = Facts.of(self._model, self._modules)
        facts, settings = self._facts, Settings()
        state = facts.state
        rehearsal = Rehearsal(self._model, self._modules, early.crossing, early.values, placing, budget, facts)
        self.rehearsals += 1
        dice = Dice()
        try:
            with torch.no_grad(), fast_path_off(), context.restored(early.crossing.context):
                recipe = contextvars.copy_context().run(rehearsal.recipe, self._find)
            # what a forward leaves on the model is a request's own, and goes with it
            recipe.state, recipe.leaves = state, not rehearsal.ended or not state.is_same
            return recipe
        finally:
            state.restore()
            dice.restore()
            settings.restore()

    def _check_time(self) -> None:
        now = time.monotonic()
        while self._spent and self._spent[0][0] < now - 60:
            self._spent.popleft()
        if sum(seconds for _, seconds in self._spent) > self._limits.seconds_a_minute:
            raise ServerUnavailable("too many new cuts or input forms in the last minute; try again later")

    def _keep(self, digest: str, found: Recipe | IsthmusError) -> None:
        self._kept[digest] = found
        self._steps += _size(found)
        while len(self._kept) > self._limits.recipes or (self._steps > self._limits.steps and len(self._kept) > 1):
            _, old = self._kept.popitem(last=False)
            self._steps -= _size(old)


def _size(found: Recipe | IsthmusError) -> int:
    return len(found.steps) if isinstance(found, Recipe) else 1
