"""`Together`: calls of one model run at once, and share the work on its weights.

A decode step reads all weights for one row. Steps of several sessions, whose lengths and caches differ, share each
module that is row-wise; attention, positions and caches stay each step's own, in the model's own code. So there is no
code for any architecture here, and nothing of a step's state is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from shared_hooks.errors import PlanMismatch
from shared_hooks.generation.together.gate import Gate
from shared_hooks.generation.together.lockstep import Ended, Lockstep, Outcome
from shared_hooks.modules import attach
from shared_hooks.purity import pure_modules
from shared_hooks.state import PythonState

Result = TypeVar("Result")


class Together:
    """Of one model, on which gates stand until `close`. Safe with several threads, each of which runs calls of its own.

    Sums are added up in another order than alone, so the last bits may differ; an `Outcome` says whether they may.
    """

    def __init__(self, model: nn.Module) -> None:
        """``model`` in evaluation, as it will stay. Modules that may write state, draw random numbers or have hooks
        get no gate.
        """
        numbers = {module: number for number, module in enumerate(model.modules())}
        pure = pure_modules(numbers)
        self._model = model
        self._python: PythonState | None = None
        self._gated = [module for module in numbers if module in pure and _gains(module)]
        for module in self._gated:
            with attach.lock:
                shim = attach.attach(module)
                gate = shim.gate
                if not isinstance(gate, Gate):
                    gate = shim.gate = Gate(module, shim.forward, numbers[module])
                gate.users += 1

    def run(self, calls: Sequence[Callable[[], Result]], ended: Ended | None = None) -> list[Outcome[Result]]:
        """What becomes of each call, in order. ``calls`` run the model or parts of it, without gradients, in this
        thread; the exception of one leaves the others alone.

        ``ended`` is asked for a call's number at every gate: the exception that it gives is raised in that call. All
        that met others end in PlanMismatch where the model's Python wrote state on a way it had not taken before: they
        may have read each other's.
        """
        before = self._state()
        with torch.no_grad():
            outcomes = Lockstep(calls, before, ended).run()
        if all(outcome.company == 1 for outcome in outcomes) or not (changes := before.changes()):
            return outcomes
        error = PlanMismatch(f"steps that ran together changed {changes[0].name}, and may have read each other's")
        return [replace(one, value=None, error=error) if one.company > 1 else one for one in outcomes]

    def _state(self) -> PythonState:
        """The model's Python state, now."""
        state = self._python
        if state is None or not state.is_same:
            for module in self._gated:
                shim = attach.shim_of(module)
                if shim is not None and isinstance(shim.gate, Gate):
                    shim.gate.look_again()
            state = self._python = PythonState(self._model, settings=False)
        return state

    def close(self) -> None:
        """Takes the gates away."""
        for module in self._gated:
            with attach.lock:
                shim = attach.shim_of(module)
                if shim is not None and isinstance(shim.gate, Gate):
                    shim.gate.users -= 1
                    if not shim.gate.users:
                        shim.gate = None
                attach.detach(module)
        self._gated = []

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gains(module: nn.Module) -> bool:
    """Whether it has weights that several rows can share; to look up one row reads no others."""
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not module.training and not is_table and any(True for _ in module.parameters())
