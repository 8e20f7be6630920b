"""Split a model's ONNX graph at a cut into one graph each for head and tail.

Nodes are in the order in which they ran and record how many layers were finished by then, so the cut after layer k
separates the nodes with at most k finished layers from the rest. A block's end also includes nodes with one layer more
that ran in the block's call: its own code after its last layer. Values that the head computes from the inputs and the
tail reads, or that are outputs, cross under their names in the whole graph; inputs that the tail reads late are inputs
of the tail, too. What does not depend on the inputs is in both and does not cross.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.forward import run_plain
from shared_hooks.mapping.map_file import HierarchyMap
from shared_hooks.mapping.onnx_export import CALL, DONE, RULE, RULES, TAG, NodeTag, outputs_of, sidecar_path
from shared_hooks.tensors import Buffers, copied

if TYPE_CHECKING:
    import onnx
    import onnx_ir

    from shared_hooks.planning import LayerInfo


HALF: Final = "isthmus.half"
CUT: Final = "isthmus.cut"


@dataclass(frozen=True)
class CrossingTensor:
    """One tensor that the head returns and the tail takes, with its name in both files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Halves:
    """The two graphs. ``late``: inputs of the model that the tail takes, too."""

    head: onnx_ir.Model
    tail: onnx_ir.Model
    crossing: tuple[CrossingTensor, ...]
    late: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data for the sidecars."""
        return {
            "crossing": [{**vars(one), "shape": list(one.shape)} for one in self.crossing],
            "crossing_bytes": sum(one.nbytes for one in self.crossing),
            "late_inputs": list(self.late),
        }


def halve(model: onnx_ir.Model, at: LayerInfo, known: HierarchyMap, facts: Mapping[str, str]) -> Halves:
    """Cut a tagged graph after a layer or a block. ``facts`` go into both files' metadata. Raises `CutRefused`."""
    from onnx_ir.convenience import extract

    graph = model.graph.clone()
    head, name = _head(graph, at, known), at.name
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
    _let_pass(graph, made, at.layer_id)
    crossing = tuple(_described(value, name) for value in made)
    return Halves(
        _model_of(extract(graph, early, made), model, {**facts, HALF: "head", CUT: name}),
        _model_of(extract(graph, [*made, *late], list(graph.outputs)), model, {**facts, HALF: "tail", CUT: name}),
        crossing,
        tuple(value.name or "" for value in late),
    )


def _head(graph: onnx_ir.Graph, at: LayerInfo, known: HierarchyMap) -> set[onnx_ir.Node]:
    """Return the nodes before a cut. After a block's last layer: those of its call, and what they read."""
    nodes = list(graph)
    head = {node for node in nodes if int(node.metadata_props[DONE]) <= at.layer_id}
    if not at.is_block:
        return head
    behind = [node for node in nodes if int(node.metadata_props[DONE]) == at.layer_id + 1]
    for node in reversed(behind):
        inside = any(entry.name == at.name for entry in known.chain(node.metadata_props[CALL]))
        if inside or any(user in head for value in node.outputs for user in value.consumers()):
            head.add(node)
    return head


def tags_of_half(half: onnx_ir.Model, whole: Mapping[onnx_ir.Node, NodeTag]) -> dict[onnx_ir.Node, NodeTag]:
    """Return the tags of a half's nodes: their own, and the operation of the node of the same name in the whole."""
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
    """Return what a node reads, including what its subgraphs take from this graph."""
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
    """Rename outputs that the head computes where they cross, so that the tail can return them under their own
    names.
    """
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


# Reads the written files again: well formed, every node tagged, tags known, and the same numbers as torch's.


TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 8e-2,
}
"""Largest difference allowed, in units of the expected tensor's largest magnitude, or of 1 if that is less."""


@dataclass(frozen=True)
class HalvesCheck:
    """One check, in words, and its result."""

    what: str
    ok: bool
    found: str

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"what": self.what, "ok": self.ok, "found": self.found}


