"""Compiled modules are one layer: what torch.compile makes of them stays the same, observed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from shared_hooks import WrappedModel
from shared_hooks.modules.attach import COMPILED
from shared_hooks.observers import ActivationStats, Custom
from tests.shared_hooks.observers.left import hooks_left


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.linear(x)) + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), Inner(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.inner(self.before(x)))
        return out


@pytest.fixture
def graphs() -> Iterator[list[fx.GraphModule]]:
    """Every graph that `compiler` was given."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def compiler(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    def compile_it(graph: fx.GraphModule, _examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return compile_it


def test_a_module_compiled_in_place_is_one_layer(graphs: list[fx.GraphModule]) -> None:
    """Observers inside would break its graph in pieces, which ``fullgraph`` forbids."""
    model, x = Outer().eval(), torch.randn(2, 4)
    model.inner.compile(backend=compiler(graphs), fullgraph=True)
    compiled = vars(model.inner)[COMPILED]
    with torch.no_grad():
        wanted = model(x)
        for _ in range(2):
            with ActivationStats().attach(model) as stats, Custom(lambda *seen: seen[3]).attach(model) as names:
                assert torch.equal(model(x), wanted)
    assert [record.name for record in stats.records] == ["before", "inner", "after"]
    assert [record.value for record in names.records] == ["before", "inner", "after"] and not names.failures
    assert len(graphs) == 1 and vars(model.inner)[COMPILED] is compiled
    assert not hooks_left(model)


def test_a_model_compiled_in_place_is_seen_as_a_whole(graphs: list[fx.GraphModule]) -> None:
    model, x = Outer().eval(), torch.randn(2, 4)
    model.compile(backend=compiler(graphs), fullgraph=True)
    with torch.no_grad(), ActivationStats().attach(model) as stats:
        output = model(x)
    assert [(record.name, record.step) for record in stats.records] == [("(model)", 0)]
    assert stats.records[0].mean == pytest.approx(output.mean().item(), abs=1e-6) and not hooks_left(model)


def test_compilation_ignores_observers(graphs: list[fx.GraphModule]) -> None:
    model, x = Outer().eval(), torch.randn(2, 4)
    compiled = torch.compile(model, backend=compiler(graphs), fullgraph=True)
    with torch.no_grad():
        wanted = compiled(x)
        with ActivationStats().attach(model) as stats:
            assert torch.equal(compiled(x), wanted)
    made = [[node.target for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs]
    assert all(one == made[0] for one in made)
    assert stats.records == [] and not hooks_left(model)


def test_a_wrapped_model_takes_a_module_compiled_in_place(graphs: list[fx.GraphModule]) -> None:
    model, x = Outer().eval(), torch.randn(2, 4)
    model.inner.compile(backend=compiler(graphs))
    with WrappedModel(model) as wrapped:
        assert wrapped.verify(x).ok and [layer.name for layer in wrapped.layers] == ["before", "inner", "after"]
    assert not hooks_left(model)
