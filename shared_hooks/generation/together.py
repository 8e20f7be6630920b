"""Continuous batching for any architecture: calls of one model run in lock-step and share what is row-wise.


May import purity, state, modules, forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from greenlet import GreenletExit, greenlet
from torch import nn

from shared_hooks import devices
from shared_hooks.errors import PlanMismatch
from shared_hooks.forward import uninterrupted
from shared_hooks.generation.gates import BlockGate, Form, Gate, GateRequest, RowGate, ShimEntry, nobodys, travelling
from shared_hooks.modules import attach
from shared_hooks.purity import pure_modules
from shared_hooks.state import PythonState

__all__ = ["Ended", "Lockstep", "Outcome"]


# `Lockstep`: runs calls of one model at once, sharing the work on its weights. A decode step reads all weights for
# one row. Steps of several sessions, whose lengths and caches differ, share each module that is row-wise; attention,
# positions and caches stay each step's own, in the model's own code. So there is no code for any architecture here,
# and a step's state is not touched.

# Calls in lock-step: each is a greenlet of one thread that runs until it reaches a gate. When all have, those
# furthest behind continue: the ones that wait at the same gate with rows of one form run as one. So calls that took
# different paths meet again. Nothing runs in parallel; a call is suspended only at a gate, and only while torch's
# per-thread state (gradients, autocast, modes, the stream) is as it was around them all. Context variables are per
# call.

Result = TypeVar("Result")
Ended = Callable[[int], BaseException | None]
"""The error that ends the call with this number, or None while it may continue. Called at every gate."""
_ALONE: Any = object()


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """The outcome of one call: its ``value``, or its ``error``."""

    value: Result | None
    error: BaseException | None
    batch_size: int
    """The most calls that passed a gate together with this one, including it; 1: the result is bit for bit that of
    computing it alone.
    """
    meetings: int
    """How often it passed a gate together with others."""

    def result(self) -> Result:
        """Return the value. Raises the error."""
        if self.error is not None:
            raise self.error
        value: Any = self.value
        return value  # type: ignore[no-any-return]


class _LockstepRun(Generic[Result]):
    """Runs these calls once, in the thread that calls `run`."""

    def __init__(
        self,
        calls: Sequence[Callable[[], Result]],
        before: PythonState | None,
        ended: Ended | None = None,
        contexts: Sequence[Context] | None = None,
    ) -> None:
        """``before``: the model's current Python state; None if each call has a copy of the model."""
        self._ended = ended
        self.before = before
        self.surroundings: Any = None
        self.under_way = len(calls)
        contexts = [copy_context() for _ in calls] if contexts is None else contexts
        self._travellers = [_Participant(self, *one) for one in zip(range(len(calls)), calls, contexts, strict=True)]

    def run(self) -> list[Outcome[Result]]:
        """Return the outcomes in order. An exception from outside, at a gate, ends all calls."""
        self.surroundings = _surroundings()
        try:
            with nobodys():
                self._run_to_gate()
        finally:
            for participant in self._travellers:
                participant.leave()
        return [participant.outcome() for participant in self._travellers]

    def _run_to_gate(self) -> None:
        waiting: dict[tuple[Gate, Form], list[_Participant[Result]]] = {}
        ready = self._travellers
        while ready:
            for participant in ready:
                if participant.continue_run():
                    waiting.setdefault(participant.place, []).append(participant)
            if not waiting:
                return
            place = min(waiting, key=_number)
            ready = self._through(place[0], waiting.pop(place))

    def _through(self, gate: Gate, group: list[_Participant[Result]]) -> list[_Participant[Result]]:
        """Let the whole group pass the gate, each with its answer."""
        if self._ended is not None:
            group = [participant for participant in group if not self._is_ended(participant)]
        found = None
        if len(group) > 1:
            try:
                found = gate.through([participant.request for participant in group])
            except Exception:
                found = None  # one of them failed, or all: each finds out by running alone
        for number, participant in enumerate(group):
            del participant.request
            participant.answer = _ALONE
            if found is not None:
                participant.answer = found[number]
                participant.meetings += 1
                participant.batch_size = max(participant.batch_size, len(group))
        return group

    def _is_ended(self, participant: _Participant[Result]) -> bool:
        error = self._ended(participant.number) if self._ended is not None else None
        if error is not None:
            participant.leave(error)
        return error is not None


class _Participant(Generic[Result]):
    """One call; a `gates.Participant`."""

    place: tuple[Gate, Form]
    request: GateRequest

    def __init__(
        self, together: _LockstepRun[Result], number: int, call: Callable[[], Result], context: Context
    ) -> None:
        self.number = number
        self.answer: Any = None
        self.batch_size = 1
        self.meetings = 0
        self._value: Result | None = None
        self._error: BaseException | None = None
        self._ended: BaseException | None = None
        self._together = together
        self._call = call
        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = context

    def _run(self) -> None:
        travelling.set(self)
        try:
            self._value = self._call()
        except BaseException as error:
            if not isinstance(error, Exception) and error is not self._ended:
                raise  # raised in `_LockstepRun.run`
            self._error = error
        finally:
            self._together.under_way -= 1

    # Of the lock-step

    def continue_run(self) -> bool:
        """Continue from its gate, with its answer; returns False if it has ended."""
        self._greenlet.switch()
        return not self._greenlet.dead

    def leave(self, error: BaseException | None = None) -> None:
        """End it where it is, with this ``error``; it restores what it must."""
        self._ended = error
        for raised in (error or GreenletExit(), GreenletExit()):  # its code may catch the first, and continue to a gate
            if self._greenlet:
                self._greenlet.throw(raised)
        self._error = error or self._error

    def outcome(self) -> Outcome[Result]:
        return Outcome(self._value, self._error, self.batch_size, self.meetings)

    # Of its gates

    @property
    def may_meet(self) -> bool:
        together = self._together
        return together.under_way > 1 and _surroundings() == together.surroundings

    @property
    def is_quiet(self) -> bool:
        return self._together.before is None or self._together.before.is_same

    def arrive(self, gate: Gate, form: Form, request: GateRequest) -> Any:
        self.place, self.request = (gate, form), request
        with uninterrupted():  # an interruption of this call must not be raised in another
            self._greenlet.parent.switch()
        answer, self.answer = self.answer, None
        return request.alone() if answer is _ALONE else answer


