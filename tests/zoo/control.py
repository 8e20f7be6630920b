"""Control flow that depends on values, exceptions, early exits."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, call, vector, zoo


class Four(nn.Module):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))


def positive(draw: Draw) -> Call:
    return call(draw.randn(2, 8).abs() + 1)


def negative(draw: Draw) -> Call:
    return call(-draw.randn(2, 8).abs() - 1)


@zoo(positive, alternative=negative, listed=True, branches=True)
class BranchOnItem(Four):
    """`.item()` of the input chooses a layer in the middle; the value is also used in arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.mean().item()
        x = torch.tanh(self.a(x))
        x = self.b(x) if level > 0 else self.c(x) * 2
        return self.d(x) * level


@zoo(positive, alternative=negative, listed=True, branches=True)
class BranchOnHiddenItem(Four):
    """A value of a hidden layer decides, late, whether one more layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        score = hidden.sum() * 0 + x.sum()
        hidden = self.b(hidden)
        if score > 0:
            hidden = self.c(torch.relu(hidden))
        return self.d(hidden)


@zoo(positive, alternative=negative, listed=True, branches=True)
class EarlyReturn(Four):
    """A confident input leaves after two layers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(torch.tanh(self.a(x)))
        if bool((x > 0).all()):
            return hidden.softmax(-1)
        return self.d(torch.tanh(self.c(hidden)))


@zoo(negative, alternative=positive, listed=True, branches=True)
class EarlyReturnNotTaken(EarlyReturn):
    """The same model planned on an input that goes all the way."""


@zoo(vector, branches=True)
class DynamicLoop(Four):
    """`while h.norm() > c`: the number of layer calls depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * 10
        while x.norm() > 1.0:
            x = torch.tanh(self.b(x)) * (x.norm() * 0.3).clamp(max=3.0) / (1 + x.norm())
        return self.d(x)


@zoo(vector, branches=True)
class ModuleChosenByArgmax(nn.Module):
    """argmax indexes a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        rows = [self.experts[int(best)](row) for row, best in zip(x, scores.argmax(-1), strict=True)]
        return torch.stack(rows) * scores.max()


@zoo(vector)
class ConstantsCompared(Four):
    """A constant stands first: Python asks a placeholder first, and turns the comparison round."""

    def forward(self, x: Tensor) -> Tensor:
        level = torch.arange(8.0)
        hidden = self.a(x)
        above = (level >= hidden) | (level < hidden.sum()) | (hidden < 0.5)
        return self.c(self.b(hidden).masked_fill(above, 0.0))


@zoo(vector)
class WeightsChosenByATensor(Four):
    """A tensor that Python never looks at says which weights are taken; what is made of them crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        number = hidden.sum(-1).argmax() % 3
        weight = self.bank[number].float().half()
        hidden = self.b(hidden @ self.bank[number].float())
        return self.d(self.c(hidden) @ weight.float())


@zoo(vector, max_refused=0.5)
class ChosenWeightsReadLate(WeightsChosenByATensor):
    """The weights themselves would have to cross, as a part of the model's own."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        weight = self.bank[hidden.sum(-1).argmax() % 3].float()
        return self.d(self.c(self.b(hidden)) @ weight)


@zoo(positive, alternative=negative, branches=True)
class LiteralsFromTensors(Four):
    """float(), int(), tolist(), format and torch.tensor() of a value that was read."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        peak, sums = float(hidden.max()), hidden.sum(-1).tolist()
        hidden = self.b(hidden / peak)
        label = f"{int(hidden.sum()) % 2}"
        hidden = self.c(hidden) + torch.tensor(sums)[:, None]
        return self.d(hidden) * (2 if label == "1" else 1)


@zoo(vector, branches=True)
class EqualAndAllclose(Four):
    """torch.equal, torch.allclose, `in`, isnan().any()."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if torch.equal(hidden, x) or torch.allclose(hidden, x):
            hidden = hidden * 2
        hidden = self.b(hidden)
        if hidden.isnan().any() or not hidden.isfinite().all():
            hidden = torch.nan_to_num(hidden)
        return self.d(self.c(hidden) if hidden.is_floating_point() else hidden)


@zoo(vector, listed=True)
class CatchesException(Four):
    """Every layer is called under `except Exception`; one of them raises and is replaced."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("always")

    def __init__(self) -> None:
        super().__init__()
        self.failing = self.Failing()

    def attempt(self, layer: nn.Module, x: Tensor) -> Tensor:
        try:
            return layer(x)
        except Exception:
            return x * 0.5

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.failing, self.c, self.d):
            x = torch.tanh(self.attempt(layer, x))
        return x


@zoo(vector, max_refused=1.0, notes="a bare except swallows even the signal that stops the head")
class CatchesEverything(CatchesException):
    """`except BaseException` around every layer."""

    def attempt(self, layer: nn.Module, x: Tensor) -> Tensor:
        try:
            return layer(x)
        except BaseException:
            return x * 0.5


@zoo(vector)
class TryFinally(Four):
    """finally blocks and context managers that close while the head is stopped."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            try:
                x = self.b(torch.relu(self.a(x)))
            finally:
                x = x * 2
            with contextlib.suppress(KeyError):
                x = self.c(x)
                raise KeyError
        return self.d(x)


@zoo(vector)
class GeneratorInside(Four):
    """Layers run inside a generator."""

    def features(self, x: Tensor):  # type: ignore[no-untyped-def]
        for layer in (self.a, self.b, self.c):
            x = torch.tanh(layer(x))
            yield x

    def forward(self, x: Tensor) -> Tensor:
        return self.d(sum(self.features(x), torch.zeros(())))


@zoo(vector, max_refused=1.0, notes="layers called in threads that the model starts")
class ThreadsInside(Four):
    """Two branches run in a thread pool of the model's own."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)

        def branch(layer: nn.Module) -> Tensor:
            with torch.no_grad():
                return torch.tanh(layer(hidden))

        with ThreadPoolExecutor(1) as pool:
            one, two = (pool.submit(branch, layer).result() for layer in (self.b, self.c))
        return self.d(one + two)


@zoo(vector)
class SortedByValue(Four):
    """argsort, gather, unique-free data-dependent order without Python reads."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        order = hidden.argsort(-1)
        hidden = self.b(hidden.gather(-1, order))
        back = torch.empty_like(order).scatter_(-1, order, torch.arange(8).expand(2, 8))
        return self.d(self.c(hidden).gather(-1, back))


@zoo(vector, branches=True)
class ReadsInsideSubmodules(nn.Module):
    """Scalars are read inside submodules at two depths."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / max(1.0, x.abs().max().item())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = ReadsInsideSubmodules.Inner(), ReadsInsideSubmodules.Inner()

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.two(x) if x.min() < 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.again, self.last = self.Outer(), self.Outer(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.outer(x)))


@zoo(vector, branches=True)
class AdaptiveHalting(Four):
    """Rows stop at different steps; a mask of those running is narrowed."""

    def forward(self, x: Tensor) -> Tensor:
        running = torch.ones(len(x), dtype=torch.bool)
        for layer in (self.a, self.b, self.c):
            if not running.any():
                break
            x = x.clone()
            x[running] = torch.tanh(layer(x[running]))
            running = running & (x.mean(-1) < 0.3)
        return self.d(x)
