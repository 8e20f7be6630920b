"""What a forward leaves behind and no forward reads is no state, unless another path reads it first."""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(2, 8))
        self.kept: Tensor
        self.last = torch.zeros(2, 8)


class Last(Base):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            self.last = self.a(x)
        return self.b(self.last[:1] + self.a(x))


class LastByData(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x)
        return self.b(self.last if x.sum() > 0 else x)


class NewList(Base):
    """As RAFT's pyramid: a list that every run makes again, and fills bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.levels = [self.a(x)]
        self.levels.append(self.levels[0] * 2)
        return self.b(self.levels[0] + self.levels[1])


class SameList(NewList):
    """The old one is looked at before it goes."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.levels
        return super().forward(x) + before[0].sum()


class KeptList(NewList):
    """Another attribute holds on to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.levels

    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x) + self.first[-1].sum()
        self.first.append(answer)
        return answer


class Map:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class Larger(Map):
    def __init__(self, values: Tensor) -> None:
        super().__init__(values)


class Maps(Base):
    """As TAPAS: objects made in the forward call their base's ``__init__``, and Python reads data."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8

    def forward(self, x: Tensor) -> Tensor:
        rows = Larger(self.a(x))
        return self.b(rows.values) * self.width if rows.values.sum() > -1000 else x


@dataclass
class Sizes:
    width: int
    total: int = 0


class MakesSizes(Base):
    """As PEGASUS-X: an object that is made in the forward has attributes called like the modules' own."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.sized(x)
        return self.b(self.a(x)) * sizes.width if x.sum() > -1000 else x * self.width

    def sized(self, x: Tensor) -> Sizes:
        return Sizes(width=self.width)


class SetsSizes(MakesSizes):
    """One that is there before is set again from data."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Sizes(8)

    def sized(self, x: Tensor) -> Sizes:
        self.sizes.width = 8 if x.max() < 1000 else 9
        return self.sizes


class InitsSizes(SetsSizes):
    """The same by its ``__init__``."""

    def sized(self, x: Tensor) -> Sizes:
        self.sizes.__init__(8 if x.max() < 1000 else 9)  # type: ignore[misc]
        return self.sizes


class Grows(MakesSizes):
    """As a GPT of litgpt: a property may be set, and no forward does."""

    def __init__(self) -> None:
        super().__init__()
        self._longest = 8

    @property
    def longest(self) -> int:
        return self._longest

    @longest.setter
    def longest(self, value: int) -> None:
        self._longest = value

    def sized(self, x: Tensor) -> Sizes:
        return Sizes(self.longest)


class GrowsByData(Grows):
    def sized(self, x: Tensor) -> Sizes:
        self.longest = 8 if x.max() < 1000 else 9
        return super().sized(x)


