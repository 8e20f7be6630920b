"""The recipes of one model: each made once, kept while it is used, within limits."""

from __future__ import annotations

import contextvars
import copy
import math
import threading
import time
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.crossing import EarlyOutput, decoded_bytes, generators
from shared_hooks.errors import CutRefused, Disagreement, IsthmusError, PlanMismatch, ServerUnavailable
from shared_hooks.forward import context
from shared_hooks.modules import ModuleInfo, fast_path_off
from shared_hooks.purity import Turns
from shared_hooks.sharing import Owner, SharedCache
from shared_hooks.state import Settings
from shared_hooks.tail.meta_runner import Budget
from shared_hooks.tail.recipe import Placing, Recipe, blank_slots
from shared_hooks.tail.rehearsal import Rehearsal, RehearsalFacts
from shared_hooks.tensors import ClassFinder


@dataclass(frozen=True)
class RehearsalLimits:
    """The limits of rehearsals: of each one (`meta_runner.Budget`), and of all together.

    ``recipes`` and ``steps`` (some 500 bytes each) that are kept; ``seconds_a_minute``: of rehearsing within any
    minute, for all and for one `payer`; beyond it new cuts are postponed. ``refusal_seconds``: how long a refusal is
    kept.
    """

    operations: int = 400_000
    native_bytes: int = 1 << 30
    elements: int = 1 << 36
    seconds: float = 60.0
    recipes: int = 1024
    steps: int = 1_000_000
    seconds_a_minute: float = 60.0
    seconds_a_minute_each: float = 60.0
    held_bytes: int = 1 << 34
    refusal_seconds: float = 60.0


payer: ContextVar[Owner] = ContextVar("payer", default=Owner())  # noqa: B039  # immutable
"""The account that this thread works for, so that one with ever new cuts cannot take another's share."""


class paid_by:  # used as a function
    """Charge rehearsals in the block to this account."""

    def __init__(self, account: str, client: str = "") -> None:
        self._owner = Owner(account, client)

    def __enter__(self) -> None:
        self._token = payer.set(self._owner)

    def __exit__(self, *_: object) -> None:
        payer.reset(self._token)


@dataclass(frozen=True)
class _Kept:
    """A kept recipe or refusal. ``until``: on the monotonic clock; ``bounds``: of the rehearsed requests, each with a
    number for each value read from data; it is valid for values that are within one of them, number by number.
    """

    found: Recipe | IsthmusError
    until: float
    bounds: tuple[tuple[float, ...], ...]


