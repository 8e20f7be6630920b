"""Heads as ONNX graphs: each from the tape of a run that stopped at its cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from shared_hooks.crossing import EarlyOutput, NamedCrossing, NamedNumbers, NamedTensor, as_sent
from shared_hooks.errors import CutRefused, IsthmusError
from shared_hooks.forward import is_escape
from shared_hooks.mapping.onnx_export import ExportFailed, Free, converted
from shared_hooks.mapping.tape import Make, Tape, TapeReplay, WantedTensor, chosen_again, compiled_again, read_again
from shared_hooks.mapping.tape import of_any_size as any_size
from shared_hooks.planning import Plan, Size
from shared_hooks.recording.trace import Op

if TYPE_CHECKING:
    import onnx_ir

    from shared_hooks.planning.cutting import Cutting


@dataclass(frozen=True)
class TapedHead:
    """A head that has run. ``wanted``: how to get each of ``named`` from its tape. ``of_weights``: steps of it that
    hang on weights alone. ``sizes``: inputs and their axes that the tape moves with, of a kind each.
    """

    cut: str
    named: NamedCrossing
    tape: Tape
    wanted: tuple[WantedTensor, ...]
    of_weights: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def has_strangers(self) -> bool:
        """Whether it takes tensors that are no inputs, nor the model's, nor made by a torch function that was seen."""
        return bool(self.tape.strangers)


def of_any_size(
    heads: Sequence[TapedHead], sizes: Sequence[Size], places: tuple[tuple[int, int], ...]
) -> TapedHead | None:
    """Return one head of several of one cut, whose inputs differ in a size, or in a batch and a length
    (`TapedHead.sizes` are these ``places``); None where they differ in more.
    """
    kinds = {tuple((one.at, one.numbers) for one in head.wanted) for head in heads}
    if len(kinds) > 1:
        return None
    wanted = []
    for alike in zip(*(head.wanted for head in heads), strict=True):
        picks = [one.picks or () for one in alike]
        shared = next((own[0] for own in zip(*picks, strict=False) if all(pick == own[0] for pick in own)), None)
        if shared is None:
            return None
        wanted.append(alike[-1] if shared is ... else replace(alike[-1], make=_picking(shared)))
    tape = any_size([head.tape for head in heads], sizes)
    return None if tape is None else replace(heads[-1], tape=tape, wanted=tuple(wanted), sizes=places)


def tape_head(
    model: nn.Module,
    plan: Plan,
    cut: str,
    named: NamedCrossing,
    inputs: Sequence[torch.Tensor],
    run: Callable[[], EarlyOutput],
) -> TapedHead:
    """Listen while ``run`` runs the head on ``inputs``. Raises CutRefused, and what heads raise."""
    tape = Tape(model, inputs)
    with torch.no_grad(), tape.listening():
        early = run()
    places = _Places(plan, plan.cutting(cut)[0], tape)
    of_weights = tuple(at for at in tape.of_weights() if at < places.end)
    try:
        wanted = [_tensor(tape, places.end, early, one) for one in named.tensors]
        for one, value in zip(named.reads, early.values, strict=True):
            wanted.append(read_again(tape, places.of(one), one.shape, one.numbers_of(value), one.truth))
        for one in named.counts:
            of_module = one.place.index < 0
            wanted.append(compiled_again(tape, one.count or 0) if of_module else chosen_again(tape, places.of(one)))
    finally:
        tape.forget()
    del tape.steps[places.end :]
    return TapedHead(cut, named, tape, tuple(wanted), of_weights)


class _Places:
    """Which step of a tape is which operation of the plan. ``end``: how many there are before the cut."""

    def __init__(self, plan: Plan, cutting: Cutting, tape: Tape) -> None:
        self._trace = plan.trace
        ops = [op for op in plan.trace.ops if op.seq < cutting.position and not is_escape(op.name)]
        self._number = {op: number for number, op in enumerate(ops)}
        self._steps = [at for at, step in enumerate(tape.steps) if not step.below]
        if [tape.steps[at].name for at in self._steps[: len(ops)]] != [op.name for op in ops]:
            raise CutRefused("its head ran functions that are not in the plan, so it has no graph")
        rest = self._steps[len(ops) :]
        self.end = rest[0] if rest else len(tape.steps)

    def of(self, numbers: NamedNumbers) -> int:
        """Return the step at whose place they are read or given."""
        for call, number, item in self._trace.placed:
            if isinstance(item, Op) and item.counts and (call.path, call.number, number) == tuple(numbers.place):
                return self._steps[self._number[item]]
        raise CutRefused(f"{numbers.name} is read where torch functions are not seen")


