"""The best set of calls to run on the edge, among all that a graph allows: a minimum cut.

A model is a graph of layers, and of operations between them; each has a duration on either side, and what crosses has
one on the link. The set with the least sum is a minimum cut between two terminals (Stone, Multiprocessor scheduling
with the aid of network flow algorithms, 1977; for split models: DADS, Hu et al. 2019). NetworkX finds it. What a cut
must not do has an edge of infinite capacity: nothing on the edge needs anything of the server, and no order of in-place
writes changes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import networkx

from edge_client.planning.link import Link
from shared_hooks.errors import CutRefused
from shared_hooks.modules import ROOT
from shared_hooks.planning import Plan
from shared_hooks.profiling.profile import Profile, Quartiles
from shared_hooks.recording import ModuleCall, Op, Storage, Value
from shared_hooks.showing import short
from shared_hooks.tensors import LiveSet

INPUTS: Final = -1
"""Takes the place of a node's number for the model's inputs, which the edge has."""


@dataclass
class CutNode:
    """A layer call, or an operation outside of layers. ``needs``: numbers of nodes that must run before it on its own
    side or earlier; ``after``: of nodes that must be on the edge if it is, because it writes to what they read.
    """

    name: str
    edge_ns: float
    cloud_ns: float
    needs: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)


@dataclass
class CutTensor:
    """Memory that several nodes share. ``ns``: its time on the link, ``nbytes``: raw; ``made``: numbers of the nodes
    that create or write it, `INPUTS` for an input; ``read``: of those that read it.
    """

    ns: float
    made: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    nbytes: int = 0


@short
@dataclass(frozen=True)
class CutGraph:
    """Nodes in the order in which they run, and tensors. ``ends``: nodes that contribute to the model's output."""

    nodes: Sequence[CutNode]
    tensors: Sequence[CutTensor]

    def closed(self, own: Iterable[int]) -> set[int]:
        """These nodes and everything that they need."""
        found: set[int] = set()
        waiting = list(own)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.nodes[number].needs
        return found

    def allows(self, own: set[int]) -> bool:
        """Return whether these nodes may run before the others."""
        return all(self.nodes[one].needs <= own and self.nodes[one].after <= own for one in own)

    def cost(self, own: set[int]) -> float:
        """Return nanoseconds of a request for which these nodes run on the edge."""
        ns = sum(node.edge_ns if number in own else node.cloud_ns for number, node in enumerate(self.nodes))
        for one in self.tensors:
            is_here = INPUTS in one.made or bool(one.made & own)
            if is_here and not one.read <= own:
                ns += one.ns
        return ns

    def least(self) -> set[int]:
        """Return the nodes on the edge's side of a minimum cut."""
        flow = networkx.DiGraph()
        flow.add_nodes_from(("edge", "cloud"))
        for number, node in enumerate(self.nodes):
            flow.add_edge("edge", number, capacity=node.cloud_ns)
            flow.add_edge(number, "cloud", capacity=node.edge_ns)
            for needed in node.needs | node.after:
                flow.add_edge(number, needed)  # without a capacity: it cannot be cut
        for at, one in enumerate(self.tensors):
            made, sent = ("made", at), ("sent", at)
            for number in one.made:
                flow.add_edge("edge" if number == INPUTS else number, made)
            flow.add_edge(made, sent, capacity=one.ns)
            for number in one.read:
                flow.add_edge(sent, number)
        _, (here, _) = networkx.minimum_cut(flow, "edge", "cloud")
        return {number for number in here if isinstance(number, int)}


