"""Odd tensors and odd control: subclasses, bytes seen as another type, shapes from data, graphs, spikes, exceptions.

Each model is cut everywhere on copies that have never run: exact, or refused by name.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, InputMismatch
from tests.shared_hooks.truth import EVERYWHERE, Claim, Claims, Net, truth, vectors

# masked and nested tensors are prototypes, scripting is on its way out: torch warns of each
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

claim = Claims()
FOUR_ROWS = vectors(4, 4, 8)
OWN_CLASS = "a tensor of a class of its own"


@claim.each()
def test_exact_or_refused(claim: Claim) -> None:
    claim.check()


# --- shapes from data, of operations that do not say so

library = torch.library.Library("isthmus_shapes", "DEF")
library.define("keep(Tensor x) -> Tensor")
library.impl("keep", lambda x: x[x[:, 0] > 0], "CPU")
library.define("double(Tensor x) -> Tensor")
library.impl("double", lambda x: x * 2, "CPU")
library.impl("double", torch.empty_like, "Meta")


@claim(*EVERYWHERE, requests=FOUR_ROWS, branches=True)
def some_rows_of_an_operation_without_a_tag(net: Net, x: Tensor) -> Tensor:
    kept = torch.ops.isthmus_shapes.keep(net.a(x))
    return net.c(net.b(kept)) + len(kept)


@claim(*EVERYWHERE, requests=FOUR_ROWS, branches=True)
def some_rows_put_into_a_place_of_fixed_size(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    kept, out = torch.ops.isthmus_shapes.keep(hidden), torch.zeros(4, 8)
    out[: len(kept)] = kept
    return net.c(net.b(hidden)) + out


@claim(*EVERYWHERE, requests=FOUR_ROWS, branches=True)
def split_where_the_data_says(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    first, second = torch.tensor_split(hidden, hidden.sum(0).argmax().view(1) % 4)
    return net.c(net.b(second)) + first.sum(0)


@claim(*EVERYWHERE, requests=FOUR_ROWS, branches=True)
def packed_by_lengths_from_data(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)[:, :, None].expand(4, 8, 8)
    lengths = (hidden[:, :, 0] > 0).sum(1).clamp(min=1).sort(descending=True).values
    data, _ = torch._VF._pack_padded_sequence(hidden.contiguous(), lengths, True)
    return net.c(net.b(data))


def test_a_shape_that_follows_from_shapes_is_not_taken_for_data() -> None:
    edge = WrappedModel(Net(lambda net, x: net.c(net.b(torch.ops.isthmus_shapes.double(net.a(x))))))
    assert not edge.plan(torch.ones(2, 8)).trace.dynamic


# --- tensors of a class of their own, or with attributes


class Scaled(torch.Tensor):
    """A tensor that carries a number."""

    scale: float


def _scaled(scale: float) -> tuple[Tensor]:
    made = torch.ones(2, 8).as_subclass(Scaled)
    made.scale = scale
    return (made,)


def _tagged(scale: float) -> tuple[Tensor]:
    made: Any = torch.ones(2, 8)
    made.scale = scale
    return (made,)


@pytest.mark.parametrize("make", [_scaled, _tagged])
def test_inputs_that_are_more_than_their_elements_are_refused(make: Any) -> None:
    net = Net(lambda net, x: net.c(net.b(net.a(x.as_subclass(torch.Tensor)))) * x.scale)
    edge = WrappedModel(net)
    with pytest.raises(InputMismatch, match=r"class of its own|attributes of its own \(scale\)"):
        edge.forward(*make(2.0), end=0)
    with torch.no_grad():
        assert torch.equal(edge.forward(*make(2.0)), net(*make(2.0))), "whole, it runs"


@claim("input", because=OWN_CLASS)
def a_class_inside(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x).as_subclass(Scaled)
    out: Tensor = net.c(net.b(x) + hidden).as_subclass(torch.Tensor)
    return out


@claim("input", 0, 1, because=OWN_CLASS)
def a_class_at_the_end(net: Net, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x))).as_subclass(Scaled)


@claim(*EVERYWHERE)
def masked(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    kept = torch.masked.masked_tensor(hidden, hidden > 0)
    return net.c(net.b(x)) + kept.sum(1).get_data()[:, None]


@claim("input", 0, because="sparse, nested or quantised")
def sparse(net: Net, x: Tensor) -> Tensor:
    kept = F.relu(net.a(x)).to_sparse()
    return net.c(net.b(x)) + torch.sparse.mm(kept, torch.eye(8))


@claim("input", 0, because="sparse, nested or quantised")
def nested(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    kept = torch.nested.nested_tensor([hidden[0], hidden[1]])
    return net.c(net.b(x)) + torch.nested.to_padded_tensor(kept, 0.0)


@claim(because="cannot be recorded")
def jagged(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    kept = torch.nested.nested_tensor([hidden[:1], hidden[:2]], layout=torch.jagged)
    return net.c(net.b(kept).values())


@claim(*EVERYWHERE)
def tags(net: Net, x: Tensor) -> Tensor:
    hidden: Any = net.a(x)
    hidden.scale, hidden.other = float(hidden.mean()), hidden * 2
    return net.c(net.b(hidden)) * hidden.scale + hidden.other


@claim(*EVERYWHERE)
def compared_with_text(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    if hidden == "none" or hidden == None:  # noqa: E711
        hidden = hidden * 2
    return net.c(net.b(hidden)) + hidden


@claim(*EVERYWHERE)
def asserted(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    torch._assert_async((hidden < 1e6).all())
    return net.c(net.b(hidden))


# --- bytes and dimensions


@claim(*EVERYWHERE)
def seen_as_bytes(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    seen = hidden.view(torch.uint8)
    return net.c(net.b(hidden)) + seen[:, ::4].float()


@claim(*EVERYWHERE, requests=[lambda row=row: (torch.arange(80.0).view(5, 2, 8)[row] / 80,) for row in (1, 3)])
def a_part_of_a_data_set_seen_as_bytes(net: Net, x: Tensor) -> Tensor:
    seen = x.view(torch.uint8)
    return net.c(net.b(net.a(x))) + seen[:, ::4].float()


@claim("input", 0, because="does not divide")
def bytes_that_another_type_does_not_divide(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    seen = (hidden.flatten()[:13] * 40).to(torch.uint8)
    return net.c(net.b(hidden)) + seen[:12].view(torch.int32).float().mean() + seen.sum()


@claim(*EVERYWHERE)
def complex_views(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    seen = torch.view_as_complex(hidden.view(2, 4, 2))
    out = net.b(hidden)
    seen.mul_(2)
    return net.c(out) + hidden + torch.view_as_real(torch.fft.rfft(hidden)).sum() + seen.abs().sum()


@claim(*EVERYWHERE, requests=vectors(2, 1, 8))
def one_element_with_an_odd_stride(net: Net, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)))[:, 0]


@claim("input", because="rank 40")
def many_dimensions(net: Net, x: Tensor) -> Tensor:
    seen = net.a(x).view(2, 8, *([1] * 38))
    return net.c(net.b(seen.view(2, 8))) + seen.view(2, 8)


@claim("input", 0, 1, 2)
def a_deeply_nested_result(net: Net, x: Tensor) -> Any:
    out: Any = net.c(net.b(net.a(x)))
    for _ in range(70):
        out = [out]
    return out


def test_modules_nested_150_deep() -> None:
    inner: nn.Module = nn.Linear(8, 8)
    for _ in range(150):
        inner = nn.Sequential(inner)
    found = truth(nn.Sequential(inner, nn.Linear(8, 8)), vectors(2))
    assert not found.wrong
    assert found.exact == ["input", 0, 1]


# --- control flow


@claim(because="cannot be recorded")
def torch_cond(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    return net.c(net.b(torch.cond(hidden.sum() > 0, lambda t: t * 2, lambda t: t - 1, (hidden,))))


class Stop(Exception):
    """Brings a value."""


@claim(*EVERYWHERE)
def an_exception_brings_a_value(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    try:
        raise Stop(net.b(hidden))
    except Stop as stop:
        return net.c(stop.args[0]) + hidden


@claim("input", because="raises an error before it")
def an_operation_fails_and_another_way_is_taken(net: Net, x: Tensor) -> Tensor:
    try:
        hidden = net.a(x[:, :5])
    except RuntimeError:
        hidden = net.a(x)
    return net.c(net.b(hidden))


@claim(*EVERYWHERE)
def an_operation_fails_after_the_last_layer(net: Net, x: Tensor) -> Tensor:
    out = net.c(net.b(net.a(x)))
    try:
        return out.view(3, 3)
    except RuntimeError:
        return out * 2


@pytest.mark.parametrize("script", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 8))])
def test_a_scripted_root(script: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        found = truth(script(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).eval()), vectors())
    assert not found.wrong
    assert found.exact == ["input", 0]


class Features(nn.Module):
    """What torch.fx traces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = x + self.blocks(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def test_a_graph_that_gives_features() -> None:
    graph = torch.fx.symbolic_trace(Features().eval())
    nodes = {node.name: node for node in graph.graph.nodes}
    nodes["output"].args = ({"middle": nodes["blocks_0_1"], "end": nodes["fc"]},)
    graph.recompile()
    found = truth(graph, vectors(2, 2, 3, 8, 8))
    assert not found.wrong and not found.refused
    assert len(found.exact) == 8


class Spike(torch.autograd.Function):
    """A step forward, a slope backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class Leaky(nn.Module):
    """A neuron that leaks, its state put on the module by whoever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.tensor(0.9))
        self.state = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        reset = Spike.apply(self.state - 1).clone().detach()
        self.state = self.beta * self.state + x - reset
        spikes: Tensor = Spike.apply(self.state - 1)
        return spikes