def _tensor(tape: Tape, end: int, early: EarlyOutput, one: NamedTensor) -> WantedTensor:
    """Return the tensor of the tape that is this one, or that it is a part of: on the memory of its piece."""
    piece = early.pieces[one.piece]
    copies = [step for step in tape.around if "clone" in step.name and tape.tensors[step.results[0]] is piece]
    lying = tape.tensors[copies[0].given()[0]] if copies else piece  # a head copies tensors that others may write to
    known = {number for step in tape.steps[:end] for number in step.results}
    there = [
        at
        for at in sorted(known | {*range(len(tape.inputs)), *tape.constants}, reverse=True)
        if tape.tensors[at].layout is torch.strided
        and tape.tensors[at].dtype is one.held
        and tape.tensors[at].untyped_storage()._cdata == lying.untyped_storage()._cdata
    ]
    wanted = one.view_of(piece)
    form = lying if one.part else lying.as_strided(one.view.shape, one.view.stride, lying.storage_offset())
    for at in there:
        if _is_like(tape.tensors[at], form):
            return WantedTensor(end, (at,), _first, picks=(...,))
    for at in there:
        for picks in _picks(tape.tensors[at], form):
            if same_bytes(tape.tensors[at][picks[0]], wanted):
                return WantedTensor(end, (at,), _picking(picks[0]), picks)
    for numbers in (*((at,) for at in there), tuple(there)):
        tensors = [tape.tensors[at] for at in numbers]
        make = _gathering(tensors, form)
        if make is not None and same_bytes(make(tensors), wanted):
            return WantedTensor(end, numbers, make)
    raise CutRefused(f"{one.name} crosses as memory that no torch function was seen to make")


def _is_like(tensor: torch.Tensor, form: torch.Tensor) -> bool:
    """Return whether these are the same elements, in the same order."""
    mine, theirs = ((one.shape, one.stride(), one.storage_offset()) for one in (tensor, form))
    return mine == theirs


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _picking(pick: tuple[int | slice, ...]) -> Make:
    return lambda tensors: tensors[0][pick]


