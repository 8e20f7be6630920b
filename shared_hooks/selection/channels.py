"""Find which modules of a model make, carry and read the same channels, in its graph (torch.fx), and score channels.

Values whose channels correspond are in one space: the inputs and outputs of normalisations, activations and poolings,
and all terms of a residual sum. Pruning a channel removes it from everything in its space.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from shared_hooks.errors import CutRefused, InputMismatch, SpecError, near, near_path
from shared_hooks.modules import ROOT, call_parts, fast_path_off
from shared_hooks.selection.capture import Captured, Sample, same_buffers
from shared_hooks.tensors import copied

# k-medoids (partitioning around medoids, Kaufman & Rousseeuw 1990): every cluster is represented by one of its own
# points.


Array = npt.NDArray[np.float64]


def needs_scikit() -> None:
    """Raise SpecError if scikit-learn and scipy, the extra "prune", are not installed."""
    try:
        import scipy
        import sklearn  # noqa: F401
    except ImportError as error:
        raise SpecError(f'{error.name} missing: pip install "isthmus[prune]"') from error
    del scipy


def k_medoids(distances: Array, k: int) -> tuple[list[int], list[int]]:
    """Cluster by a symmetric (n, n) distance matrix: greedy build, then swaps while one helps.

    Returns (medoids, cluster of each point). Deterministic. Each swap lowers the sum of distances to the nearest
    medoid, so it terminates.
    """
    n = len(distances)
    if not 1 <= k <= n:
        raise ValueError(f"k is 1 to {n}, not {k}")
    medoids: list[int] = []
    nearest = np.full(n, np.inf)
    for _ in range(k):
        costs = np.minimum(nearest, distances).sum(1)  # row: the candidate
        costs[medoids] = np.inf
        medoids.append(int(costs.argmin()))
        nearest = np.minimum(nearest, distances[medoids[-1]])
    while k < n:
        others = [point for point in range(n) if point not in medoids]
        best = (nearest.sum() * (1 - 1e-12), -1, -1)
        for position in range(k):
            rest = [medoid for medoid in medoids if medoid != medoids[position]]
            without = distances[rest].min(0) if rest else np.full(n, np.inf)
            costs = np.minimum(without, distances[others]).sum(1)
            if costs.min() < best[0]:
                best = (float(costs.min()), position, others[int(costs.argmin())])
        if best[1] < 0:
            break
        medoids[best[1]] = best[2]
        nearest = distances[medoids].min(0)
    clusters = distances[medoids].argmin(0)
    clusters[medoids] = range(k)  # points at distance zero of each other stay with their own medoid
    return medoids, clusters.tolist()


def by_silhouette(distances: Array, most: int) -> tuple[list[int], list[int]]:
    """Run `k_medoids` with the k from 2 to ``most`` of the highest mean silhouette; k = 1 for fewer than three
    points.
    """
    needs_scikit()
    from sklearn.metrics import silhouette_score

    n = len(distances)
    best, found = -2.0, k_medoids(distances, 1)
    for k in range(2, min(most, n - 1) + 1):
        medoids, clusters = k_medoids(distances, k)
        score = float(silhouette_score(distances, clusters, metric="precomputed"))
        if score > best:
            best, found = score, (medoids, clusters)
    return found


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
    """The modules of one space by path, each group in the order in which they first run."""

    channels: int
    makers: list[str] = field(default_factory=list)
    """Convolutions and linear layers whose outputs are these channels."""
    carriers: list[str] = field(default_factory=list)
    """Batch normalisations and depthwise convolutions."""
    readers: dict[str, int] = field(default_factory=dict)
    """Convolutions and linear layers that read them, with the inputs per channel (more than 1 after flattening)."""
    pinned: list[str] = field(default_factory=list)
    """Why these channels cannot be cut; empty if they can."""


class ChannelGraph:
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
        """Return the space of the output of ``layer`` ("path", "path#2" for its second call). Raises SpecError,
        CutRefused.
        """
        return self._collect(layer, self._roles)

    def before(self, layer: str) -> Space:
        """Return the same space, limited to what has run by the end of ``layer``."""
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
        path, which = call_parts(layer)
        calls = [node for node in self._nodes if node.op == "call_module" and node.target == path]
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
        """Join the spaces of a module's calls, as it has one weight: those of their inputs, and those of their
        outputs.
        """
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


def trace(model: nn.Module, sample: Sample) -> ChannelGraph:
    """Trace ``model`` with the shapes of ``sample``. Raises CutRefused if torch.fx cannot follow it."""
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
    return ChannelGraph(traced)


class _Shapes(fx.Interpreter):
    """Runs the graph and stores each node's tensor shape in it; () for tensors in a holder."""

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
    """Return whether all terms have the result's channels in the same dimension; numbers do not count."""
    shape = _shape(node)
    terms = [_shape(one) for one in node.all_input_nodes]
    return all(not term or (len(term) == len(shape) and term[1] == shape[1]) for term in terms)


