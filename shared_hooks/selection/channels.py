"""Which modules of a model make, carry and read the same channels, found in its graph (torch.fx).

Values whose channels must stay in step are in one space: what a normalisation, an activation or a pooling takes and
gives, and all terms of a residual sum. Pruning a channel means cutting it out of everything in its space.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from shared_hooks.errors import CutRefused, SpecError, near_path
from shared_hooks.modules import ROOT, fast_path_off
from shared_hooks.selection.capture import Sample, same_buffers
from shared_hooks.tensors import copied

CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_POOLS: Final = tuple(
    getattr(nn, f"{kind}Pool{n}d") for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg") for n in (1, 2, 3)
)
_PASSING: Final = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Upsample, nn.ZeroPad2d, *_POOLS),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign),
)
_PASSING_FUNCTIONS: Final = frozenset(
    {
        *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.clone, functional.relu, functional.relu6),
        *(functional.gelu, functional.silu, functional.leaky_relu, functional.elu, functional.hardswish),
        *(functional.hardsigmoid, functional.dropout, functional.max_pool2d, functional.avg_pool2d),
        *(functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d, functional.interpolate),
        *("relu", "relu_", "sigmoid", "tanh", "contiguous", "clone", "detach"),
    }
)
_JOINING: Final = frozenset(
    {
        *(operator.add, operator.iadd, operator.sub, operator.mul, operator.imul),
        *(torch.add, torch.sub, torch.mul, "add", "add_", "sub", "mul", "mul_"),
    }
)
_FLATTENING: Final = frozenset({torch.flatten, torch.reshape, "flatten", "view", "reshape"})


@dataclass
class Space:
    """The modules of one space, each in the order in which it first runs, by its path."""

    channels: int
    makers: list[str] = field(default_factory=list)
    """Convolutions and linear layers whose outputs are these channels."""
    carriers: list[str] = field(default_factory=list)
    """Batch normalisations and depthwise convolutions."""
    readers: dict[str, int] = field(default_factory=dict)
    """Convolutions and linear layers that take them, with the inputs per channel (more than 1 after flattening)."""
    pinned: list[str] = field(default_factory=list)
    """Why these channels cannot be cut out; empty where they can."""


class Graph:
    """The spaces of a traced model."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self._modules: Mapping[str, nn.Module] = dict(traced.named_modules())
        self._parent: dict[str, str] = {}
        self._nodes = list(traced.graph.nodes)
        self._cells: dict[str, int] = {}  # of a node: features for each channel
        self._roles: list[tuple[str, str, str, int]] = []  # (space member, role, module or reason, cells)
        for node in self._nodes:
            self._see(node)

    def space(self, layer: str) -> Space:
        """The space of the output of ``layer`` ("path", "path#2" for its second call). Raises SpecError, CutRefused."""
        return self._collect(layer, self._roles)

    def before(self, layer: str) -> Space:
        """As `space`, of what has run when ``layer`` has."""
        last = self._nodes.index(self._node(layer))
        ran = {str(node.target) for node in self._nodes[: last + 1] if node.op == "call_module"}
        return self._collect(layer, [role for role in self._roles if role[1] == "pinned" or role[2] in ran])

    def _collect(self, layer: str, roles: list[tuple[str, str, str, int]]) -> Space:
        node = self._node(layer)
        root = self._root(node.name)
        space = Space(_shape(node)[1] // self._cells.get(node.name, 1))
        for member, role, what, cells in roles:
            if self._root(member) != root:
                continue
            if role == "reader":
                space.readers[what] = cells
            elif what not in (known := getattr(space, {"maker": "makers", "carrier": "carriers"}.get(role, role))):
                known.append(what)
        return space

    def _node(self, layer: str) -> fx.Node:
        path, _, number = layer.partition("#")
        calls = [node for node in self._nodes if node.op == "call_module" and node.target == path]
        which = int(number) if number.isdecimal() else 1
        if not calls and path in self._modules:
            raise CutRefused(
                f"layer {layer}: torch.fx does not see the layer itself, only what contains it or is in it"
            )
        if not calls:
            raise SpecError(f"layer {layer}: no module of this name in the graph.{near_path(path, self._modules)}")
        if not 1 <= which <= len(calls):
            raise SpecError(f"layer {layer}: {path} runs {len(calls)} times")
        node: fx.Node = calls[which - 1]
        if len(_shape(node)) < 2:
            raise CutRefused(f"layer {layer}: its output is no tensor with channels")
        return node

    # -- building ----------------------------------------------------------------------------------------------

    def _root(self, member: str) -> str:
        while (parent := self._parent.get(member, member)) != member:
            member = parent
        return member

    def _join(self, *members: str) -> None:
        for other in members[1:]:
            self._parent[self._root(other)] = self._root(members[0])

    def _pin(self, node: fx.Node, why: str) -> None:
        for one in (node, *node.all_input_nodes):
            self._roles.append((one.name, "pinned", why, 1))

    def _see(self, node: fx.Node) -> None:
        inputs = [one for one in node.all_input_nodes if len(_shape(one)) >= 2]
        if node.op == "placeholder":
            self._roles.append((node.name, "pinned", f"the model's input {node.name}", 1))
        elif node.op == "output":
            self._pin(node, "the model's output")
        elif node.op == "call_module":
            self._see_module(node, self._modules[str(node.target)], inputs)
        elif "shape" not in node.meta:
            return  # a size, a number
        elif len(_shape(node)) < 2:
            self._pin(node, _called(node))
        elif node.target in _PASSING_FUNCTIONS and len(inputs) == 1:
            self._pass(node, inputs[0])
        elif node.target in _JOINING and _in_step(node) and len({self._cells.get(one.name, 1) for one in inputs}) == 1:
            self._join(node.name, *(one.name for one in inputs))
            self._cells[node.name] = self._cells.get(inputs[0].name, 1)
        elif node.target in _FLATTENING and len(inputs) == 1 and _from_one(node, inputs[0]):
            self._flatten(node, inputs[0])
        elif node.target in (torch.mean, "mean") and _over_positions(node, inputs):
            self._pass(node, inputs[0])
        else:
            self._pin(node, _called(node))

    def _see_module(self, node: fx.Node, module: nn.Module, inputs: list[fx.Node]) -> None:
        path = str(node.target)
        if len(inputs) != 1 or hasattr(module, "parametrizations"):
            self._pin(node, f"{path} ({type(module).__name__})")
        elif isinstance(module, CONVOLUTIONS) and module.groups == 1:
            self._weighted(node, inputs[0], path, 1)
        elif isinstance(module, CONVOLUTIONS) and module.groups == module.in_channels == module.out_channels:
            self._carry(node, inputs[0], path)
        elif isinstance(module, nn.Linear) and len(_shape(inputs[0])) == 2:
            self._weighted(node, inputs[0], path, self._cells.get(inputs[0].name, 1))
        elif isinstance(module, NORMS) and self._cells.get(inputs[0].name, 1) == 1:
            self._carry(node, inputs[0], path)
        elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            self._flatten(node, inputs[0])
        elif isinstance(module, _PASSING):
            self._pass(node, inputs[0])
        else:
            self._pin(node, f"{path} ({type(module).__name__})")

    def _weighted(self, node: fx.Node, given: fx.Node, path: str, cells: int) -> None:
        """A module that runs twice has one weight: its calls' inputs are one space, and so are its outputs."""
        self._join(f"in:{path}", given.name)
        self._join(f"out:{path}", node.name)
        self._roles += [(given.name, "reader", path, cells), (node.name, "maker", path, 1)]

    def _carry(self, node: fx.Node, given: fx.Node, path: str) -> None:
        self._join(f"in:{path}", given.name, node.name)
        self._roles.append((node.name, "carrier", path, 1))

    def _pass(self, node: fx.Node, given: fx.Node) -> None:
        self._join(node.name, given.name)
        self._cells[node.name] = self._cells.get(given.name, 1)

    def _flatten(self, node: fx.Node, given: fx.Node) -> None:
        self._pass(node, given)
        self._cells[node.name] *= _shape(node)[1] // _shape(given)[1]


def trace(model: nn.Module, sample: Sample) -> Graph:
    """The graph of ``model``, with the shapes of ``sample``. Raises CutRefused where torch.fx cannot follow it."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise CutRefused(f"torch.fx cannot follow this model: it does not see the hook on {name or ROOT}")
    args, kwargs = copied(sample.args, dict(sample.kwargs))
    try:
        traced = fx.symbolic_trace(model)
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        with torch.no_grad(), fast_path_off(), same_buffers(model):
            _Shapes(traced).run(*bound.args, *bound.kwargs.values())
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CutRefused(f"torch.fx cannot follow this model: {why}") from error
    return Graph(traced)


class _Shapes(fx.Interpreter):
    """Runs the graph and leaves at each node the shape of its tensor; () for tensors in a holder."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            n.meta["shape"] = tuple(result.shape)
        elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            n.meta["shape"] = ()
        return result


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta.get("shape", ()))


def _called(node: fx.Node) -> str:
    return f"{getattr(node.target, '__name__', node.target)} (node {node.name})"


def _in_step(node: fx.Node) -> bool:
    """Whether all terms have the result's channels in the same dimension; numbers do not count."""
    shape = _shape(node)
    terms = [_shape(one) for one in node.all_input_nodes]
    return all(not term or (len(term) == len(shape) and term[1] == shape[1]) for term in terms)


def _from_one(node: fx.Node, given: fx.Node) -> bool:
    """Whether a flatten, view or reshape joins dimensions 1 to the last, and would do so with fewer channels."""
    if node.target not in (torch.flatten, "flatten"):
        sizes: Any = node.args[1:]
        last = sizes[-1][-1] if sizes and isinstance(sizes[-1], (tuple, list)) else sizes[-1] if sizes else None
        if not isinstance(last, fx.Node) and last != -1:
            return False
    shape = _shape(given)
    size = 1
    for one in shape[1:]:
        size *= one
    return _shape(node) == (shape[0], size)


def _over_positions(node: fx.Node, inputs: list[fx.Node]) -> bool:
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if len(inputs) != 1 or dims is None:
        return False
    rank = len(_shape(inputs[0]))
    wanted = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    return not wanted & {0, 1}