def _picks(tensor: torch.Tensor, form: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Return how to index a tensor to get a view of it, counted from the front and from the back; nothing where none
    does.
    """
    offset = int(form.storage_offset()) - int(tensor.storage_offset())
    left = list(zip(form.shape, form.stride(), strict=True))
    front: list[int | slice] = []
    back: list[int | slice] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if offset < 0 or not stride:
            return
        at, offset = divmod(offset, stride)
        if left and left[0][1] % stride == 0 and at + (left[0][0] - 1) * (step := left[0][1] // stride) < size and step:
            many = left.pop(0)[0]
            whole = (at, many, step) == (0, size, 1)
            stop = at + (many - 1) * step + 1
            front.append(slice(None) if whole else slice(at, stop, step))
            back.append(slice(None) if whole else slice(at - size, (stop - size) or None, step))
        elif at < size:
            front.append(at)
            back.append(at - size)
        else:
            return
    if not left and not offset:
        yield tuple(front), tuple(back)


def _gathering(tensors: Sequence[torch.Tensor], form: torch.Tensor) -> Make | None:
    """Return how to gather elements from several tensors on one memory; None where they have not all of them."""
    if not tensors or sum(tensor.numel() for tensor in tensors) + form.numel() > MOST_PLACES:
        return None
    theirs, wanted = torch.cat([_places(tensor) for tensor in tensors]), _places(form)
    if not len(theirs):
        return None
    order = torch.argsort(theirs)
    indices = order[torch.searchsorted(theirs[order], wanted).clamp(max=len(theirs) - 1)]
    if not torch.equal(theirs[indices], wanted):
        return None
    return lambda tensors: torch.cat([one.flatten() for one in tensors])[indices].reshape(form.shape)


MOST_PLACES: Final = 1 << 22
"""Elements of a tensor of which parts are picked."""


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return where the elements of a tensor lie in its storage, row-major."""
    found = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = (found[:, None] + stride * torch.arange(size)).flatten()
    return found


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shapes and bits are equal."""
    a, b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and torch.equal(a, b)


def graphs_of(
    heads: Sequence[TapedHead], inputs: Sequence[str], tensors: Sequence[torch.Tensor], moving: Free | None = None
) -> Iterator[tuple[TapedHead, onnx_ir.Model | IsthmusError]]:
    """Yield each head's graph on these inputs, or why there is none. Its outputs are what crosses, by name and in
    order.

    Heads of which one begins as the other are made together, and share their weights. ``moving``: axes of inputs whose
    size is any, for heads that have some.
    """
    call = _Call(inputs, tensors, moving or {})
    heads = sorted(heads, key=lambda one: len(one.tape.steps))
    while heads:
        last = heads[-1]
        together = [one for one in heads if one.tape.begins_like(last.tape)]
        yield from call.graphs(together)
        heads = [one for one in heads if one not in together]


@dataclass(frozen=True)
class _Call:
    inputs: Sequence[str]
    tensors: Sequence[torch.Tensor]
    moving: Free

    def graphs(self, heads: Sequence[TapedHead]) -> Iterator[tuple[TapedHead, onnx_ir.Model | IsthmusError]]:
        try:
            made = self._together(heads)
        except IsthmusError as error:
            if len(heads) == 1:
                yield self._with_weights_done(heads[0], error)
                return
            half = len(heads) // 2  # what cannot be exported comes after some cut: the cuts before it can be
            yield from self.graphs(heads[:half])
            yield from self.graphs(heads[half:])
            return
        yield from made

    def _with_weights_done(
        self, head: TapedHead, error: IsthmusError
    ) -> tuple[TapedHead, onnx_ir.Model | IsthmusError]:
        """Compute what depends on weights alone: the exporter may not support it. ``error`` if it fails."""
        try:
            return self._together([head], head.of_weights)[0] if head.of_weights else (head, error)
        except IsthmusError:
            return head, error

    def _together(self, heads: Sequence[TapedHead], done: Sequence[int] = ()) -> list[tuple[TapedHead, onnx_ir.Model]]:
        from onnx_ir import DataType
        from onnx_ir.convenience import extract

        wanted = [one for head in heads for one in head.wanted]
        names = [f"{number}:{one.name}" for number, head in enumerate(heads) for one in head.named]
        sizes = heads[-1].sizes
        free = self.moving if sizes else {}
        model = converted(
            TapeReplay(heads[-1].tape, wanted, sizes, done),
            [as_sent(one) for one in self.tensors],
            self.inputs,
            names,
            free,
        )
        in_one_type(model)
        in_float32(model, DataType.BFLOAT16)
        for at, axis in ((at, axis) for at, axes in free.items() for axis in axes):
            shape = model.graph.inputs[at].shape
            if shape is None or isinstance(shape[axis], int):
                raise ExportFailed(f"the exporter fixes axis {axis} of {self.inputs[at]}")
        found = []
        for number, head in enumerate(heads):
            half = model if len(heads) == 1 else model.clone()
            ours = [one for one in half.graph.outputs if (one.name or "").partition(":")[0] == str(number)]
            half.graph = extract(half.graph, list(half.graph.inputs), ours)
            rename(half.graph, list(half.graph.outputs), [one.name for one in head.named])
            found.append((head, half))
        return found


def rename(graph: onnx_ir.Graph, values: Sequence[onnx_ir.Value], names: Sequence[str]) -> None:
    """Give values these names; another value that has one of them gets another."""
    wanted = dict(zip(names, values, strict=True))
    for node in graph.all_nodes():
        for other in node.outputs:
            if other.name in wanted and wanted[other.name] is not other:
                other.name = f"{other.name}:inner"
    for value in graph.inputs:
        if value.name in wanted and wanted[value.name] is not value:
            value.name = f"{value.name}:inner"
    for name, value in wanted.items():
        value.name = name


# Graphs in the types that onnxruntime has kernels for. It supports hardly anything in bfloat16 and not everything in
# float64, and no operator takes integers of two types, which torch's exporter writes now and then.


SAME_TYPE: Final = frozenset(
    "Max Min Add Sub Mul Div Mod Sum Concat Equal Less LessOrEqual Greater GreaterOrEqual".split()
)
"""Operators whose inputs are all of one type."""
PASSING: Final = frozenset(
    "Max Min Add Sub Mul Div Mod Sum Concat Unsqueeze Squeeze Reshape Gather GatherElements GatherND Slice Identity "
    "Transpose Expand Tile Flatten Neg Abs ReduceMax ReduceMin ReduceSum ReduceProd CumSum Range Split".split()
)
"""Operators whose output is of their first input's type."""


def in_one_type(model: onnx_ir.Model) -> None:
    """Make int64 of int32 where an operator takes one of them and is given both."""
    from onnx_ir import DataType, TensorType

    kinds: dict[onnx_ir.Value, DataType | None] = {}

    def kind_of(value: onnx_ir.Value) -> DataType | None:
        return value.dtype or kinds.get(value)  # the exporter omits the types of values between its own operators

    for node in list(model.graph.all_nodes()):
        given = [value for value in node.inputs if value is not None]
        if node.op_type in SAME_TYPE and {kind_of(one) for one in given} == {DataType.INT32, DataType.INT64}:
            for at, value in enumerate(node.inputs):
                if value is not None and kind_of(value) == DataType.INT32:
                    cast = _cast(value, DataType.INT64, f"{value.name}.for.{node.name}")
                    _graph_of(node).insert_before(node, cast)
                    node.replace_input_with(at, cast.outputs[0])
            given = [value for value in node.inputs if value is not None]
            if node.outputs[0].dtype == DataType.INT32:
                back = _cast(node.outputs[0], DataType.INT32, f"{node.outputs[0].name}.back")
                _replace(node.outputs[0], back.outputs[0])
                node.outputs[0].type = TensorType(DataType.INT64)
                _graph_of(node).insert_after(node, back)
        for value in node.outputs:
            if node.op_type in ("Shape", "Size", "NonZero", "ArgMax", "ArgMin"):
                kinds[value] = DataType.INT64
            elif node.op_type == "Cast":
                kinds[value] = DataType(node.attributes["to"].as_int())
            elif node.op_type in PASSING and given:
                kinds[value] = kind_of(given[0])


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
        value.type = TensorType(single)  # setting its dtype would set that of the graph's clones
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