class RecipeBook:
    """Thread-safe: one rehearsal at a time."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[nn.Module, ModuleInfo],
        find: ClassFinder,
        limits: RehearsalLimits,
        turns: Turns,
    ) -> None:
        self._model = model
        self._modules = modules
        self._find = find
        self._limits = limits
        self._turns = turns
        self._kept: SharedCache[str, _Kept] = SharedCache(limits.recipes, limits.steps)
        self._spent: deque[tuple[float, float, str]] = deque()
        self._facts: RehearsalFacts | None = None
        self._lock = threading.Lock()
        self._rehearsing = threading.RLock()
        self.rehearsals = 0
        """The number of rehearsals."""

    def recipe(self, early: EarlyOutput, device: torch.device) -> Recipe:
        """Return how to resume from ``early``.

        Raises `CutRefused`, `Disagreement`, `PlanMismatch`, `TooLarge`, and `ServerUnavailable` after too many
        rehearsals.
        """
        found = self._known(early)
        if found is None:
            with self._turns.one(writes=True), self._rehearsing:
                found = self._known(early) or self._made(early, device)
        if isinstance(found, IsthmusError):
            raise copy.copy(found)  # a raised exception keeps the request alive: its frames, and so its payload
        return found

    def warm(self, early: EarlyOutput, device: torch.device) -> None:
        """Rehearse once before any request: the first time torch imports what takes seconds."""
        with self._turns.one(writes=True), self._rehearsing, suppress(IsthmusError):
            self._keep(early, self._rehearsed(early, device))

    def _known(self, early: EarlyOutput) -> Recipe | IsthmusError | None:
        """Return a known recipe; never waits for the rehearsal of another cut."""
        digest = early.crossing.digest
        with self._lock:
            kept = self._kept.get(digest, payer.get())
            if kept is None or kept.until < time.monotonic():
                return None
            if early.values and not _within(_numbers(early.values), kept.bounds):
                return None
            return kept.found

    def _made(self, early: EarlyOutput, device: torch.device) -> Recipe | IsthmusError:
        self._check_time()
        started = time.monotonic()
        found: Recipe | IsthmusError
        try:
            found = self._rehearsed(early, device)
        except (CutRefused, Disagreement, PlanMismatch) as error:
            if early.values:
                raise  # with other values it may be another path
            found = copy.copy(error)
        finally:
            self._spent.append((time.monotonic(), time.monotonic() - started, payer.get().account))
        self._keep(early, found)
        return found

    def _rehearsed(self, early: EarlyOutput, device: torch.device) -> Recipe:
        limits = self._limits
        budget = Budget(limits.operations, limits.native_bytes, limits.elements, limits.seconds, limits.held_bytes)
        placing = Placing(blank_slots(early.crossing.slots, device), device)
        if self._facts is None or not self._facts.state.is_same:
            self._facts = RehearsalFacts.of(self._model, self._modules)
        facts, settings = self._facts, Settings()
        state = facts.state
        rehearsal = Rehearsal(self._model, self._modules, early.crossing, early.values, placing, budget, facts)
        self.rehearsals += 1
        try:
            # all threads share the generators: a tail that is drawing must not notice
            everybodys = generators.kept(generators.ALL)
            with everybodys, torch.no_grad(), fast_path_off(), context.restored(early.crossing.context):
                recipe = contextvars.copy_context().run(rehearsal.recipe, self._find)
            # state that a forward leaves on the model belongs to the request, and is removed with it
            recipe.state, recipe.kept = state, facts.tensors
            # another value that was read before the cut may lead to another path after it
            recipe.is_open = bool(early.values) or not rehearsal.ended
            recipe.most = None if rehearsal.ended else limits.held_bytes
            return recipe
        finally:
            rehearsal.notes.failure = None  # it refers to frames that refer to it, and to the request's data
            state.restore()
            settings.restore()

    def _check_time(self) -> None:
        now = time.monotonic()
        while self._spent and self._spent[0][0] < now - 60:
            self._spent.popleft()
        own = sum(seconds for _, seconds, who in self._spent if who == payer.get().account)
        if own > self._limits.seconds_a_minute_each:
            raise ServerUnavailable("this client brought too many new cuts or input forms in the last minute")
        accounts = {payer.get().account, *(who for _, _, who in self._spent)}
        total = sum(seconds for _, seconds, _ in self._spent)
        # when it is used up, clients below their share may still rehearse
        if total > self._limits.seconds_a_minute and own >= self._limits.seconds_a_minute / len(accounts):
            raise ServerUnavailable("too many new cuts or input forms in the last minute; try again later")

    def _keep(self, early: EarlyOutput, found: Recipe | IsthmusError) -> None:
        digest = early.crossing.digest
        # a refusal may be temporary: no memory, another thread at the model's state
        until = math.inf if isinstance(found, Recipe) else time.monotonic() + self._limits.refusal_seconds
        bound = tuple(map(_bound, _numbers(early.values)))
        with self._lock:
            before = self._kept.get(digest, payer.get())
            known = before.bounds if before is not None and isinstance(before.found, Recipe) else ()
            kept = _Kept(found, until, (bound, *(one for one in known if one != bound))[:MAX_BOUNDS])
            self._kept.put(digest, kept, _size(found), payer.get())


def _size(found: Recipe | IsthmusError) -> int:
    """Return the size in steps."""
    if not isinstance(found, Recipe):
        return 1
    crossing = found.crossing
    return len(found.steps) + (decoded_bytes(crossing.to_bytes()) + crossing.working_bytes) // STEP_BYTES


STEP_BYTES = 512
"""The memory of a step; the description of the cut, which a recipe refers to, is counted in steps, too."""
MAX_BOUNDS = 64
_SMALL = 16.0
_MOST = 1e300


def _bound(number: float) -> float:
    """Numbers up to this bound cause no notable work beyond what was rehearsed: the next power of two."""
    return max(_SMALL, 2.0 ** math.ceil(math.log2(number))) if number > 0 else _SMALL


def _numbers(values: Any) -> list[float]:
    """Return the absolute numbers among values read from data: each may be a size, or a number of iterations."""
    found: list[float] = []
    waiting = list(reversed(values))
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif type(value) in (int, float):
            found.append(float(min(abs(value), _MOST)) if value == value else 0.0)
    return found


def _within(numbers: list[float], bounds: tuple[tuple[float, ...], ...]) -> bool:
    """Return whether a single bound holds for all of the numbers."""
    return any(
        len(bound) == len(numbers) and all(one <= most for one, most in zip(numbers, bound, strict=True))
        for bound in bounds
    )