def _from_one(node: fx.Node, given: fx.Node) -> bool:
    """Return whether a flatten, view or reshape joins dimensions 1 to the last, and would with fewer channels, too."""
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


# A score for every channel of a layer: channels with higher scores are kept first. Each scoring is one function.


Scoring = Callable[[Captured, nn.Module, Sample, int], torch.Tensor]

MOST_CLUSTERS: Final = 16


def score(name: str, captured: Captured, model: nn.Module, sample: Sample, seed: int = 0) -> torch.Tensor:
    """Score channels by ``name`` (`SCORINGS`): (C,) float64. ``sample`` is used to trace the model if needed.

    Raises SpecError for an unknown name, and InputMismatch or CutRefused if this scoring does not apply.
    """
    if name not in SCORINGS:
        raise SpecError(f'no scoring "{name}"; there is {", ".join(SCORINGS)}.{near(name, SCORINGS)}')
    return SCORINGS[name](captured, model, sample, seed).to(torch.float64)


def best(scores: torch.Tensor, count: int) -> list[int]:
    """Return the ``count`` best channels, ascending; of equal ones the first. Raises SpecError."""
    if not 1 <= count <= scores.numel():
        raise SpecError(f"keep {count}: the layer has {scores.numel()} channels")
    order = sorted(range(scores.numel()), key=lambda channel: -float(scores[channel]))
    return sorted(order[:count])


