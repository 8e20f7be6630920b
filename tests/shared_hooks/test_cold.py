"""The tail's side has never run the model, and its generators stand elsewhere: each cut is exact, or refused."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import BadFrame, CutRefused, InputMismatch, IsthmusError
from shared_hooks.tensors.trees import flatten, unflatten


class Memo(nn.Module):
    """The model sets a list before the call, to which the layer appends: on the class it is None."""

    class Layer(nn.Module):
        memo: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.lin(x))
            self.memo.append(y)
            return y

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList(self.Layer() for _ in range(3))
        self.o = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        memo: list[Tensor] = []
        for layer in self.l:
            layer.memo = memo
            x = layer(x)
        return self.o(x) + sum(memo)


class MemoMissing(Memo):
    """No such attribute at all before the first call."""

    class Layer(Memo.Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.lin(x))
            self.notes.append(y)
            return y

    def forward(self, x: Tensor) -> Any:
        memo: list[Tensor] = []
        for layer in self.l:
            layer.notes = memo  # type: ignore[assignment]
            x = layer(x)
        return self.o(x) + sum(memo)


class Cache:
    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def append(self, y: Tensor) -> None:
        self.held.append(y)


class MemoObject(Memo):
    def forward(self, x: Tensor) -> Any:
        memo = Cache()
        for layer in self.l:
            layer.memo = memo
            x = layer(x)
        return self.o(x) + sum(memo.held)


class Drawing(nn.Module):
    """The layer draws from a generator that the model hands it by an attribute."""

    class Layer(nn.Module):
        source: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) + torch.rand(8, generator=self.source)

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList(self.Layer() for _ in range(3))
        self.o = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        source = torch.Generator().manual_seed(5)
        for layer in self.l:
            layer.source = source
            x = layer(x)
        return self.o(x)


class DrawingNumpy(Drawing):
    class Layer(Drawing.Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) * float(self.source.random())

    def forward(self, x: Tensor) -> Any:
        source = np.random.default_rng(5)
        for layer in self.l:
            layer.source = source
            x = layer(x)
        return self.o(x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class MaskByData(Two):
    """A constant, written where data say."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        m = torch.ones(2, 8)
        for i, k in enumerate(h.argmax(1)):
            m[i, k] = 0
        return self.c(self.b(h) * m)


