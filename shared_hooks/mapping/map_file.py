"""Make the hierarchy map, and write it as JSON and GraphML. docs/tables.md describes both."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.forward import CallKind
from shared_hooks.modules import ROOT, ModuleInfo, Shim, call_name, tables
from shared_hooks.planning import Plan
from shared_hooks.recording import ModuleCall, Op

# Tags: the position of a module, by the names of classes, such as
# ``/BertModel/BertEncoder/BertLayer.0/BertAttention``.
#
# No library is treated specially here. A class name alone is enough where no sibling has the same; an index or a name
# follows it where it is an entry of a list or has siblings of its class. Modules that only hold others and cannot be
# called (``ModuleList``, ``ModuleDict``) have a tag of their own, but are no part of other tags.


def is_holder(module: nn.Module) -> bool:
    """Return whether the module is only a container: it has no forward."""
    own = vars(module).get("forward")
    if isinstance(own, Shim):
        own = own.forward
    of_class = inspect.getattr_static(type(module), "forward")  # scripted modules create theirs on access
    return of_class is nn.Module.forward and getattr(own, "__func__", own) in (None, nn.Module.forward)


def parent_of(path: str) -> str | None:
    """Return the parent's path; None for the model itself."""
    return None if path == ROOT else path.rpartition(".")[0] or ROOT


def tags_of(modules: Mapping[nn.Module, ModuleInfo]) -> dict[str, str]:
    """Return the unique tag of every module of `tables.walk`, by path."""
    holders = {info.path for module, info in modules.items() if is_holder(module)} - {ROOT}
    types = {info.path: info.module_type for info in modules.values()}
    families: dict[str, list[str]] = defaultdict(list)
    for path in types:
        if path != ROOT:
            families[_stands_in(path, holders)].append(path)
    found = {ROOT: f"/{types[ROOT]}"} if ROOT in types else {}
    for path in types:  # parents come before their children
        for child, label in _labels(path, families.get(path, ()), types).items():
            found[child] = f"{found[path]}/{label}"
    return found


def _stands_in(path: str, holders: set[str]) -> str:
    """Return the nearest parent that is no container."""
    above = parent_of(path) or ROOT
    while above in holders:
        above = parent_of(above) or ROOT
    return above


def _labels(parent: str, children: list[str] | tuple[()], types: Mapping[str, str]) -> dict[str, str]:
    same_class = Counter(types[child] for child in children)
    short: dict[str, str] = {}
    for child in children:
        key = child.rpartition(".")[2]
        alone = same_class[types[child]] == 1 and not key.isdecimal()
        short[child] = types[child] if alone else f"{types[child]}.{_quoted(key)}"
    taken = Counter(short.values())
    start = 0 if parent == ROOT else len(parent) + 1
    return {
        child: label if taken[label] == 1 else f"{types[child]}.{_quoted(child[start:])}"
        for child, label in short.items()
    }


def _quoted(key: str) -> str:
    """Quote a module's name: a slash in it would look like another level."""
    return key.replace("%", "%25").replace("/", "%2F")


# The hierarchy map: the static module tree and the dynamic order of calls and operations, joined.


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
    """One call of a module. ``order`` numbers calls and operations of the forward by their start; ``parent`` is the
    calling call; ``layer_id`` is its number if it is a layer, a call that calls no other module.
    """

    order: int
    name: str
    path: str
    tag: str
    parent: str | None
    layer_id: int | None


@dataclass(frozen=True)
class OperationEntry:
    """One functional operation in a module's code, outside of its submodules: ``x + residual``."""

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
        """All tags that nodes may have: of modules and of calls."""
        return frozenset({entry.tag for entry in self.modules} | {entry.tag for entry in self.calls})

    def chain(self, call: str) -> list[CallEntry]:
        """Return the stack of calls during a call, the model's own first, this one last."""
        found: list[CallEntry] = []
        entry = self.by_call.get(call)
        while entry is not None:
            found.append(entry)
            entry = None if entry.parent is None else self.by_call.get(entry.parent)
        return found[::-1]


def map_of(model: nn.Module, plan: Plan, model_id: str = "") -> HierarchyMap:
    """Return the map of a model and one of its plans, with modules down to the plan's depth."""
    modules = tables.walk(model, plan.depth)
    tags = tags_of(modules)
    further: dict[str, list[str]] = {}
    for name, first in tables.aliases(model).items():
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
    _list_steps(plan.trace.root, None, steps)  # the root stands for the caller of the model
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
    """Append calls, and the effective operations between them; operations in a layer are part of it."""
    for item in call.items:
        if isinstance(item, ModuleCall):
            steps.append((item, caller))
            _list_steps(item, item, steps)
        elif caller is not None and caller.layer_id is None and item.kind is not CallKind.FORM:
            steps.append((item, caller))


