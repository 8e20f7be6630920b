"""The hierarchy map: the static module tree and the dynamic order of calls and operations, joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from shared_hooks.forward import Kind
from shared_hooks.mapping.tags import is_holder, parent_of, tags_of
from shared_hooks.modules import call_name, hierarchy
from shared_hooks.planning import Plan
from shared_hooks.recording import ModuleCall, Op


@dataclass(frozen=True)
class ModuleEntry:
    """One module of the tree. ``names``: further paths of the same module; ``parameters``: its own, in elements.

    ``holder``: it has no forward and cannot be called (``ModuleList``); ``calls``: how often it ran.
    """

    path: str
    tag: str
    module_type: str
    class_name: str
    parent: str | None
    names: tuple[str, ...]
    parameters: int
    holder: bool
    opaque: bool
    calls: int


@dataclass(frozen=True)
class CallEntry:
    """One call of a module. ``order`` counts calls and operations of the forward as they began; ``parent`` is the call
    that made it; ``layer_id`` is its number where it is a layer, a call that calls no other module.
    """

    order: int
    name: str
    path: str
    tag: str
    parent: str | None
    layer_id: int | None


@dataclass(frozen=True)
class OperationEntry:
    """One functional operation, made by the code of a module between the modules it calls: ``x + residual``."""

    order: int
    name: str
    call: str
    tag: str


@dataclass(frozen=True)
class HierarchyMap:
    """Modules in the order of their definition, parents first; calls and operations in the order in which they ran."""

    model: str
    plan_digest: str
    modules: tuple[ModuleEntry, ...]
    calls: tuple[CallEntry, ...]
    operations: tuple[OperationEntry, ...]

    @cached_property
    def by_path(self) -> dict[str, ModuleEntry]:
        """Modules by path."""
        return {entry.path: entry for entry in self.modules}

    @cached_property
    def by_call(self) -> dict[str, CallEntry]:
        """Calls by name: the path, with ``#n`` from the second call on."""
        return {entry.name: entry for entry in self.calls}

    @cached_property
    def tags(self) -> frozenset[str]:
        """Every tag that a node may bear: of modules and of calls."""
        return frozenset({entry.tag for entry in self.modules} | {entry.tag for entry in self.calls})

    def chain(self, call: str) -> list[CallEntry]:
        """The calls that were running during a call, the model's own first, this one last."""
        found: list[CallEntry] = []
        entry = self.by_call.get(call)
        while entry is not None:
            found.append(entry)
            entry = None if entry.parent is None else self.by_call.get(entry.parent)
        return found[::-1]


def map_of(model: nn.Module, plan: Plan, model_id: str = "") -> HierarchyMap:
    """The map of a model and one plan of it; of the modules down to the plan's depth."""
    modules = hierarchy.walk(model, plan.depth)
    tags = tags_of(modules)
    further: dict[str, list[str]] = {}
    for name, first in hierarchy.aliases(model).items():
        further.setdefault(first, []).append(name)
    calls = sorted(plan.trace.calls, key=lambda call: call.enter)
    times: dict[str, int] = {}
    for call in calls:
        times[call.path] = max(times.get(call.path, 0), call.number)
    listed = tuple(
        ModuleEntry(
            info.path,
            tags[info.path],
            info.module_type,
            f"{type(module).__module__}.{type(module).__qualname__}",
            parent_of(info.path),
            tuple(further.get(info.path, ())),
            sum(parameter.numel() for parameter in module.parameters(recurse=False)),
            is_holder(module),
            info.opaque,
            times.get(info.path, 0),
        )
        for module, info in modules.items()
    )
    steps: list[tuple[ModuleCall | Op, ModuleCall | None]] = []
    _list_steps(plan.trace.root, None, steps)  # the root stands for whoever calls the model
    return HierarchyMap(
        model_id or type(model).__name__,
        plan.digest,
        listed,
        tuple(
            CallEntry(
                order,
                step.name,
                step.path,
                call_name(tags[step.path], step.number),
                None if caller is None else caller.name,
                step.layer_id,
            )
            for order, (step, caller) in enumerate(steps)
            if isinstance(step, ModuleCall)
        ),
        tuple(
            OperationEntry(order, step.name, caller.name, call_name(tags[caller.path], caller.number))
            for order, (step, caller) in enumerate(steps)
            if isinstance(step, Op) and caller is not None
        ),
    )


def _list_steps(
    call: ModuleCall, caller: ModuleCall | None, steps: list[tuple[ModuleCall | Op, ModuleCall | None]]
) -> None:
    """Calls, and the operations between them that do something; what a layer does inside is the layer."""
    for item in call.items:
        if isinstance(item, ModuleCall):
            steps.append((item, caller))
            _list_steps(item, item, steps)
        elif caller is not None and caller.layer_id is None and item.kind is not Kind.FORM:
            steps.append((item, caller))
