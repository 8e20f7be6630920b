"""Which parameters a head reads."""

from __future__ import annotations

from torch import nn

from shared_hooks.modules import ROOT
from shared_hooks.planning.plan import Cut, Plan
from shared_hooks.recording import ModuleCall


def parameters_of_head(model: nn.Module, plan: Plan, cut: Cut) -> list[nn.Parameter]:
    """The parameters of ``model``, which ``plan`` is of, that a run up to ``cut`` reads or may read: those that its
    operations were given, and those of every module that it enters. Raises `UnknownLayer`.
    """
    if plan.place(cut) < 0:
        return []
    trace, end = plan.trace, plan.position(cut)
    touched = {value.storage for op in trace.ops if op.seq <= end for value in op.args}
    for event in trace.events:
        if event.seq <= end:
            touched.update(storage for storage, _ in (*event.reads, *event.overwrites))
            touched.update(event.writes, event.handed)
    entered = {id(one) for call in trace.calls if call.enter <= end for one in _own(model, call)}
    return [
        parameter
        for parameter, storage in zip(model.parameters(), trace.weights, strict=True)
        if storage in touched or id(parameter) in entered
    ]


def _own(model: nn.Module, call: ModuleCall) -> list[nn.Parameter]:
    """What one module needs; nobody sees which modules a layer runs, be it opaque or as deep as one looks."""
    module = model if call.path == ROOT else model.get_submodule(call.path)
    return list(module.parameters(recurse=call.opaque or not call.has_child))