# The modules common to the static tree and the dynamic run, and those in only one of them.


@dataclass(frozen=True)
class Coverage:
    """Coverage of modules. ``both``: modules that ran. ``unused``, ``holders``: static only; modules that never ran
    (unused, or only their parameters are read), and containers. ``functional``: dynamic only; operations between
    modules, by name and count. ``repeated``: modules that ran several times. ``from_elsewhere``: calls made while the
    module's parent was not running, where tags and the order of calls differ.
    """

    modules: int
    both: tuple[str, ...]
    unused: tuple[str, ...]
    holders: tuple[str, ...]
    functional: Mapping[str, int]
    repeated: Mapping[str, int]
    from_elsewhere: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "modules": self.modules,
            "both": len(self.both),
            "only_static": {"unused": list(self.unused), "holders": list(self.holders)},
            "only_dynamic": {"operations": sum(self.functional.values()), "by_name": dict(self.functional)},
            "repeated_calls": dict(self.repeated),
            "parents_before_children": not self.from_elsewhere,
            "called_from_elsewhere": list(self.from_elsewhere),
        }


def coverage_of(known: HierarchyMap) -> Coverage:
    """Return the report on a map."""
    silent = [entry for entry in known.modules if not entry.calls]
    functional = Counter(entry.name for entry in known.operations)
    return Coverage(
        len(known.modules),
        tuple(entry.path for entry in known.modules if entry.calls),
        tuple(entry.path for entry in silent if not entry.holder),
        tuple(entry.path for entry in silent if entry.holder),
        dict(functional.most_common()),
        {entry.path: entry.calls for entry in known.modules if entry.calls > 1},
        tuple(entry.name for entry in known.calls if not _holder_runs(known, entry.name)),
    )


def _holder_runs(known: HierarchyMap, call: str) -> bool:
    """Return whether the nearest callable parent is running during the call."""
    entry = known.by_call[call]
    above = known.by_path[entry.path].parent
    while above is not None and not known.by_path[above].calls and known.by_path[above].holder:
        above = known.by_path[above].parent
    return above is None or any(running.path == above for running in known.chain(call)[:-1])


FORMAT: Final = "isthmus-hierarchy"
VERSION: Final = 1


def to_json(known: HierarchyMap) -> dict[str, Any]:
    """Return JSON data: modules, calls, operations and the coverage report."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": known.model,
        "plan_digest": known.plan_digest,
        "modules": [{**asdict(entry), "names": list(entry.names)} for entry in known.modules],
        "calls": [asdict(entry) for entry in known.calls],
        "operations": [asdict(entry) for entry in known.operations],
        "coverage": coverage_of(known).as_dict(),
    }


def write_graphml(known: HierarchyMap, path: str) -> None:
    """Write modules, calls and operations as nodes (``kind``), with the edges ``holds`` (module to module), ``runs``
    (module to its call), ``makes`` (call to call or operation) and ``then`` (what started next). Raises SpecError.
    """
    import networkx  # installed with torch

    graph = networkx.DiGraph(model=known.model)
    for module in known.modules:
        facts = {key: value for key, value in asdict(module).items() if key != "names" and value is not None}
        graph.add_node(f"module:{module.path}", kind="module", **facts)
        if module.parent is not None:
            graph.add_edge(f"module:{module.parent}", f"module:{module.path}", kind="holds")
    steps: dict[int, str] = {}
    for call in known.calls:
        facts = {key: value for key, value in asdict(call).items() if value is not None}
        steps[call.order] = f"call:{call.name}"
        graph.add_node(steps[call.order], kind="call", **facts)
        graph.add_edge(f"module:{call.path}", steps[call.order], kind="runs")
        if call.parent is not None:
            graph.add_edge(f"call:{call.parent}", steps[call.order], kind="makes")
    for operation in known.operations:
        steps[operation.order] = f"operation:{operation.order}"
        graph.add_node(steps[operation.order], kind="operation", **asdict(operation))
        graph.add_edge(f"call:{operation.call}", steps[operation.order], kind="makes")
    ran = [steps[order] for order in sorted(steps)]
    for before, after in itertools.pairwise(ran):
        if not graph.has_edge(before, after):
            graph.add_edge(before, after, kind="then")
    try:
        networkx.write_graphml(graph, path)
    except OSError as error:
        raise SpecError(f"graphml: {path} cannot be written: {error.strerror}") from error