class Spiking(nn.Module):
    """State reset in forward, three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), Leaky(), Leaky()

    def forward(self, x: Tensor) -> Tensor:
        self.first.state, self.second.state = torch.zeros_like(x), torch.zeros_like(x)
        out = []
        for _ in range(3):
            self.second(self.two(self.first(self.one(x))))
            out.append(self.second.state)
        return torch.stack(out)


def test_a_spiking_network() -> None:
    found = truth(Spiking(), vectors())
    assert not found.wrong and not found.refused


def test_inputs_that_do_not_begin_at_a_multiple_of_64_bytes() -> None:
    """Kernels may round otherwise there. The tail of an early cut gets such an input as it lies."""
    series = torch.randn(40, 19, generator=torch.Generator().manual_seed(2))
    net = nn.Sequential(nn.Linear(19, 33), nn.Tanh(), nn.Linear(33, 7))
    found = truth(net, [lambda row=row: (series[row],) for row in range(1, 6)])
    assert not found.wrong


# --- torch's own threads


def test_a_value_made_in_a_thread_of_the_models_own_is_no_constant() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        hidden, made = net.a(x), []
        worker = threading.Thread(target=lambda: made.append(hidden * 2))
        worker.start()
        worker.join()
        return net.c(net.b(hidden)) + made[0]

    found = truth(Net(forward), vectors())
    assert not found.wrong
    assert 2 in found.refused


def test_a_model_that_cannot_be_cut_still_runs_whole() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.c(torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t - 1, (net.a(x),)))

    net = Net(forward)
    with torch.no_grad():
        expected = net(torch.ones(2, 8))
    edge = WrappedModel(net)
    with pytest.raises(CutRefused, match="cannot be recorded"):
        edge.plan(torch.ones(2, 8))
    assert torch.equal(edge.forward(torch.ones(2, 8)), expected)
