"""The hierarchy map as JSON and as GraphML. docs/hierarchy.md describes both."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any, Final

from shared_hooks.errors import SpecError
from shared_hooks.mapping.coverage import coverage_of
from shared_hooks.mapping.joined import HierarchyMap

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