class GrowsByName(Grows):
    name = "long" + "est"

    def sized(self, x: Tensor) -> Sizes:
        setattr(self, self.name, 8 if x.max() < 1000 else 9)
        return super().sized(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = width
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class Doubles(MakesSizes):
    """What torch hands to a function of its own has an attribute called like the module's."""

    def sized(self, x: Tensor) -> Sizes:
        return Sizes(int(Doubled.apply(x, self.width).shape[-1]))  # type: ignore[no-untyped-call]


class DoublesSelf(MakesSizes):
    """A function that is called with the module in a context's place."""

    def sized(self, x: Tensor) -> Sizes:
        Doubled.forward(self, x, 8 if x.max() < 1000 else 9)
        return Sizes(self.width)


@dataclass
class Derived:
    width: int
    total: int = 0

    def __post_init__(self) -> None:
        self.total = 2 * self.width


class Configured(MakesSizes):
    """As Jamba of mambapy: a configuration works out some of its fields when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Derived(4)

    def sized(self, x: Tensor) -> Sizes:
        return Sizes(self.sizes.total)


class Reconfigured(Configured):
    def sized(self, x: Tensor) -> Sizes:
        self.sizes.width = 4 if x.max() < 1000 else 5
        self.sizes.__post_init__()
        return super().sized(x)


class ToItsDevice(Base):
    """As experts that are sent to where their input is: each parameter is assigned what it holds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b.to(x.device)(self.a.to(x.device)(x))


class Rescaled(Base):
    """As RWKV: the first forward changes weights, and notes that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def change(self) -> None:
        self.b.weight.div_(2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.change()
            self.done = True
        return self.b(self.a(x) + self.kept.sum())


class FillsBuffer(Rescaled):
    def change(self) -> None:
        self.kept.copy_(torch.arange(16).view(2, 8))


class OtherMemory(Rescaled):
    def change(self) -> None:
        self.b.weight.data = self.b.weight.data * 3


class Shrinking(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.mul_(0.5)
        return self.b(self.a(x))


class Membrane(Base):
    """As a spiking neuron's: a number before the first step, put back at the beginning of each run."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.potential, Tensor) and self.potential.device.type == "cpu":
            self.potential = 0.0
        total = torch.zeros(())
        for _ in range(3):
            self.potential = self.potential + self.a(x)
            spike = (self.potential > 0.5).float()
            self.potential = self.potential * (1 - spike)
            total = total + self.b(spike)
        return total


class KeepsPotential(Membrane):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            self.potential = self.potential + self.a(x)
        return self.b(x) * self.potential


class BufferSetAgain(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.a(x)
        return self.b(self.kept)


class AnotherPathByShape(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.zeros_like(self.last)
        if self.last.shape != x.shape:
            self.last = torch.zeros_like(x)
        self.last = self.last + self.a(x)
        return self.b(self.last)


class ScalesByShape(Base):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.last.dim() + len(self.last)
        self.last = self.a(x)
        return self.b(self.last) * scale


class SetsEntries(Base):
    """As the heads of a network under deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = [torch.zeros(1), torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.levels[0] = self.a(x)
        self.levels[1] = self.b(self.levels[0])
        return self.levels[1]


class SetsOneEntry(SetsEntries):
    def forward(self, x: Tensor) -> Tensor:
        last = self.levels[1].sum()
        self.levels[1] = self.a(x)
        return self.b(self.levels[1]) + last


class Appends(SetsEntries):
    def forward(self, x: Tensor) -> Tensor:
        self.levels.append(self.a(x))
        return self.b(self.levels[-1])


class Queues(Base):
    """The last two; what was there before the last is read in another run."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = collections.deque([torch.zeros(1)], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.levels.append(self.a(x))
        return self.b(self.levels[-1])


class CountsEntries(SetsEntries):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(self.levels)


def cuts(model: WrappedModel, rows: int) -> list[bool]:
    model.plan(torch.ones(rows, 8))
    return [layer.can_split for layer in model.layers]


def test_attribute_reset_by_each_run_is_no_state_unless_read_first() -> None:
    for order in ((2, 3, 2), (3, 2, 3)):
        model = WrappedModel(Last().eval())
        for rows in order:
            found = cuts(model, rows)
        assert all(found) == (order[-1] == 2), order
        assert any(found) == (order[-1] == 2), order


def test_a_list_made_again_is_no_state_but_one_that_continues_is() -> None:
    assert all(cuts(WrappedModel(NewList().eval()), 2))
    assert not any(cuts(WrappedModel(SameList().eval()), 2))
    assert not any(cuts(WrappedModel(KeptList().eval()), 2))


def test_attribute_set_in_init_is_not_set_by_forward() -> None:
    assert all(cuts(WrappedModel(Maps().eval()), 2))
    assert all(cuts(WrappedModel(MakesSizes().eval()), 2))
    assert not any(cuts(WrappedModel(SetsSizes().eval()), 2))
    assert not any(cuts(WrappedModel(InitsSizes().eval()), 2))


@pytest.mark.parametrize("kind", [Grows, Doubles, Configured, ToItsDevice])
def test_attribute_never_set_by_forward_is_no_state(kind: type[Base]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    edge = WrappedModel(model)
    assert all(cuts(edge, 2))
    x = torch.randn(2, 8)
    cloud = WrappedModel(copy.deepcopy(model))
    for cut in range(len(edge.layers)):
        assert torch.equal(cloud.tail(edge.head(cut, x)), edge.forward(x))


@pytest.mark.parametrize("kind", [GrowsByData, GrowsByName, DoublesSelf, Reconfigured])
def test_attribute_set_from_data_is_state(kind: type[Base]) -> None:
    assert not any(cuts(WrappedModel(kind().eval()), 2))


def test_where_data_decides_nothing_is_proven() -> None:
    assert not any(cuts(WrappedModel(LastByData().eval()), 2))


def test_planning_leaves_weights_as_they_were() -> None:
    model = Shrinking().eval()
    before = model.b.weight.clone()
    assert not any(cuts(WrappedModel(model), 2))
    assert torch.equal(model.b.weight, before)


@pytest.mark.parametrize("kind", [Rescaled, FillsBuffer, OtherMemory])
def test_a_note_of_what_the_first_forward_wrote_does_not_stay_alone(kind: type[Rescaled]) -> None:
    def build() -> Rescaled:
        torch.manual_seed(0)
        return kind().eval()

    x = torch.ones(2, 8)
    with torch.no_grad():
        expected = build()(x)
    model = WrappedModel(build())
    assert not any(cuts(model, 2))
    assert "once" in model.layers[0].reason
    assert torch.equal(model.forward(x), expected)
    pair = [build(), build()]
    with torch.no_grad():
        for one in pair:
            one(x)
    edge, cloud = map(WrappedModel, pair)
    assert all(cuts(edge, 2))
    for cut in range(2):
        assert torch.equal(cloud.tail(edge.head(cut, x)), expected)


@pytest.mark.parametrize("kind", [Membrane, BufferSetAgain, SetsEntries])
def test_attribute_reset_by_each_run_is_no_state_after_other_runs(kind: type[Base]) -> None:
    def build() -> Base:
        torch.manual_seed(0)
        return kind().eval()

    edge, cloud = WrappedModel(build()), WrappedModel(build())
    for rows in (2, 3, 1, 3):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            expected = build()(x)
        assert all(cuts(edge, rows))
        for cut in range(len(edge.layers)):
            assert torch.equal(cloud.tail(edge.head(cut, x)), expected)


@pytest.mark.parametrize(
    "kind",
    [
        KeepsPotential, AnotherPathByShape, ScalesByShape, SetsOneEntry, CountsEntries, Appends, Queues,
    ],
)  # fmt: skip
def test_attribute_depending_on_the_last_run_is_state(kind: type[Base]) -> None:
    assert not any(cuts(WrappedModel(kind().eval()), 3))


class Iterates(Base):
    def __init__(self, steps: Iterator[Any]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * next(self.steps, 1)


def spent(steps: Iterator[Any]) -> Iterator[Any]:
    next(steps, None)
    if not isinstance(steps, type(iter([]))):
        list(steps)
    return steps


def steps() -> Iterator[int]:
    yield from (1, 1, 1)


@pytest.mark.parametrize("make", [lambda: iter([]), lambda: iter([1]), lambda: iter({1: 2}), steps, lambda: iter((1,))])
def test_an_iterator_that_has_given_all_is_no_state(make: Callable[[], Iterator[Any]]) -> None:
    assert all(cuts(WrappedModel(Iterates(spent(make())).eval()), 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 1]), steps, lambda: iter({1: 1}), lambda: itertools.repeat([]), lambda: map(int, "111"),
        lambda: enumerate("111"), lambda: zip([1, 1], [1, 1], strict=True), lambda: reversed([1, 1]),
    ],
)  # fmt: skip
def test_planning_takes_nothing_from_an_iterator(make: Callable[[], Iterator[Any]]) -> None:
    model = Iterates(make())
    with pytest.raises(CutRefused, match="put back"):
        WrappedModel(model.eval()).plan(torch.ones(2, 8))
    assert str(next(model.steps)) == str(next(make()))


class FillsOnce(Base):
    """Means that its first forward takes from what it is given, noted in a buffer, as some write it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.ready: Tensor

    def fill(self, means: Tensor) -> None:
        self.kept.copy_(means)
        self.ready.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if not self.ready:
            self.fill(x.mean(0).expand(2, 8))
        return self.b(x - self.kept[0])


class FillsPastCounters(FillsOnce):
    def fill(self, means: Tensor) -> None:
        self.kept.data.copy_(means)
        self.ready.data.fill_(True)


class PutsOther(FillsOnce):
    def fill(self, means: Tensor) -> None:
        self.kept.data, self.ready.data = means.clone(), torch.tensor(True)


class FillsByData(FillsPastCounters):
    def forward(self, x: Tensor) -> Tensor:
        self.ready.data.fill_(x[0, 0] < 0)
        return super().forward(x)


class FillsRarely(FillsPastCounters):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if x.sum() > 0:
            self.kept.data.copy_(y.mean(0).expand(2, 8))
        return self.b(y - self.kept[0])


@pytest.mark.parametrize("kind", [FillsOnce, FillsPastCounters, PutsOther, FillsByData])
def test_attribute_filled_from_the_first_input_is_refused(kind: type[FillsOnce]) -> None:
    model = WrappedModel(kind().eval())
    before = copy.deepcopy(model.model.state_dict())
    assert not any(cuts(model, 2))
    assert all(torch.equal(one, before[name]) for name, one in model.model.state_dict().items())


def test_writes_past_version_counters_are_restored() -> None:
    edge, cloud = (WrappedModel(FillsRarely().eval()) for _ in range(2))
    edge.model.load_state_dict(cloud.model.state_dict())
    edge.plan(-torch.ones(2, 8))
    before = copy.deepcopy(edge.model.state_dict())
    for cut in ("input", 0, 1):
        assert torch.equal(cloud.tail(edge.head(cut, -torch.ones(2, 8))), edge.forward(-torch.ones(2, 8)))
        with pytest.raises(IsthmusError):
            cloud.tail(edge.head(cut, torch.ones(2, 8)))
        for model in (edge, cloud):
            assert all(torch.equal(one, before[name]) for name, one in model.model.state_dict().items())
