"""Graphs in the types that onnxruntime has kernels for.

It computes hardly anything in bfloat16 and not everything in float64, and no operator takes whole numbers of two types,
which torch's exporter writes now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import onnx_ir

ALIKE: Final = frozenset("Max Min Add Sub Mul Div Mod Sum Concat Equal Less LessOrEqual Greater GreaterOrEqual".split())
"""Operators whose inputs are all of one type."""


def in_one_type(model: onnx_ir.Model) -> None:
    """Make int64 of int32 where an operator takes one of them and is given both."""
    from onnx_ir import DataType

    for node in list(model.graph.all_nodes()):
        if node.op_type in ALIKE and {one.dtype for one in node.inputs if one} == {DataType.INT32, DataType.INT64}:
            for at, value in enumerate(node.inputs):
                if value is not None and value.dtype == DataType.INT32:
                    cast = _cast(value, DataType.INT64, f"{value.name}.for.{node.name}")
                    _graph_of(node).insert_before(node, cast)
                    node.replace_input_with(at, cast.outputs[0])


def in_float32(model: onnx_ir.Model, kind: onnx_ir.DataType) -> bool:
    """Compute in float32 what was bfloat16 or float64 (``kind``); whether there was any.

    What an operator gives is rounded to bfloat16, so that answers stay near to torch's. Inputs and outputs of the graph
    keep their types.
    """
    from onnx_ir import DataType, TensorType

    graph, single = model.graph, DataType.FLOAT
    values = [value for node in graph.all_nodes() for value in node.outputs if value.dtype == kind]
    inputs = [value for value in graph.inputs if value.dtype == kind]
    weights = [value for value in graph.initializers.values() if value.dtype == kind and value.const_value is not None]
    for node in graph.all_nodes():
        _retype_attributes(node, kind)
    for value in weights:
        assert value.const_value is not None
        value.const_value, value.type = _single(value.const_value), TensorType(single)
    for value in inputs:
        cast = _cast(value, single, f"{value.name}.single")
        _replace(value, cast.outputs[0])
        graph.insert_before(graph[0], cast)
    for value in values:
        maker = value.producer()
        assert maker is not None
        value.type = TensorType(single)  # setting its dtype would be setting that of the graph's clones
        there = [at for at, one in enumerate(graph.outputs) if one is value]
        if not there and kind != DataType.BFLOAT16:
            continue
        narrow = _cast(value, kind, f"{value.name}.{kind.name.lower()}")
        wide = _cast(narrow.outputs[0], single, f"{value.name}.single")
        if kind == DataType.BFLOAT16:
            _replace(value, wide.outputs[0], keep=narrow)
        _graph_of(maker).insert_after(maker, [narrow, wide])
        for at in there:
            graph.outputs[at] = narrow.outputs[0]
            narrow.outputs[0].name, value.name = value.name, f"{value.name}.single.own"
    return bool(values or inputs or weights)


def _retype_attributes(node: onnx_ir.Node, kind: onnx_ir.DataType) -> None:
    """Types that a node names, and constants that it holds."""
    import onnx_ir

    for name in ("to", "dtype"):
        known = node.attributes.get(name)
        if known is not None and known.type == onnx_ir.AttributeType.INT and known.as_int() == kind:
            node.attributes[name] = onnx_ir.AttrInt64(name, int(onnx_ir.DataType.FLOAT))
    for name, held in list(node.attributes.items()):
        if held.type == onnx_ir.AttributeType.TENSOR and held.as_tensor().dtype == kind:
            node.attributes[name] = onnx_ir.AttrTensor(name, _single(held.as_tensor()))


def _single(tensor: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
    import onnx_ir

    return onnx_ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _cast(value: onnx_ir.Value, to: onnx_ir.DataType, name: str) -> onnx_ir.Node:
    import onnx_ir

    node = onnx_ir.node("Cast", [value], {"to": int(to)}, name=name)
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = onnx_ir.TensorType(to), value.shape
    return node


def _replace(value: onnx_ir.Value, other: onnx_ir.Value, keep: onnx_ir.Node | None = None) -> None:
    """Let all that read ``value`` read the other, but for ``keep`` and the other's maker."""
    for use in list(value.uses()):
        if use.node is not keep and use.node is not other.producer():
            use.node.replace_input_with(use.idx, other)


def _graph_of(node: onnx_ir.Node) -> onnx_ir.Graph | onnx_ir.Function:
    found = node.graph
    assert found is not None
    return found
