"""Compiled tails: used once they were compared, equal where they must be, given up where anything is amiss.

torch's own interpreting backends stand for the compiler here, which takes a minute; one that lies stands for its bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.compiling import CompiledModule, CompiledTails, Graphed, difference, twin
from shared_hooks.errors import ServerUnavailable
from tests.waiting import eventually

torch.manual_seed(3)
SHAPE = (2, 8)


class Counting(nn.Module):
    """Writes state, so it cannot be compiled; what it calls can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        self.calls = 0
        return out


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def model(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *(middle or (block(), nn.Tanh(), block()))).eval()


def parts(early: EarlyOutput) -> tuple[bytes, memoryview]:
    parcel = early.pack("raw")
    return parcel.header, memoryview(b"".join(bytes(one) for one in parcel.buffers))


@contextmanager
def tails(made: nn.Module, **options: Any) -> Iterator[tuple[WrappedModel, CompiledTails]]:
    with WrappedModel(made) as wrapped:
        compiled = CompiledTails(
            wrapped, **{"rounding": False, "backend": "aot_eager", "wins": lambda *_: True, **options}
        )
        compiled.add(wrapped.head("0", torch.randn(SHAPE)))
        try:
            yield wrapped, compiled
        finally:
            compiled.close()


def asked(wrapped: WrappedModel, compiled: CompiledTails, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A request as a server computes it; whether a compiled tail was used."""
    early = wrapped.head("0", x)
    found = compiled.of(early.crossing, *parts(early))
    return wrapped.tail(early, substitutes=found), found is not None


def standing(compiled: CompiledTails) -> str:
    ((word, _),) = compiled.standings().values()
    return word


def settled(compiled: CompiledTails) -> str:
    eventually(lambda: standing(compiled) != "compiling")
    return standing(compiled)


def used(wrapped: WrappedModel, compiled: CompiledTails) -> None:
    """Asks until it is."""
    assert settled(compiled) == "checking", compiled.standings()

    def again() -> bool:
        out, _ = asked(wrapped, compiled, x := torch.randn(SHAPE))
        assert torch.equal(out, wrapped.whole(x))
        return standing(compiled) == "used"

    assert not asked(wrapped, compiled, torch.randn(SHAPE))[1], "first it is compared on what comes"
    eventually(again)


@pytest.mark.parametrize("middle", [(), (Counting(),)], ids=["blocks", "inside of what cannot be"])
def test_compiled_tail_is_used_after_equal_comparisons(middle: tuple[nn.Module, ...]) -> None:
    with tails(model(*middle)) as (wrapped, compiled):
        used(wrapped, compiled)
        for _ in range(3):
            out, was = asked(wrapped, compiled, x := torch.randn(SHAPE))
            assert was and torch.equal(out, wrapped.whole(x))
        other = wrapped.head("0", torch.randn(3, 8))
        assert compiled.of(other.crossing, *parts(other)) is None, "another batch is another tail"


def lying(error: float, after: int = 0) -> Callable[..., Any]:
    """A compiler whose code is wrong by so much from the n-th call on."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        calls = []

        def run(*args: Any) -> Any:
            calls.append(1)
            return [one * (1 + (error if len(calls) > after else 0)) for one in graph(*args)]

        return run

    return backend


@pytest.mark.parametrize(
    ("error", "after", "rounding", "says"),
    [
        (1e-6, 0, False, "last bits differ"),
        (1e-2, 0, True, "more than 0.0001"),
        (1e-2, 4, True, "more than 0.0001"),
        (float("nan"), 0, True, "not finite"),
    ],
)
def test_differing_compilation_is_refused(error: float, after: int, rounding: bool, says: str) -> None:
    """Also where that shows on live values only; nobody's answer is other than the model's own."""
    with tails(model(block()), backend=lying(error, after), rounding=rounding) as (wrapped, compiled):
        settled(compiled)

        def again() -> bool:
            out, was = asked(wrapped, compiled, x := torch.randn(SHAPE))
            assert not was and torch.equal(out, wrapped.whole(x))
            return standing(compiled) == "refused"

        eventually(again)
        assert says in next(iter(compiled.standings().values()))[1]


def test_rounding_within_bounds_is_used_where_it_is_allowed() -> None:
    with tails(model(block()), backend=lying(1e-6), rounding=True) as (wrapped, compiled):
        assert settled(compiled) == "checking"
        eventually(lambda: asked(wrapped, compiled, torch.randn(SHAPE))[1])
        out, _ = asked(wrapped, compiled, x := torch.randn(SHAPE))
        assert not torch.equal(out, wrapped.whole(x)) and not difference(out, wrapped.whole(x), rounding=True)


def test_compilation_without_gain_is_not_used() -> None:
    asked_for: list[tuple[float, float]] = []
    with tails(model(), wins=lambda own, other: asked_for.append((own, other)) is not None) as (wrapped, compiled):
        assert settled(compiled) == "checking"
        eventually(lambda: not asked(wrapped, compiled, torch.randn(SHAPE))[1] and standing(compiled) == "refused")
        assert asked_for and "no faster" in next(iter(compiled.standings().values()))[1]


def broken(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no C++ compiler")


def test_without_a_compiler_the_reason_is_reported() -> None:
    with tails(model(), backend=broken) as (wrapped, compiled):
        assert settled(compiled) == "refused"
        assert "no C++ compiler" in next(iter(compiled.standings().values()))[1]
        assert not asked(wrapped, compiled, torch.randn(SHAPE))[1]


def test_nothing_is_compiled_while_a_request_runs() -> None:
    """What has another form than before runs as it is, and the compiled one is given up."""
    made = block().eval()
    compiled = CompiledModule(made, "aot_eager")
    with torch.no_grad():
        x, y = torch.randn(2, 8), torch.randn(5, 8)
        assert torch.equal(compiled(made.forward, (x,), {}), made(x))
        compiled.built(graphs=False)
        assert torch.equal(compiled(made.forward, (y,), {}), made(y))
        assert "RecompileLimit" in compiled.why


def test_failure_during_a_compiled_run_is_retried_uncompiled() -> None:
    """It may have written to what it was given: nobody is answered from that."""
    made, calls = block().eval(), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("illegal memory access")
            return graph(*args)

        return run

    compiled = CompiledModule(made, backend)  # type: ignore[arg-type]
    with torch.no_grad():
        x = torch.randn(2, 8)
        compiled(made.forward, (x,), {})
        compiled.built(graphs=False)
        with pytest.raises(ServerUnavailable, match="ask again"):
            compiled(made.forward, (x,), {})
        assert torch.equal(compiled(made.forward, (x,), {}), made(x))


def test_modules_with_hooks_are_left_alone_and_twins_share_weights() -> None:
    made = block()
    handle = made[0].register_forward_hook(lambda *_: None)
    assert "has hooks" in CompiledModule(made, "eager").why
    handle.remove()
    with WrappedModel(made):
        copied = twin(made)
        assert all(a is b for a, b in zip(made.parameters(), copied.parameters(), strict=True))
        assert not any("forward" in one.__dict__ for one in copied.modules())


def test_observers_see_what_is_inside() -> None:
    """While somebody looks, the model's own modules run."""
    from shared_hooks.observers import named

    with tails(model()) as (wrapped, compiled):
        used(wrapped, compiled)
        with named.observing(wrapped, ("activation",)) as found:
            early = wrapped.head("0", torch.randn(SHAPE))
            wrapped.tail(early, substitutes=compiled.of(early.crossing, *parts(early)))
            plain = named.to_bytes(found())
        for inner in ("1.0", "1.2", "3.0", "3.2"):
            assert f'"{inner}"'.encode() in plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_gives_what_the_module_gives() -> None:
    made = block().eval().cuda()
    graphed = Graphed(made)
    with torch.no_grad():
        kept = []
        for _ in range(4):
            x = torch.randn(2, 8, device="cuda")
            kept.append((graphed(x), made(x)))
        assert graphed._graph is not None
        torch.testing.assert_close(*map(list, zip(*kept, strict=True)))
        other = torch.randn(3, 8, device="cuda")
        torch.testing.assert_close(graphed(other), made(other))


def test_on_a_processor_a_graph_runs_as_it_is() -> None:
    made = block()
    with torch.no_grad():
        x = torch.randn(2, 8)
        assert torch.equal(Graphed(made)(x), made(x))
