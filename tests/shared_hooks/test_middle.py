"""A middle part gives what a head gives at its end, bit for bit, and computes only what lies between its two cuts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import CutRefused, Disagreement, InputMismatch, UnknownLayer
from shared_hooks.models.digits.network import digits
from shared_hooks.modules import call_name, call_parts
from shared_hooks.planning import blocks
from tests.covering import ALL
from tests.shared_hooks.cutting import case_of, through_bytes
from tests.zoo import CASES, Case
from tests.zoo.compare import same

PAIRS = 12 if ALL else 3
AWKWARD = (
    *(
        "attribute_named_like_methods",
        "numbers_inabuffer_of_bytes",
        "preallocated_output",
        "monte_carlo_dropout",
        "monte_carlo_dropout_twice",
        "ambient_autocast",
        "branch_on_item",
    ),
    *(
        "try_finally",
        "odd_numbers_read",
        "layer_made_at_first_call",
        "writes_into_its_input",
        "reads_inside_submodules",
    ),
)
REFUSED = (
    # memory made before both cuts, which crosses the second only
    *("preallocated_output", "preallocated_uninitialised", "numbers_inabuffer_of_bytes"),
    *("writes_into_overlapping_input", "overlapping_inputs"),  # that inputs share memory a relay does not know
    "transformer_encoder_pre_norm_causal",  # a mask is looked at: is it causal?
)
SOME = [case for number, case in enumerate(CASES) if ALL or number % 8 == 0 or case.name in AWKWARD]


def parts_of(case: Case) -> tuple[WrappedModel, WrappedModel, WrappedModel]:
    first, second, third = (WrappedModel(case.build()) for _ in range(3))
    return first, second, third


def seeded(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(3)
    return case.inputs()


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_three_parts_are_the_model(case: Case) -> None:
    """From bytes to bytes; the relay and the cloud never saw an input. Refused by name is allowed, wrong is not."""
    edge, relay, cloud = parts_of(case)
    args, kwargs = seeded(case)
    with case.setting():
        edge.plan(*args, **kwargs)
        args, kwargs = seeded(case)
        expected = edge.whole(*args, **kwargs)
    cuts: list[int | str] = ["input", *range(len(edge.layers))]
    pairs = [(first, last) for number, first in enumerate(cuts) for last in cuts[number + 1 :]]
    random.Random(case.name).shuffle(pairs)
    for first, last in pairs[:PAIRS]:
        with case.setting():
            try:
                args, kwargs = seeded(case)
                direct = edge.forward(*args, end=last, **kwargs)
                args, kwargs = seeded(case)
                early = through_bytes(edge.forward(*args, end=first, **kwargs))
            except CutRefused:
                continue
            try:
                found = relay.forward(early, start=first, end=last)
                output = cloud.forward(through_bytes(found), start=last)
            except (CutRefused, Disagreement, UnknownLayer):
                data_decides = edge.plan(*seeded(case)[0], **seeded(case)[1]).trace.dynamic
                assert case.branches or case.loud or case.name in REFUSED or data_decides
                continue
        assert same(output, expected), (first, last)
        # a plan whose path depends on data may send more; and what nobody wrote is another in each run
        if found.crossing.digest == direct.crossing.digest and case.name != "preallocated_uninitialised":
            assert same(list(found.pieces), list(direct.pieces)), (first, last)
            assert found.values == direct.values and same(list(found.generators), list(direct.generators))


class Skips(nn.Module):
    """A skip connection from the first layer to the last, written in place on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x).relu_() + skip
            skip.mul_(0.5)
        return x + skip


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_twice() -> None:
    edge, first, second, cloud = (WrappedModel(Skips().eval()) for _ in range(4))
    x = torch.randn(3, 8)
    cuts = ["layers.1", "layers.2", "layers.4"]
    for early_at, later in ((None, cuts[0]), *pairwise(cuts), (cuts[2], None)):  # plan and rehearse before it counts
        early = None if early_at is None else edge.forward(x, end=early_at)
        first.forward(*[early] if early else [x], end=later)
        second.forward(*[early] if early else [x], end=later)
        cloud.forward(*[early] if early else [x], end=later)
    counts, names = [], []
    given: Any = x
    for part, later in zip((edge, first, second, cloud), (*cuts, None), strict=True):
        with Products() as products:
            given = part.forward(given, end=later)
        counts.append(products.count)
        names.append([metric.name for metric in part.get_layer_metrics()])
        given = through_bytes(given) if later else given
    with torch.no_grad():
        assert torch.equal(given, Skips().eval()(x))
    assert counts == [2, 1, 2, 1]
    assert names == [["layers.0", "layers.1"], ["layers.2"], ["layers.3", "layers.4"], ["layers.5"]]


@pytest.fixture(scope="module")
def pair() -> tuple[WrappedModel, EarlyOutput]:
    torch.manual_seed(0)
    wrapped = WrappedModel(digits().eval())
    return wrapped, wrapped.forward(torch.rand(1, 1, 32, 32), end="stage2.0")


