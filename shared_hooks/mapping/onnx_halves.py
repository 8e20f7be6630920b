"""Head and tail of a cut as ONNX graphs of their own: the whole graph, taken apart where the cut is.

Nodes are in the order in which they ran and know how many layers were done by then, so the cut after layer k separates
the nodes with at most k layers done from the rest. What the head makes of the inputs and the tail reads, or is part of
the output, crosses under its name in the whole graph; inputs that the tail reads late are inputs of the tail, too. What
does not depend on the inputs is in both and does not cross.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shared_hooks.errors import CutRefused
from shared_hooks.mapping.onnx_tags import CALL, DONE, RULE, TAG, NodeTag

if TYPE_CHECKING:
    import onnx_ir

HALF: Final = "isthmus.half"
CUT: Final = "isthmus.cut"


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor that the head gives and the tail takes, by the name that it has in both files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Halves:
    """``late``: inputs of the model that the tail takes, too."""

    head: onnx_ir.Model
    tail: onnx_ir.Model
    crossing: tuple[CrossingTensor, ...]
    late: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For the sidecars."""
        return {
            "crossing": [{**vars(one), "shape": list(one.shape)} for one in self.crossing],
            "crossing_bytes": sum(one.nbytes for one in self.crossing),
            "late_inputs": list(self.late),
        }


def halve(model: onnx_ir.Model, layer_id: int, name: str, facts: Mapping[str, str]) -> Halves:
    """Cut a tagged graph after a layer. ``facts`` go into both files' metadata. Raises `CutRefused`."""
    from onnx_ir.convenience import extract

    graph = model.graph.clone()
    head = {node for node in graph if int(node.metadata_props[DONE]) <= layer_id}
    dependent = set(graph.inputs)
    read_early: set[onnx_ir.Value] = set()
    read_late: set[onnx_ir.Value] = set(graph.outputs)
    for node in graph:
        reads = _reads(node, graph)
        if dependent & reads:
            dependent.update(node.outputs)
        if node not in head:
            read_late |= reads
        else:
            read_early |= reads
    made = [value for node in graph if node in head for value in node.outputs if value in read_late & dependent]
    if not made:
        raise _refused(name, "nothing computed before it is read after it: the head would be empty")
    early = [value for value in graph.inputs if value in read_early]
    late = [value for value in graph.inputs if value in read_late]
    _let_pass(graph, made, layer_id)
    crossing = tuple(_described(value, name) for value in made)
    return Halves(
        _model_of(extract(graph, early, made), model, {**facts, HALF: "head", CUT: name}),
        _model_of(extract(graph, [*made, *late], list(graph.outputs)), model, {**facts, HALF: "tail", CUT: name}),
        crossing,
        tuple(value.name or "" for value in late),
    )


def tags_of_half(half: onnx_ir.Model, whole: Mapping[onnx_ir.Node, NodeTag]) -> dict[onnx_ir.Node, NodeTag]:
    """The tags of a half's nodes: what they bear, and the operation that the node of the same name has in the whole."""
    operations = {node.name: tag.operation for node, tag in whole.items()}
    found = {}
    for node in half.graph.all_nodes():
        props = node.metadata_props
        operation = operations.get(node.name, "")
        found[node] = NodeTag(props[CALL], props[TAG], props[RULE], int(props[DONE]), operation)
    return found


def _refused(name: str, reason: str) -> CutRefused:
    return CutRefused(f"cannot cut the ONNX graph after {name}: {reason}")


def _reads(node: onnx_ir.Node, graph: onnx_ir.Graph) -> set[onnx_ir.Value]:
    """What a node reads, with what its subgraphs take from this graph."""
    found = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        if attribute.type.name in ("GRAPH", "GRAPHS"):
            for inner in [attribute.value] if attribute.type.name == "GRAPH" else attribute.value:
                for deeper in inner.all_nodes():
                    found |= {value for value in deeper.inputs if value is not None and value.graph is graph}
    return found


def _described(value: onnx_ir.Value, cut: str) -> CrossingTensor:
    import onnx_ir

    if not isinstance(value.type, onnx_ir.TensorType) or value.shape is None or value.dtype is None:
        raise _refused(cut, f"{value.name} crosses, but is not a tensor of a known shape ({value.type})")
    shape = tuple(size for size in value.shape if isinstance(size, int))
    if len(shape) != len(value.shape):
        raise _refused(cut, f"{value.name} crosses, but its shape depends on the data ({value.shape})")
    nbytes = math.ceil(math.prod(shape) * value.dtype.bitwidth / 8)
    return CrossingTensor(value.name or "", str(value.dtype.numpy()), shape, nbytes)


def _let_pass(graph: onnx_ir.Graph, made: list[onnx_ir.Value], layer_id: int) -> None:
    """Parts of the output that the head makes cross under another name: the tail gives them their own."""
    import onnx_ir

    outputs = list(graph.outputs)
    for value in made:
        maker = value.producer()
        if value not in outputs or maker is None:
            continue
        name, value.name = value.name, f"{value.name}.crossing"
        node = onnx_ir.node("Identity", [value], name=f"node_{name}.passed")
        node.metadata_props.update({**maker.metadata_props, RULE: "operation", DONE: str(layer_id + 1)})
        given = node.outputs[0]
        given.name, given.type, given.shape = name, value.type, value.shape
        graph.append(node)
        outputs = [given if one is value else one for one in outputs]
    for place, value in enumerate(outputs):
        graph.outputs[place] = value


def _model_of(graph: onnx_ir.Graph, whole: onnx_ir.Model, facts: Mapping[str, str]) -> onnx_ir.Model:
    import onnx_ir

    return onnx_ir.Model(
        graph,
        ir_version=whole.ir_version,
        producer_name=whole.producer_name,
        producer_version=whole.producer_version,
        functions=list(whole.functions.values()),
        metadata_props=dict(facts),
    )