class _Builder:
    """Builds the graph of a plan's trace. ``times``: of a layer's id, or None for an operation outside of layers."""

    def __init__(self, plan: Plan, times: Callable[[int | None], tuple[float, float]]) -> None:
        self.plan, self.times = plan, times
        self.nodes: list[CutNode] = []
        self.begins: list[int] = []
        """When each node first runs (a seq)."""
        self.calls: list[ModuleCall | None] = []
        """The layer of each node, or the call whose code makes the operation."""
        self.number_of: dict[ModuleCall, int] = {}
        self.makers: dict[Value, int] = {}
        self.writers: dict[Storage, set[int]] = {value.storage: {INPUTS} for value in plan.trace.inputs}
        self.readers: dict[Storage, set[int]] = {}
        self.live: dict[Storage, LiveSet] = {}

    def build(self) -> None:
        trace = self.plan.trace
        events: dict[int, list[Any]] = {}
        ops = [(call, item) for call, _, item in trace.placed if isinstance(item, Op) and item.counts]
        ends = sorted((op.seq, max(op.seq, op.end)) for _, op in ops)
        at = 0
        for event in sorted(trace.events, key=lambda one: one.seq):
            while at < len(ends) and ends[at][1] < event.seq:
                at += 1
            if at < len(ends) and ends[at][0] <= event.seq:
                events.setdefault(ends[at][0], []).append(event)
        for call, op in ops:
            self._take(self._node(call, op), op, events.get(op.seq, []))

    def _node(self, call: ModuleCall, op: Op) -> int:
        layer: ModuleCall | None = call
        while layer is not None and layer.layer_id is None:
            layer = layer.parent
        if layer is not None and layer in self.number_of:
            return self.number_of[layer]
        number = len(self.nodes)
        edge_ns, cloud_ns = self.times(None if layer is None else layer.layer_id)
        inside = op.name if call.path == ROOT else f"{call.name}.{op.name}"
        self.nodes.append(CutNode(inside if layer is None else layer.name, edge_ns, cloud_ns))
        self.calls.append(call if layer is None else layer)
        self.begins.append(op.seq)
        if layer is not None:
            self.number_of[layer] = number
        return number

    def _take(self, number: int, op: Op, events: Sequence[Any]) -> None:
        node = self.nodes[number]
        read = {storage for event in events for storage, _ in event.reads if storage.tainted <= op.end}
        written = {storage for event in events for storage in event.writes}
        written |= {storage for event in events for storage, _ in event.overwrites} | set(op.writes)
        for value in op.args:
            if (maker := self.makers.get(value)) is not None:
                node.needs.add(maker)
        for storage in {value.storage for value in op.args if value.hangs(op.seq)} | read:
            node.needs |= self.writers.get(storage, set())
        for storage in written:
            node.after |= self.readers.get(storage, set())
        node.needs -= {number, INPUTS}
        node.after.discard(number)
        for event in events:
            for storage, view in event.reads:
                if storage in read and self.writers.get(storage, set()) - {number}:
                    self.readers.setdefault(storage, set()).add(number)
                    self.live[storage] = self.live.get(storage, LiveSet.empty(storage.elements)).add(view)
        for value in op.results:
            if value not in op.args:
                self.makers[value] = number
            if op.seq <= value.storage.created <= op.end:
                written.add(value.storage)
        for storage in written:
            self.writers.setdefault(storage, set()).add(number)

    def fold(self) -> None:
        """Move an operation in the model's own code that only one node uses to that node: no call ends with it, so a
        set of calls contains it only if that node needs it.
        """
        readers: dict[int, set[int]] = {}
        for number, node in enumerate(self.nodes):
            for needed in node.needs:
                readers.setdefault(needed, set()).add(number)
        for number, call in enumerate(self.calls):
            if call is not None and call.path == ROOT and call not in self.number_of:
                after = {one for one in readers.get(number, ()) if one > number}
                if len(after) == 1:
                    self.nodes[number].after |= after
                elif not after:
                    self.nodes[number].edge_ns = math.inf

    def tensors(self, ns: Callable[[float], float]) -> list[CutTensor]:
        return [
            CutTensor(
                ns(nbytes := live.sent * storage.itemsize), set(self.writers[storage]), self.readers[storage], nbytes
            )
            for storage, live in self.live.items()
        ]


