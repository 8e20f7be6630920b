"""Tags on the nodes of an ONNX graph, and the sidecar that lists them. No node is left without.

By four rules, in this order: ``scope``, the label of the call that was running when the node was traced; ``parent``,
where the map does not know that call, the nearest module above that it knows; ``operation``, for a node that the
exporter made of others, the innermost call that holds all nodes that read it, else all that it reads; ``root``, the
model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shared_hooks.errors import SpecError
from shared_hooks.mapping.joined import HierarchyMap
from shared_hooks.mapping.onnx_export import Label
from shared_hooks.mapping.tags import parent_of
from shared_hooks.modules import ROOT

if TYPE_CHECKING:
    import onnx_ir

FORMAT: Final = "isthmus-onnx-tags"
VERSION: Final = 1
RULES: Final = ("scope", "parent", "operation", "root")
TAG, CALL, RULE, DONE = "isthmus.tag", "isthmus.call", "isthmus.rule", "isthmus.layers_done"
"""Keys of a node's ``metadata_props``."""
LARGE: Final = 1 << 30
"""Bytes of weights above which they lie beside the file: it may hold 2 GiB."""


@dataclass(frozen=True)
class NodeTag:
    """Where a node comes from, and by which rule. ``done``: how many layers were done before it ran."""

    call: str
    tag: str
    rule: str
    done: int
    operation: str = ""


def tag_nodes(
    model: onnx_ir.Model, labels: Mapping[onnx_ir.Node, Label], known: HierarchyMap
) -> dict[onnx_ir.Node, NodeTag]:
    """A tag for every node of the graph and its subgraphs; written into the nodes' metadata, too."""
    nodes = list(model.graph.all_nodes())
    calls: dict[onnx_ir.Node, str] = {}
    rules: dict[onnx_ir.Node, str] = {}
    for node in nodes:
        label = labels.get(node)
        if label is None:
            continue
        if label.call in known.by_call:
            calls[node], rules[node] = label.call, "scope"
        elif (above := _known_above(label.call, known)) is not None:
            calls[node], rules[node] = above, "parent"
    for node in reversed(nodes):
        if node not in calls and (readers := [calls[user] for user in _readers(node) if user in calls]):
            calls[node], rules[node] = _common(readers, known), "operation"
    for node in nodes:
        if node not in calls and (read := [calls[maker] for maker in _makers(node) if maker in calls]):
            calls[node], rules[node] = _common(read, known), "operation"
    root = ROOT if ROOT in known.by_call else known.calls[0].name
    found: dict[onnx_ir.Node, NodeTag] = {}
    done = 0
    for node in nodes:
        label, call = labels.get(node), calls.get(node, root)
        if label is not None:  # nodes are in the order in which they ran; a view made again bears its first label
            done = max(done, label.done)
        tag = NodeTag(
            call, known.by_call[call].tag, rules.get(node, "root"), done, "" if label is None else label.operation
        )
        node.metadata_props.update({TAG: tag.tag, CALL: tag.call, RULE: tag.rule, DONE: str(tag.done)})
        found[node] = tag
    return found


def _known_above(call: str, known: HierarchyMap) -> str | None:
    path: str | None = call.partition("#")[0]
    while path is not None:
        if path in known.by_call and path != ROOT:
            return path
        path = parent_of(path)
    return None


def _common(calls: Iterable[str], known: HierarchyMap) -> str:
    """The innermost call that was running in all of them."""
    chains = [[entry.name for entry in known.chain(call)] for call in set(calls)]
    shared = ""
    for names in zip(*chains, strict=False):
        if len(set(names)) > 1:
            break
        shared = names[0]
    return shared


def _readers(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    return [usage.node for value in node.outputs for usage in value.uses()]


def _makers(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    makers = [value.producer() for value in node.inputs if value is not None]
    return [maker for maker in makers if maker is not None]


def sidecar_path(path: str | Path) -> Path:
    """``digits.onnx`` -> ``digits.onnx.json``."""
    return Path(f"{path}.json")


def sidecar(
    model: onnx_ir.Model, tags: Mapping[onnx_ir.Node, NodeTag], known: HierarchyMap, **more: Any
) -> dict[str, Any]:
    """The sidecar of one ONNX file: its nodes in order, how many tags came by which rule, and calls without a node."""
    rules = Counter(tag.rule for tag in tags.values())
    seen = {entry.name for tag in tags.values() for entry in known.chain(tag.call)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": known.model,
        "plan_digest": known.plan_digest,
        **more,
        "inputs": [value.name for value in model.graph.inputs],
        "outputs": [value.name for value in model.graph.outputs],
        "rules": {rule: rules.get(rule, 0) for rule in RULES},
        "calls_without_node": [entry.name for entry in known.calls if entry.name not in seen],
        "nodes": [
            {
                "name": node.name,
                "op_type": node.op_type,
                "tag": tag.tag,
                "call": tag.call,
                "rule": tag.rule,
                "operation": tag.operation,
            }
            for node, tag in tags.items()
        ],
    }


def write(model: onnx_ir.Model, side: Mapping[str, Any], path: str | Path) -> None:
    """The ONNX file (many weights beside it, in FILE.data) and its sidecar. Raises SpecError."""
    import onnx_ir

    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    try:
        onnx_ir.save(model, path, external_data=f"{Path(path).name}.data" if weights > LARGE else None)
        sidecar_path(path).write_text(json.dumps(side, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror or error}") from error
