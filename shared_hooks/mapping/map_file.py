"""The hierarchy map as JSON and as GraphML. docs/hierarchy.md describes both."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from shared_hooks.errors import SpecError
from shared_hooks.mapping.joined import HierarchyMap

# What the static tree and the dynamic run have in common, and what only one of them has.


@dataclass(frozen=True)
class Coverage:
    """``both``: modules that ran. ``unused``, ``holders``: only static; modules that never ran (unused, or only their
    parameters are read), and those that cannot run. ``functional``: only dynamic; operations between modules, how many
    of each name. ``repeated``: modules that ran several times. ``from_elsewhere``: calls made while the module that
    holds the called one was not running, which is where tags and the order of calls part.
    """

    modules: int
    both: tuple[str, ...]
    unused: tuple[str, ...]
    holders: tuple[str, ...]
    functional: Mapping[str, int]
    repeated: Mapping[str, int]
    from_elsewhere: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """The report on a map."""
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
    """Whether the nearest module above that can be called is among the calls that are running."""
    entry = known.by_call[call]
    above = known.by_path[entry.path].parent
    while above is not None and not known.by_path[above].calls and known.by_path[above].holder:
        above = known.by_path[above].parent
    return above is None or any(running.path == above for running in known.chain(call)[:-1])


FORMAT: Final = "isthmus-hierarchy"
VERSION: Final = 1


def to_json(known: HierarchyMap) -> dict[str, Any]:
    """JSON-able: modules, calls, operations and the coverage report."""
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
    """Modules, calls and operations as nodes (``kind``); edges ``holds`` (module to module), ``runs`` (module to its
    call), ``makes`` (call to call or operation) and ``then`` (what began next). Raises SpecError.
    """
    import networkx  # torch brings it

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