def _number(place: tuple[Gate, Form]) -> int:
    return place[0].number


def _surroundings() -> tuple[Any, ...]:
    """torch's settings of the thread, and so of all its greenlets."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_any_autocast_enabled(),
        None if (device := devices.initialized()) is None else devices.current_stream(device),
    )


class Lockstep:
    """Runs calls of one model in lockstep, through gates that stay until `close`. Thread-safe.

    Sums are added up in another order than alone, so the last bits may differ; an `Outcome` tells whether they may.
    """

    def __init__(self, model: nn.Module, copies: Sequence[nn.Module] = ()) -> None:
        """``model``: in evaluation mode, which must not change. Modules that may write state, draw random numbers or
        have hooks get no gate. ``copies``: of the model, with the same weights, whose calls meet those of the model;
        then each of the calls that run together uses another copy, or the model.
        """
        numbers = {module: number for number, module in enumerate(model.modules())}
        pure = pure_modules(numbers)
        self._model = model
        self._apart = bool(copies)
        self._python: PythonState | None = None
        alike = list(zip(*(one.modules() for one in (model, *copies)), strict=True))
        blocks = {id(block): layer for block, layer in _blocks(model)}
        self._gated: list[nn.Module] = []
        for same in alike:
            layer = blocks.get(id(same[0]))
            if (layer is None and same[0] not in pure) or not _gains(same[0]):
                continue
            self._gated += same
            with attach.lock:
                shims = [attach.attach(one) for one in same]
                entry = shims[0].gate
                if isinstance(entry, ShimEntry):
                    gate = entry.gate
                elif layer is None or same[0] in pure:
                    gate = RowGate(same[0], shims[0].forward, numbers[same[0]], same[1:])
                else:
                    gate = BlockGate(same[0], shims[0].forward, numbers[same[0]], same[1:], layer)
                for shim in shims:
                    shim.gate = ShimEntry(shim.forward, gate)
                    gate.users += 1

    def run(
        self,
        calls: Sequence[Callable[[], Result]],
        ended: Ended | None = None,
        contexts: Sequence[Context] | None = None,
    ) -> list[Outcome[Result]]:
        """Return the outcome of each call, in order. ``calls`` run the model or parts of it, without gradients, in this
        thread, each with its own of the ``contexts`` (None: the current one); an exception in one does not affect the
        others.

        ``ended`` is called with a call's number at every gate: the exception that it returns is raised in that call.
        All calls that met others end in PlanMismatch if the model's Python wrote state on a path not taken before: they
        may have read each other's.
        """
        before = None if self._apart else self._state()
        with torch.no_grad():
            outcomes = _LockstepRun(calls, before, ended, contexts).run()
        if before is None or all(one.batch_size == 1 for one in outcomes) or not (changes := before.changes()):
            return outcomes
        error = PlanMismatch(f"steps that ran together changed {changes[0].name}, and may have read each other's")
        return [replace(one, value=None, error=error) if one.batch_size > 1 else one for one in outcomes]

    def _state(self) -> PythonState:
        """Return the model's current Python state."""
        state = self._python
        if state is None or not state.is_same:
            for module in self._gated:
                shim = attach.shim_of(module)
                if shim is not None and isinstance(shim.gate, ShimEntry):
                    shim.gate.gate.look_again()
            state = self._python = PythonState(self._model, settings=False)
        return state

    def close(self) -> None:
        """Remove the gates."""
        for module in self._gated:
            with attach.lock:
                shim = attach.shim_of(module)
                if shim is not None and isinstance(shim.gate, ShimEntry):
                    gate = shim.gate.gate
                    gate.users -= 1
                    if self._apart or not gate.users:
                        shim.gate = None
                attach.detach(module)
        self._gated = []

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gains(module: nn.Module) -> bool:
    """Return whether it has weights that several rows can share; looking up one row of a table reads no others."""
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not module.training and not is_table and any(True for _ in module.parameters())


def _blocks(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the outermost of its modules in lists that have a layer of the state, with that layer."""
    found: list[tuple[nn.Module, int]] = []
    waiting = [model]
    while waiting:
        one = waiting.pop()
        for child in one.children():
            own = {vars(inner).get("layer_idx") for inner in child.modules()} - {None}
            if isinstance(one, nn.ModuleList) and len(own) == 1 and isinstance(number := own.pop(), int):
                found.append((child, number))
            else:
                waiting.append(child)
    return found