def magnitude(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """Score by mean absolute value."""
    return captured.magnitude


def variance(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """Score by variance: the squared error of replacing a dropped channel by its mean."""
    return captured.variance


def separability(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """Score by the mean Jeffries-Matusita distance over all pairs of classes, 0 (alike) to 2 (apart).

    Each class's places are modelled as normally distributed: 2 (1 - exp(-B)), B their Bhattacharyya distance (Bruzzone
    et al. 1995). Needs two classes with two places each.
    """
    classes = sorted({label for label in captured.labels if label is not None})
    known = {name: [index for index, label in enumerate(captured.labels) if label == name] for name in classes}
    groups = [captured.rows[rows] for rows in known.values() if len(rows) > 1]
    if len(groups) < 2:
        raise InputMismatch("separability needs labels: at least two classes with two inputs each")
    means = [group.mean(0) for group in groups]
    spread = torch.stack([group.var(0) for group in groups])
    spread = spread.clamp(min=1e-12 * float(captured.rows.var()) + 1e-30)  # a class without variance
    total = torch.zeros_like(captured.mean)
    pairs = list(combinations(range(len(groups)), 2))
    for a, b in pairs:
        both = spread[a] + spread[b]
        apart = (means[a] - means[b]).square() / both / 4 + (both / (2 * (spread[a] * spread[b]).sqrt())).log() / 2
        total += 2 * (1 - torch.exp(-apart))
    return total / len(pairs)


def clusters(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """Score by clusters of redundant channels (k-medoids, k by silhouette): one of each cluster ranks before a second
    of any.

    The distance is 1 - |correlation| over the places. The medoid is its cluster's first, then the others by variance;
    among firsts, and among seconds, the higher variance ranks first. A constant channel ranks last.
    """
    needs_scikit()
    from scipy.spatial.distance import pdist, squareform

    silent = captured.rows.var(0, correction=0) <= 1e-24
    alive = (~silent).nonzero().flatten().tolist()
    scores = torch.zeros(captured.channels, dtype=torch.float64)
    if len(captured.rows) < 3:
        raise InputMismatch("clusters need three places or more")
    if len(alive) < 3:
        return captured.variance * ~silent
    distances = 1 - np.abs(1 - squareform(pdist(captured.rows[:, alive].numpy().T, "correlation")))
    distances = np.clip((distances + distances.T) / 2, 0, 1)
    np.fill_diagonal(distances, 0)
    medoids, members = by_silhouette(distances, MOST_CLUSTERS)
    strength = captured.variance[alive] / captured.variance[alive].max() / 2  # below 1: breaks ties within a rank
    for cluster, medoid in enumerate(medoids):
        others = [point for point, its in enumerate(members) if its == cluster and point != medoid]
        others.sort(key=lambda point: -float(strength[point]))
        for rank, point in enumerate([medoid, *others]):
            scores[alive[point]] = len(alive) - rank + strength[point]
    return scores


def weight(captured: Captured, model: nn.Module, sample: Sample, _seed: int) -> torch.Tensor:
    """Score by the L1 norm of each channel's filter (Li et al. 2017), summed over the layers that add up to the
    channel.
    """
    found = _before(captured, model, sample, "makers", (*CONVOLUTIONS, nn.Linear))
    norms = [module.weight.detach().abs().flatten(1).sum(1) for module in found]  # type: ignore[operator]
    return _sum(norms, captured, "convolution or linear layer")


def gamma(captured: Captured, model: nn.Module, sample: Sample, _seed: int) -> torch.Tensor:
    """Score by the absolute scale of the batch normalisation (Liu et al. 2017), summed as in `weight`."""
    found = _before(captured, model, sample, "carriers", NORMS)
    scales = [module.weight.detach().abs() for module in found if _scales(module)]  # type: ignore[operator]
    return _sum(scales, captured, "batch normalisation")


def random(captured: Captured, _model: nn.Module, _sample: Sample, seed: int) -> torch.Tensor:
    """Score at random, as a control: a permutation drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(captured.channels, generator=generator).to(torch.float64)


SCORINGS: Final[Mapping[str, Scoring]] = {
    "magnitude": magnitude,
    "variance": variance,
    "separability": separability,
    "clusters": clusters,
    "weight": weight,
    "gamma": gamma,
    "random": random,
}


def _before(
    captured: Captured, model: nn.Module, sample: Sample, role: str, kinds: tuple[type[nn.Module], ...]
) -> list[nn.Module]:
    """Return the modules of the layer's space in a role that have run by its end. Without a graph (tokens, or models
    that torch.fx cannot follow) the layer itself, if it is of ``kinds``.
    """
    own = dict(model.named_modules()).get(call_parts(captured.layer)[0])
    mine = [own] if isinstance(own, kinds) else []
    try:
        return [
            model.get_submodule(name) for name in getattr(trace(model, sample).before(captured.layer), role)
        ] or mine
    except CutRefused:
        if mine:
            return mine
        raise


def _scales(module: nn.Module) -> bool:
    return isinstance(module, NORMS) and bool(module.affine)


def _sum(scores: list[torch.Tensor], captured: Captured, what: str) -> torch.Tensor:
    scores = [one.to("cpu", torch.float64) for one in scores if one.numel() == captured.channels]
    if not scores:
        raise InputMismatch(f"layer {captured.layer}: no {what} of {captured.channels} channels before it")
    return torch.stack(scores).sum(0)