def expected(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of the model's own output in torch, in the order of the graph's outputs."""
    buffers = Buffers(model)
    args, named = copied(args, dict(kwargs))
    try:
        return outputs_of(run_plain(model, args, named))[1]
    finally:
        buffers.restore()


def check_file(path: str | Path, known: HierarchyMap) -> list[HalvesCheck]:
    """Check that a file is well formed, that every node has a tag of the map, and that the sidecar agrees. Raises
    nothing.
    """
    import onnx

    try:
        read = onnx.load(str(path))
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # a damaged file may make the readers raise anything
        return [HalvesCheck("well formed", False, f"{type(error).__name__}: {_line(error)}")]
    nodes = _nodes(read.graph)
    props = [{entry.key: entry.value for entry in node.metadata_props} for node in nodes]
    untagged = [node.name or node.op_type for node, own in zip(nodes, props, strict=True) if not own.get(TAG)]
    unknown = sorted({own[TAG] for own in props if own.get(TAG) and own[TAG] not in known.tags})
    wrong = [
        node.name
        for node, own in zip(nodes, props, strict=True)
        if own.get(CALL) not in known.by_call
        or known.by_call[own[CALL]].tag != own.get(TAG)
        or own.get(RULE) not in RULES
    ]
    return [
        HalvesCheck("well formed", True, f"onnx.checker, {len(nodes)} nodes"),
        HalvesCheck("every node tagged", not untagged, _some(untagged, f"{len(nodes)} of {len(nodes)}")),
        HalvesCheck("tags in the map", not unknown and not wrong, _some(unknown or wrong, f"{len(nodes)} nodes")),
        _check_sidecar(path, nodes, props),
    ]


def check_run(path: str | Path, tensors: Mapping[str, torch.Tensor], wanted: Sequence[torch.Tensor]) -> HalvesCheck:
    """Compare the file in onnxruntime, on the CPU, with torch."""
    try:
        return _compared("runs, as torch", list(run(path, tensors).values()), wanted)
    except Exception as error:
        return HalvesCheck("runs, as torch", False, f"{type(error).__name__}: {_line(error)}")


def check_chain(
    head: str | Path,
    tail: str | Path,
    whole: str | Path,
    tensors: Mapping[str, torch.Tensor],
    wanted: Sequence[torch.Tensor],
) -> list[HalvesCheck]:
    """Compare head then tail, in onnxruntime, with the whole file there and with torch."""
    try:
        given = run(tail, {**tensors, **run(head, tensors)})
        there = run(whole, tensors)
        same_names = list(given) == list(there)
        return [
            HalvesCheck("outputs of the tail", same_names, ", ".join(given)),
            _compared("head and tail, as the whole file", list(given.values()), list(there.values())),
            _compared("head and tail, as torch", list(given.values()), wanted),
        ]
    except Exception as error:
        return [HalvesCheck("head and tail", False, f"{type(error).__name__}: {_line(error)}")]


def run(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run an ONNX file in onnxruntime, on the CPU, with those of ``tensors`` that it takes. Returns outputs by name."""
    return run_in(opened(path), tensors)


def opened(path: str | Path) -> Any:
    """Open a session of onnxruntime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # failures are raised
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_in(session: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a session, with those of ``tensors`` that it takes. Returns outputs by name."""
    feeds = {one.name: tensors[one.name].detach().cpu().contiguous().numpy() for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return {name: torch.from_numpy(array) for name, array in zip(names, session.run(names, feeds), strict=True)}


def _compared(what: str, given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> HalvesCheck:
    if len(given) != len(wanted):
        return HalvesCheck(what, False, f"{len(given)} outputs, where {len(wanted)} were expected")
    worst, ok = 0.0, True
    for number, (mine, other) in enumerate(zip(given, wanted, strict=True)):
        other = other.detach().cpu()
        if mine.shape != other.shape or mine.dtype != other.dtype:
            is_, was = f"{mine.dtype} {list(mine.shape)}", f"{other.dtype} {list(other.shape)}"
            return HalvesCheck(what, False, f"output {number} is {is_}, where {was} was expected")
        if not other.numel():
            continue
        allowed = TOLERANCES.get(other.dtype, 0.0)
        if not allowed:
            ok = ok and torch.equal(mine, other)
            worst = max(worst, float(not torch.equal(mine, other)))
            continue
        kind = torch.complex128 if other.is_complex() else torch.float64
        mine, other = mine.to(kind), other.to(kind)
        same = (mine == other) | (mine.isnan() & other.isnan())
        difference = torch.where(same, torch.zeros_like(mine), mine - other).abs().max().item()
        finite = other[other.isfinite()].abs()
        scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
        ok = ok and difference <= allowed * scale  # false for NaN
        worst = max(worst, difference) if difference == difference else difference
    return HalvesCheck(what, ok, f"{len(wanted)} outputs, largest difference {worst:.3g}")


def _check_sidecar(
    path: str | Path, nodes: Sequence[onnx.NodeProto], props: Sequence[Mapping[str, str]]
) -> HalvesCheck:
    what = "sidecar"
    try:
        side = json.loads(sidecar_path(path).read_text(encoding="utf-8"))
        listed = [(one["name"], one["tag"]) for one in side["nodes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return HalvesCheck(what, False, f"{sidecar_path(path).name}: {type(error).__name__}: {_line(error)}")
    there = [(node.name, own.get(TAG, "")) for node, own in zip(nodes, props, strict=True)]
    return HalvesCheck(what, sorted(listed) == sorted(there), f"{len(listed)} nodes listed, {len(there)} in the file")


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return every node, those of subgraphs after the one that contains them."""
    found: list[onnx.NodeProto] = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found += _nodes(inner)
    return found


def _some(names: Sequence[str], otherwise: str) -> str:
    return f"{len(names)}: {', '.join(names[:5])}" if names else otherwise


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