@dataclass(frozen=True)
class Best:
    """The best set. ``names``: for `split` of an `EdgeClient`, empty if nothing should run on the edge; ``latency_ns``:
    predicted, including what all requests have in common; ``bytes_up``: raw; ``nodes``: names of what runs on the edge,
    in order; ``reason``: why the least of all sets cannot be cut, and this is the next best.
    """

    names: tuple[str, ...]
    latency_ns: float
    bytes_up: int
    nodes: tuple[str, ...]
    reason: str = ""
    is_plain: bool = False
    """Whether a single cut is the same."""
    graph: CutGraph = field(default_factory=lambda: CutGraph((), ()), repr=False)
    own: frozenset[int] = frozenset()
    """Numbers of the graph's nodes that run on the edge."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "names": list(self.names),
            "latency_ns": self.latency_ns,
            "bytes_up": self.bytes_up,
            "on_the_edge": list(self.nodes),
            "reason": self.reason,
        }


def best_set(
    plan: Plan,
    edge: Profile,
    cloud: Profile,
    link: Link,
    *,
    edge_factor: float = 1.0,
    predicted: Mapping[str, float] | None = None,
) -> Best | None:
    """Return the calls to run on the edge, according to both sides' profiles and the link; None if no set can be cut.

    ``edge_factor`` multiplies the edge's times. ``predicted``: by the name of a single cut, its predicted nanoseconds,
    from which a request's costs besides its layers follow.
    """
    if plan.trace.has_no_cut:
        return None
    times = _times(edge, cloud, edge_factor)
    builder = _Builder(plan, times)
    builder.build()
    if not builder.nodes:
        return None
    builder.fold()
    fixed = link.up.ns(0)
    graph = CutGraph(builder.nodes, builder.tensors(lambda nbytes: link.up.ns(nbytes) - fixed))
    names = names_of(builder, graph, graph.least())
    own = graph.closed(number for number, call in enumerate(builder.calls) if _in(call, names))
    found: tuple[str, ...] = tuple(call.name for call in names)
    reason, nbytes, is_plain = "", 0, not found
    try:
        crossing = plan.cutting(found or "input")[1]
        nbytes, is_plain = crossing.payload_bytes, not crossing.later
    except CutRefused as error:
        reason = str(error)
    common = fixed + link.down.ns(cloud.answer_bytes)

    def latency(own: set[int], nbytes: int) -> float:
        return graph.cost(own) + common + _common(edge, cloud, nbytes, edge_factor)

    besides = []
    for layer in plan.cuts if predicted else ():
        if (known := (predicted or {}).get(layer.name)) is not None:
            end = plan.position(layer.name)
            before = {number for number, first in enumerate(builder.begins) if first < end}
            besides.append(known - latency(before, layer.frontier_bytes))
    more = statistics.median(besides) if besides else 0.0
    here = tuple(graph.nodes[number].name for number in sorted(own))
    return Best(found, latency(own, nbytes) + more, nbytes, here, reason, is_plain, graph, frozenset(own))


def names_of(builder: _Builder, graph: CutGraph, own: set[int]) -> list[ModuleCall]:
    """Return the fewest calls that contain exactly these nodes: blocks and layers, without those that others need
    anyway. Operations at the border that no call contains stay with the server.
    """
    inside: dict[ModuleCall, list[int]] = {}
    for number, call in enumerate(builder.calls):
        outer = call
        while outer is not None:
            inside.setdefault(outer, []).append(number)
            outer = outer.parent
    whole = {call for call, numbers in inside.items() if call.path not in ("", ROOT) and own.issuperset(numbers)}
    outermost = [call for call in whole if call.parent not in whole]
    kept: list[ModuleCall] = []
    reached: set[int] = set()
    for call in sorted(outermost, key=lambda one: -one.exit):
        if not reached.issuperset(inside[call]):
            kept.append(call)
            reached |= graph.closed(inside[call])
    return kept[::-1]


def _in(call: ModuleCall | None, names: Sequence[ModuleCall]) -> bool:
    while call is not None:
        if call in names:
            return True
        call = call.parent
    return False


def _times(edge: Profile, cloud: Profile, edge_factor: float) -> Callable[[int | None], tuple[float, float]]:
    """Return a layer's time on each side: by how much the head grows, and the tail shrinks, according to the profiles
    at the cuts before and after it. Operations between layers count with the layer after them.
    """
    whole = cloud.cut("input")
    most = cloud.alone_ns.middle if whole is None else whole.stages["compute"].middle
    here = _shared(edge, {cut.layer_id: cut.stages["head"].middle for cut in edge.cuts}, edge.alone_ns.middle)
    left = {cut.layer_id: most - cut.stages["compute"].middle for cut in cloud.cuts}
    there = _shared(cloud, left, most)

    def times(layer_id: int | None) -> tuple[float, float]:
        if layer_id is None:
            return 0.0, 0.0
        return here.get(layer_id, 0.0) * edge_factor, there.get(layer_id, 0.0)

    return times


def _shared(profile: Profile, done: Mapping[int, float], most: float) -> dict[int, float]:
    """Distribute the time between two cuts among the layers there, in proportion to their own times.

    ``done``: up to the cut after a layer; ``most``: at the end.
    """
    found: dict[int, float] = {}
    waiting: list[tuple[int, float]] = []
    before = 0.0
    last = profile.layers[-1].layer_id if profile.layers else -1
    for layer in profile.layers:
        waiting.append((layer.layer_id, max(1.0, layer.inference_ns.middle)))
        now = done.get(layer.layer_id, most if layer.layer_id == last else None)
        if now is None:
            continue
        grown, total = max(0.0, now - before), sum(ns for _, ns in waiting)
        found |= {number: grown * ns / total for number, ns in waiting}
        before, waiting = max(before, now), []
    return found


def _common(edge: Profile, cloud: Profile, nbytes: int, edge_factor: float) -> float:
    """Return nanoseconds besides layers and link: packing and unpacking ``nbytes``, like the three cuts nearest in
    size, and finishing a request.
    """
    near = sorted(edge.cuts, key=lambda cut: abs(cut.frontier_bytes - nbytes))[:3]
    found = []
    for cut in near:
        there = cloud.cut(cut.name)
        ends: Mapping[str, Quartiles] = {} if there is None else there.stages
        stages = sum(ends[name].middle for name in ("decode", "inject", "encode") if name in ends)
        found.append(cut.stages["encode"].middle * edge_factor + stages)
    finish = edge.finish_ns.middle * edge_factor if edge.finish_ns else 0.0
    return (sum(found) / len(found) if found else 0.0) + finish