class SliceByData(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        w = torch.zeros(8)
        w[int(h[0].argmax()) :] = 1
        return self.c(self.b(h) * w)


class NarrowByData(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        w = torch.zeros(8)
        w.narrow(0, int(h[0].argmax()) // 2, 2).fill_(1)
        return self.c(self.b(h) * w)


class NarrowByTensor(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        w = torch.zeros(8)
        w.narrow(0, h[0].argmax() // 2, 2).fill_(1)
        return self.c(self.b(h) * w)


class IndexByData(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        w = torch.zeros(8)
        w[h[0].argmax()] = 1
        return self.c(self.b(h) * w)


class LeavesWriting(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        try:
            y = self.b(h)
        finally:
            h.add_(1)
        return self.c(y + h)


@contextlib.contextmanager
def doubled(h: Tensor) -> Iterator[None]:
    try:
        yield
    finally:
        h.mul_(2)


class LeavesByContext(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        with doubled(h):
            y = self.b(h)
        return self.c(y + h)


class Threads(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.tanh(h)))
        thread.start()
        thread.join()
        return self.c(self.b(h) + found[0])


class ThreadsBehind(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.tanh(h)))
        thread.start()
        thread.join()
        return self.c(h + found[0])


class KeepsGenerator(Two):
    def forward(self, x: Tensor) -> Any:
        state = torch.get_rng_state()
        h = self.b(self.a(x) + torch.rand(8))
        torch.set_rng_state(state)
        return self.c(h + torch.rand(8))


class Forks(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.random.fork_rng(devices=[]):
            h = self.b(self.a(x))
        return self.c(h + torch.rand(8))


class ForksAndDraws(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.random.fork_rng(devices=[]):
            h = self.b(self.a(x) + torch.rand(8))
        return self.c(h + torch.rand(8))


class Asks(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.b(h)
        return self.c(y) + (1.0 if h.requires_grad else 0.0)


class AsksVersion(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h.add_(1)
        y = self.b(h)
        return self.c(y) + float(h._version)


class AsksVersionBefore(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h.add_(1)
        version = h._version
        return self.c(self.b(h)) * float(version) + h


class AsksOffset(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)[1:]
        y = self.b(h)
        return self.c(y) * h.storage_offset()


class AsksOffsetBefore(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)[1:]
        offset = h.storage_offset()
        return self.c(self.b(h)) * offset + h


class AsksBase(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        v = h.view(-1)
        y = self.b(h)
        return self.c(y) + (1.0 if v._base is h else 0.0)


class Other(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [one.as_subclass(Tensor) * 0.5 if isinstance(one, Other) else one for one in args]
        return func(*args, **(kwargs or {}))


class ChangesClass(Two):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x) + self.p)
        self.p.__class__ = Other  # type: ignore[assignment]
        return self.c(h + self.p)


class Flushing(Two):
    def forward(self, x: Tensor) -> Any:
        torch.set_flush_denormal(True)
        h = self.b(self.a(x))
        torch.set_flush_denormal(False)
        return self.c(h) * 1e-38 * 1e-3 * 1e38


class Replacing(Two):
    def forward(self, x: Tensor) -> Any:
        relu = torch.nn.functional.relu
        torch.nn.functional.relu = torch.nn.functional.silu  # type: ignore[assignment]
        h = torch.nn.functional.relu(self.b(self.a(x)))
        torch.nn.functional.relu = relu  # type: ignore[assignment]
        return torch.nn.functional.relu(self.c(h))


class Grows(Two):
    """A table for the longest input that was seen, of which shorter ones take a part that depends on its length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, x: Tensor) -> Any:
        if x.shape[0] > len(self.table):
            self.table = torch.linspace(0, 1, x.shape[0])
        return self.c(self.b(self.a(x)) * self.table[: x.shape[0], None])


class Counts(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        Counts.calls += 1
        return x * Counts.calls

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class CountsInFunction(Two):
    def forward(self, x: Tensor) -> Any:
        Counts.calls = 0
        h = Counts.apply(self.a(x))
        h = Counts.apply(self.b(h))
        return self.c(Counts.apply(h))


class Scripted(nn.Module):
    """A script writes an attribute of its module."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x[0]
            return x * 2

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.s = torch.jit.script(self.Inner())

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.s(self.a(x)))
        return h + self.s.seen


class Conjugates(nn.Module):
    """Complex inputs with the conjugate bit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, z: Tensor) -> Any:
        return self.b(self.a(torch.view_as_real(z.resolve_conj()).flatten(1))) + z.imag.sum() + z.real.mean()


MODELS: list[type[nn.Module]] = [
    *(Memo, MemoMissing, MemoObject, Drawing, DrawingNumpy, MaskByData, SliceByData, NarrowByData, NarrowByTensor),
    *(IndexByData, LeavesWriting, LeavesByContext, Threads, ThreadsBehind, KeepsGenerator, Forks, ForksAndDraws, Asks),
    *(AsksVersion, AsksVersionBefore, AsksOffset, AsksOffsetBefore),
    *(AsksBase, ChangesClass, Flushing, Replacing, Grows, CountsInFunction, Scripted),
]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def whole(kind: Callable[[], nn.Module], x: Tensor) -> Any:
    """Return the output of a model that never ran before."""
    torch.manual_seed(1)
    with torch.no_grad():
        return made_then_seeded(kind)(x.clone() if not x.is_conj() else x)


def made_then_seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    model = made(kind)
    torch.manual_seed(1)
    return model


def cold(kind: Callable[[], nn.Module], inputs: list[Tensor]) -> tuple[int, list[str]]:
    """How many answers were exact, and which were wrong: at each cut, a new edge, a new cold cloud."""
    exact, wrong = 0, []
    with WrappedModel(made(kind)) as first:
        with contextlib.suppress(IsthmusError):
            first.plan(inputs[0])
        try:
            cuts: list[Any] = ["input", *(layer.name for layer in first.layers)]
        except IsthmusError:
            return 0, []
    for cut in cuts:
        with WrappedModel(made(kind)) as edge, WrappedModel(made(kind)) as cloud:
            for number, x in enumerate(inputs):
                wanted = whole(kind, x)
                try:
                    torch.manual_seed(1)
                    edge.plan(x)
                    torch.manual_seed(1)
                    data = edge.head(cut, x).to_bytes()
                    torch.manual_seed(2)
                    found = cloud.tail(EarlyOutput.from_bytes(data))
                except IsthmusError:
                    continue
                if torch.equal(found, wanted):
                    exact += 1
                else:
                    wrong.append(f"{cut}, request {number}")
    return exact, wrong


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    relu = torch.nn.functional.relu
    yield
    torch.nn.functional.relu = relu
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", MODELS)
def test_exact_or_refused(kind: type[nn.Module]) -> None:
    inputs = [torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    if kind is Grows:
        inputs = [torch.randn(rows, 8) for rows in (3, 5, 3)]
    assert cold(kind, inputs)[1] == []


@pytest.mark.parametrize("turn", [lambda z: z.conj(), lambda z: z.conj().transpose(0, 1).contiguous().T, lambda z: z])
def test_an_input_with_the_conjugate_bit(turn: Callable[[Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = [turn(torch.view_as_complex(torch.randn(2, 4, 2, generator=generator))) for _ in range(2)]
    _, wrong = cold(Conjugates, inputs)
    assert wrong == []


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))])
def test_a_refusal_of_a_model_in_training_says_what_to_do(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)).train()
    with pytest.raises(CutRefused, match=r"training mode: call its eval\(\) \(.*outlives the forward"):
        WrappedModel(model).head("0", torch.randn(3, 4))
    assert WrappedModel(model.eval()).verify(torch.randn(3, 4)).ok
    dropped = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    assert WrappedModel(dropped).verify(torch.randn(3, 4)).ok  # the generator's state crosses


def test_a_lazy_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)).eval()
    with pytest.raises(InputMismatch, match=r"1\.weight, 1\.bias: a lazy layer has no weights yet: run the model once"):
        WrappedModel(model)
    model(torch.randn(2, 4))
    assert WrappedModel(model).verify(torch.randn(2, 4)).ok


class Mapped(nn.Module):
    """Its layers run inside of a transform of torch.func; the last does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.vmap(self.inner)(self.first(values)))


def test_behind_a_transform_of_torch_func_no_cut_is_planned() -> None:
    report = WrappedModel(Mapped().eval()).verify(torch.randn(3, 4))
    assert [one.name for one in report.exact] == ["first"] and report.input_exact
    assert [one.name for one in report.refused] == ["inner", "last"]
    assert all("inside torch.vmap" in one.reason for one in report.refused)


class Option(enum.IntFlag):
    PLUS = 1
    TWICE = 2
    NOT = 4


class Optional_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor, option: Option) -> Tensor:
        values = self.last(self.first(values) + (1 if option & Option.PLUS else 0))
        return values * 2 if Option.TWICE in option else values


@pytest.mark.parametrize("option", [Option.PLUS, Option.PLUS | Option.TWICE, Option(0)])
def test_flags_among_the_inputs(option: Option) -> None:
    report = WrappedModel(Optional_().eval()).verify(torch.randn(3, 4), option)
    assert report.ok and len(report.exact) == 2, report
    rebuilt = unflatten(flatten(option)[0], [], lambda name: Option)
    assert rebuilt == option and type(rebuilt) is Option


@pytest.mark.parametrize("number", [8, -1, 1 << 200])
def test_flags_that_a_class_does_not_have_are_no_flags(number: int) -> None:
    with pytest.raises(BadFrame, match="no combination"):
        unflatten(["enum", "m:Option", number], [], lambda name: Option)


class Noted:
    def __init__(self, value: float) -> None:
        self.value = value

    def read(self) -> float:
        return self.value


class Counted(int):
    """A number with attributes."""


HOLDERS: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "list": (lambda number: [number], lambda held: held[0]),
    "deep": (lambda number: [[{"a": (number,)}]], lambda held: held[0][0]["a"][0]),
    "key": (lambda number: {number: None}, lambda held: next(iter(held))),
    "set": (lambda number: {number}, max),
    "object": (Noted, lambda held: held.value),
    "closure": (lambda number: lambda: number, lambda held: held()),
    "partial": (lambda number: functools.partial(float, number), lambda held: held()),
    "method": (lambda number: Noted(number).read, lambda held: held()),
    "builtin": (lambda number: [number].copy, lambda held: held()[0]),
    "default": (lambda number: lambda value=number: value, lambda held: held()),
    "keyword": (lambda number: lambda *, value=number: value, lambda held: held()),
    "exception": (ValueError, lambda held: held.args[0]),
    "subclass": (lambda number: Counted(number > 0.5), float),
    "matrix": (lambda number: np.ma.array([number]), lambda held: float(held[0])),
    "array": (lambda number: np.full(1, number), lambda held: float(held[0])),
    "scalar": (lambda number: np.int64(number > 0.5), float),
    "slice": (lambda number: slice(int(number > 0.5) + 1), lambda held: held.stop),
    "dtype": (lambda number: torch.float16 if number > 0.5 else torch.float32, lambda held: held.itemsize),
}


class Remembers(nn.Module):
    """Keeps a number of its first input in a holder, for good."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.make, self.take = HOLDERS[holder]
        self.kept: Any = None

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        if self.kept is None:
            self.kept = self.make(float(values.detach().max()))
        return self.last(values) * self.take(self.kept)


@pytest.mark.parametrize("holder", sorted(HOLDERS))
def test_a_number_of_data_that_is_kept_is_state_wherever_it_lies(holder: str) -> None:
    report = WrappedModel(Remembers(holder).eval()).verify(torch.randn(3, 4))
    assert len(report.refused) == 2 and not report.exact, report
    assert all("keeps state" in one.reason and "kept" in one.reason for one in report.refused)


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)


class KeepsInContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values * VARIABLE.get())
        VARIABLE.set(1 + bool(values.sum() > 0))
        return self.last(values)


def test_a_number_of_data_in_a_context_variable_is_state() -> None:
    report = WrappedModel(KeepsInContext().eval()).verify(torch.randn(3, 4))
    assert len(report.refused) == 2 and not report.exact, report


class PutsBack(nn.Module):
    """Draws on a path that data lead to, and puts the generator back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        if values.sum() > 100:
            state = torch.get_rng_state()
            values = values + torch.rand(4)
            torch.set_rng_state(state)
        return self.last(values)


def test_a_generator_that_is_put_back_on_a_path_not_taken() -> None:
    report = WrappedModel(PutsBack().eval()).verify(torch.randn(3, 4))
    assert len(report.refused) == 2 and not report.exact, report
    assert all("a generator's state in hand" in one.reason for one in report.refused)