def test_empty_middle_part(pair: tuple[WrappedModel, EarlyOutput]) -> None:
    wrapped, early = pair
    assert wrapped.forward(early, end=early.layer_name) is early
    assert wrapped.forward(early, start=early.layer_id, end=early.layer_id) is early


@pytest.mark.parametrize(
    ("start", "end", "error", "said"),
    [
        (None, "stage1.0.conv1", CutRefused, "comes before"),
        (None, "input", CutRefused, "comes before"),
        (None, "stage9", UnknownLayer, "no layer 'stage9'"),
        ("stage1.0.conv1", "stage3.0.conv1", UnknownLayer, "was cut at"),
    ],
)
def test_invalid_middle_part_is_refused_by_name(
    pair: tuple[WrappedModel, EarlyOutput], start: str | None, end: str, error: type[Exception], said: str
) -> None:
    wrapped, early = pair
    with pytest.raises(error, match=said):
        wrapped.forward(early, start=start, end=end)


def test_middle_part_takes_an_early_output(pair: tuple[WrappedModel, EarlyOutput]) -> None:
    with pytest.raises(InputMismatch, match="takes an EarlyOutput"):
        pair[0].forward(torch.rand(1, 1, 32, 32), start="stage1.0.conv1", end="stage3.0.conv1")


def test_another_path_than_this_sides_is_refused() -> None:
    case = case_of("branch_on_item")
    edge, relay, _ = parts_of(case)
    for inputs in (case.inputs(), case.other_inputs()):
        args, kwargs = inputs
        early = edge.forward(*args, end="input", **kwargs)
        direct = edge.forward(*args, end=2, **kwargs)
        try:
            found = relay.forward(early, start="input", end=2)
        except CutRefused:
            continue
        assert same(list(found.pieces), list(direct.pieces))


class Named(nn.Module):
    """Layers of any names, each called twice."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(layer(x).tanh())
        return x


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("input", "out"), ["input#1", "input#2", "out", "out#2"]),  # "input" is the cut before any layer
        (("a", "a#2"), ["a", "a#2", "a#2#1", "a#2#2"]),
        (("1", "0"), ["1", "1#2", "0", "0#2"]),
        (("(model)", "cloud-only"), ["(model)#2", "(model)#3", "cloud-only", "cloud-only#2"]),
    ],
)
def test_each_cut_has_a_name_of_its_own(names: tuple[str, ...], shown: list[str]) -> None:
    wrapped, x = WrappedModel(Named(names).eval()), torch.randn(2, 4)
    expected = wrapped.whole(x)
    wrapped.plan(x)
    assert [layer.name for layer in wrapped.layers] == shown
    assert [call_name(*call_parts(name)) for name in shown] == shown
    assert all(1 <= call_parts(name)[1] <= 3 for name in shown)
    for first, last in combinations(("input", *shown[:-1]), 2):
        early = through_bytes(wrapped.forward(x, end=first))
        middle = wrapped.forward(early, start=first, end=last)
        assert (early.layer_name, middle.layer_name) == (first, last)
        assert torch.equal(wrapped.forward(through_bytes(middle), start=last), expected)


class Block(nn.Module):
    """Adds its input to that of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


@pytest.mark.parametrize("number", ["0", "01", "-1", "x", "\uff12", "9" * 5000, "3", ""])
def test_invalid_call_number_is_no_layer(number: str) -> None:
    wrapped, x = WrappedModel(Named(("a",)).eval()), torch.randn(2, 4)
    wrapped.plan(x)
    with pytest.raises(UnknownLayer):
        wrapped.forward(x, end=f"a#{number}")


def test_a_block_with_a_number_sign_in_its_name_is_a_cut() -> None:
    model = nn.Sequential()
    for name in ("a#b", "a", "a#2"):
        model.add_module(name, Block())
    wrapped, x = WrappedModel(model.eval()), torch.randn(2, 4)
    expected = wrapped.whole(x)
    wrapped.plan(x)
    shown = ["a#b.inner#1", "a#b#1", "a.inner", "a", "a#2.inner#1", "a#2#1"]
    assert [cut.name for cut in wrapped.cuts] == shown
    assert blocks(shown) == ["a#b", "a", "a#2"]
    for cut in shown:
        assert torch.equal(wrapped.forward(through_bytes(wrapped.forward(x, end=cut)), start=cut), expected), cut
    wrapped.save_layers = {"a#b.inner#1"}
    wrapped.forward(x, end="a")
    assert set(wrapped.banked_output) >= {"a#b.inner#1"}


def test_both_ends_of_a_middle_part_may_be_blocks() -> None:
    wrapped, image = WrappedModel(digits().eval()), torch.rand(1, 1, 32, 32)
    early = wrapped.forward(image, end="stage1")
    middle = wrapped.forward(early, start="stage1", end="stage2")
    assert torch.equal(wrapped.forward(middle, start="stage2"), wrapped.whole(image))
    assert wrapped.forward(early, start="stage1", end="stage1").layer_id == early.layer_id
    with pytest.raises(UnknownLayer, match="was cut at"):
        wrapped.forward(early, start="stage2")
