"""Record a forward of a model into a `Trace`, as often as it takes until nothing is unclear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.modules import ModuleInfo
from shared_hooks.recording import collector
from shared_hooks.recording.escapes import perturbed
from shared_hooks.recording.outliving import Judge
from shared_hooks.recording.recorder import Recorder
from shared_hooks.recording.trace import Trace
from shared_hooks.state import PythonState

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    model: nn.Module, modules: dict[nn.Module, ModuleInfo], fresh_inputs: Callable[[], Inputs], state: PythonState
) -> tuple[Trace, Any, Judge]:
    """Run the model on fresh inputs; return what it did, its output, and a judge of what it did to ``state``, which is
    the model's Python state now. The model's own exceptions pass through.

    A tensor that no operation made is a constant kept somewhere (a global, a closure), or the work of code that torch
    does not see. Where there are such tensors the model is recorded again: what is there a second time is a constant.
    What is made again each time (``torch.from_numpy``) is one if its bits are the same for other inputs, too.
    """

    def recorded(**close: Any) -> tuple[Recorder, Any]:
        state.restore()
        recorder = Recorder(model, modules, state, unknown, into_all=into_all, **close)
        return recorder, recorder.watch(*fresh_inputs())

    unknown: list[torch.Tensor] = []
    into_all = False
    with collector.put_off():
        recorder, output = recorded()
        if recorder.repeats.wrong:
            into_all = True
            recorder, output = recorded()
        if recorder.is_unclear():
            unknown = recorder.unknown
            recorder, output = recorded(closely=True)
            if recorder.appeared or recorder.handed.known or recorder.doubtful:
                others = [_again(model, modules, state, unknown, source) for source in perturbed(fresh_inputs)]
                constants = _agreeing(recorder.appeared, others)
                recorder, output = recorded(closely=True, constants=constants)
                recorder.written_unseen |= {name for other in others if other for name in other.unseen_writes()}
        return recorder.finish(output), output, recorder.judge


def _again(
    model: nn.Module,
    modules: dict[nn.Module, ModuleInfo],
    state: PythonState,
    known: list[torch.Tensor],
    fresh_inputs: Callable[[], Inputs],
) -> Recorder | None:
    """One more recording, for what it shows of memory that torch does not see; None if it cannot be made."""
    state.restore()
    recorder = Recorder(model, modules, state, known, closely=True)
    try:
        recorder.watch(*fresh_inputs())
    except Exception:  # other values may be none that the model takes
        return None
    return recorder


def _agreeing(appeared: list[str], others: list[Recorder | None]) -> frozenset[int]:
    """Which of the tensors that no operation made had the same bits in every recording, by order of appearance."""
    lists = [other.appeared for other in others if other is not None]
    if len(lists) < len(others) or any(len(found) != len(appeared) for found in lists):
        return frozenset()
    return frozenset(i for i, bits in enumerate(appeared) if bits and all(found[i] == bits for found in lists))
