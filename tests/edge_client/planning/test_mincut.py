"""The best set of calls: a minimum cut, compared with all sets there are, and with what the engine makes of it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from edge_client.planning.link import Curve, Link
from edge_client.planning.mincut import INPUTS, Best, CutGraph, CutNode, CutTensor, _Builder, best_set, names_of
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.profiling.profiler import ProfileOptions, profile_cloud, profile_edge
from shared_hooks.tensors import tensors_in
from tests.zoo.branching import MODELS, made


def drawn(seed: int) -> CutGraph:
    """A random graph of at most nine nodes."""
    dice = random.Random(seed)
    count = dice.randint(1, 9)
    nodes, tensors = [], [CutTensor(dice.choice([0.0, 1.0, 20.0, 300.0]), {INPUTS})]
    for number in range(count):
        nodes.append(CutNode(f"n{number}", dice.randint(0, 100), dice.randint(0, 100)))
        if number and dice.random() < 0.15:
            nodes[number].after.add(dice.randrange(number))
        if not number or dice.random() < 0.3:
            tensors[0].read.add(number)
        tensors.append(CutTensor(dice.choice([0.0, 1.0, 20.0, 300.0]), {number}))
        if number and dice.random() < 0.1:  # it writes to what another has made
            tensors[dice.randrange(1, number + 1)].made.add(number)
    for at in range(1, count + 1):
        for reader in range(at, count):
            if dice.random() < 0.35:
                tensors[at].read.add(reader)
    for one in tensors:
        for reader in one.read:
            nodes[reader].needs |= {maker for maker in one.made if INPUTS < maker < reader}
    return CutGraph(nodes, tensors)


def brute(graph: CutGraph) -> float:
    numbers = range(len(graph.nodes))
    sets = (set(found) for size in range(len(graph.nodes) + 1) for found in itertools.combinations(numbers, size))
    return min(graph.cost(own) for own in sets if graph.allows(own))


def test_a_thousand_random_graphs_cost_what_the_best_of_all_sets_does() -> None:
    for seed in range(1000):
        graph = drawn(seed)
        own = graph.least()
        assert graph.allows(own), seed
        assert graph.cost(own) == pytest.approx(brute(graph)), seed


def profiles(name: str) -> tuple[WrappedModel, Any, Any]:
    wrapped = WrappedModel(made(name))
    options = ProfileOptions(warmup=1, repetitions=2, seconds=2.0)
    args = MODELS[name][1]
    edge = profile_edge(wrapped, "m", args, {}, options)
    cloud = profile_cloud(WrappedModel(made(name)), "m", args, {}, options)
    return wrapped, edge, cloud


def link(bytes_per_second: float, round_trip: float = 1e6) -> Link:
    return Link(Curve.line(round_trip, bytes_per_second), Curve.line(0.0, bytes_per_second), "given")


@pytest.mark.parametrize("name", ["two towers", "U-Net", "Inception", "feature pyramid", "CLIP", "encoder-decoder"])
@pytest.mark.parametrize("rate", [1e4, 1e6, 1e9])
def test_the_best_set_is_one_that_the_engine_cuts(name: str, rate: float) -> None:
    wrapped, edge, cloud = profiles(name)
    args = MODELS[name][1]
    best = best_set(wrapped.plan(*args), edge, cloud, link(rate), edge_factor=0.5)
    assert isinstance(best, Best) and not best.reason
    early = wrapped.head(list(best.names) or "input", *args)
    assert early.nbytes == best.bytes_up
    with torch.no_grad():
        expected = made(name)(*args)
    output = WrappedModel(made(name)).tail(EarlyOutput.from_bytes(early.to_bytes()))
    assert all(map(torch.equal, tensors_in(output), tensors_in(expected)))


def test_a_tower_whose_input_is_large_stays_on_the_edge() -> None:
    """Where the other one's input is small and its work large."""

    def built(left_edge: float, right_edge: float) -> tuple[str, ...]:
        wrapped = WrappedModel(made("two towers"))
        plan = wrapped.plan(*MODELS["two towers"][1])
        names = [layer.name for layer in plan.layers]
        edge = {"left": left_edge, "right": right_edge}

        def times(layer: int | None) -> tuple[float, float]:
            if layer is None:
                return 0.0, 0.0
            return edge.get(names[layer].partition(".")[0], 1000.0), 1.0

        builder = _Builder(plan, times)
        builder.build()
        graph = CutGraph(builder.nodes, builder.tensors(lambda nbytes: nbytes))
        return tuple(call.name for call in names_of(builder, graph, graph.least()))

    # the left tower's last layer gives zeros and numbers alike: nothing is won in bytes, so it must be quick
    assert built(0.1, 1000.0) == ("left",)
    assert built(1000.0, 0.1) == ("right",)
    assert built(1000.0, 1000.0) == ()


def test_where_data_decide_the_best_set_is_this_paths() -> None:
    class Deciding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.one(value)
            return out if out.sum() > 0 else -out

    wrapped = WrappedModel(Deciding().eval())
    _, edge, cloud = profiles("two towers")
    found = best_set(wrapped.plan(torch.ones(1, 4)), edge, cloud, link(1e6))
    assert found is not None and found.is_plain and found.names in ((), ("one",))
