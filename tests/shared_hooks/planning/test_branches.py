"""Cuts along branches: every small set of calls is exact or refused, and nothing is computed twice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import BadFrame, CutRefused, Disagreement, IsthmusError, PlanMismatch, UnknownLayer
from shared_hooks.forward import Placeholder
from shared_hooks.observers import ActivationStats
from shared_hooks.tensors import tensors_in
from tests.zoo.branching import MODELS, made

WORK = ("convolution", "addmm", "mm", "bmm", "embedding", "_scaled_dot_product")


CONSTANT = {"a constant's layer": 1}
"""Work that hangs on no input: both sides do it, as at every cut."""


class Work(TorchDispatchMode):
    """Counts the kernels that take time, on tensors that have data."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        real = not any(type(one) is Placeholder or one.is_meta for one in tensors_in((args, kwargs or {})))
        if real and name.startswith(WORK):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def copies(name: str) -> tuple[Tensor, ...]:
    return tuple(value.clone() for value in MODELS[name][1])


def whole(name: str) -> tuple[list[Tensor], Counter[str]]:
    with torch.no_grad(), Work() as work:
        output = made(name)(*copies(name))
    return list(tensors_in(output)), work.counts


def sets_of(wrapped: WrappedModel, most: int) -> Iterator[list[str]]:
    names = [layer.name for layer in wrapped.cuts]
    for size in range(1, most + 1):
        for found in itertools.combinations(names, size):
            yield list(found)


@pytest.mark.parametrize("name", MODELS)
def test_every_set_of_at_most_three_calls_is_exact_or_refused(name: str) -> None:
    expected, work = whole(name)
    edge, cloud = WrappedModel(made(name)), WrappedModel(made(name))
    edge.plan(*copies(name))
    along, tried = 0, 0
    for cut in sets_of(edge, 3):
        tried += 1
        try:
            with Work() as before:
                early = edge.head(cut, *copies(name))
            sent = EarlyOutput.from_bytes(early.to_bytes())
            cloud.tail(sent)  # works out what the tail does
            with Work() as behind:
                output = cloud.tail(EarlyOutput.from_bytes(early.to_bytes()))
        except CutRefused as refused:
            assert len(str(refused)) > 30, "a reason"
            continue
        assert all(map(torch.equal, tensors_in(output), expected)), cut
        twice = before.counts + behind.counts - work
        assert twice.total() <= CONSTANT.get(name, 0), (cut, before.counts, behind.counts)
        assert not work - before.counts - behind.counts
        along += bool(early.crossing.later)
    assert along >= tried / 20, "few of these are along branches"


def test_unneeded_branches_are_not_sent() -> None:
    edge = WrappedModel(made("two towers"))
    early = edge.head(["right"], *copies("two towers"))
    assert early.layer_name == "right" and [layer.name for layer in edge.get_layer_metrics()] == [
        "right.0",
        "right.1",
        "right.2",
    ]
    assert early.nbytes == (2 * 8 + 2 * 8) * 4  # the left input, and what the right tower gives
    plain = edge.head("right", *copies("two towers"))
    assert not plain.crossing.later and plain.nbytes == (2 * 8 + 2 * 8) * 4


def test_layers_of_both_sides_are_measured_once_and_keep_their_ids() -> None:
    name = "feature pyramid"
    edge, cloud = WrappedModel(made(name)), WrappedModel(made(name))
    edge(*copies(name))
    known = {layer.layer_id: layer.name for layer in edge.get_layer_metrics()}
    cloud.tail(EarlyOutput.from_bytes(edge.head(["laterals.0", "laterals.2"], *copies(name)).to_bytes()))
    here, there = edge.get_layer_metrics(), cloud.get_layer_metrics()
    found = {layer.layer_id: layer.name for layer in (*here, *there)}
    assert found == known and len(here) + len(there) == len(known)
    assert "laterals.1" in [layer.name for layer in there]


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("two towers", ["right"]),
        ("feature pyramid", ["laterals.0", "laterals.2"]),
        ("CLIP", ["text"]),
        ("encoder-decoder", ["decoder"]),
        ("Python state", ["two"]),
    ],
)
def test_observers_see_every_call_on_one_side(name: str, cut: list[str]) -> None:
    def seen(stats: ActivationStats) -> list[tuple[str, float]]:
        return [(record.name, round(float(record.mean), 5)) for record in stats.records]

    edge, cloud, plain = WrappedModel(made(name)), WrappedModel(made(name)), made(name)
    with ActivationStats().attach(edge) as here:
        early = edge.head(cut, *copies(name))
    with ActivationStats().attach(cloud) as there:
        cloud.tail(EarlyOutput.from_bytes(early.to_bytes()))
    with torch.no_grad(), ActivationStats().attach(plain) as both:
        plain(*copies(name))
    assert sorted(seen(here) + seen(there)) == sorted(seen(both)) and seen(there)
    assert not here.failures and not there.failures


def test_a_set_that_needs_all_before_it_is_the_plain_cut() -> None:
    wrapped = WrappedModel(made("U-Net"))
    plain = wrapped.head("up", *copies("U-Net"))
    several = wrapped.head(["down", "side", "up"], *copies("U-Net"))
    assert not several.crossing.later and several.crossing.digest == plain.crossing.digest


def test_other_inputs_of_the_same_form_take_the_same_cut() -> None:
    name = "CLIP"
    edge, cloud = WrappedModel(made(name)), WrappedModel(made(name))
    for seed in range(4):
        pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        ids = torch.randint(20, (3, 5), generator=torch.Generator().manual_seed(seed))
        early = edge.head(["text"], pixels, ids)
        with torch.no_grad():
            expected = made(name)(pixels, ids)
        assert torch.equal(cloud.tail(EarlyOutput.from_bytes(early.to_bytes())), expected)
    assert cloud.recipes.rehearsals == 1


def test_names_that_are_none_and_cuts_that_cannot_be(recwarn: pytest.WarningsRecorder) -> None:
    wrapped = WrappedModel(made("two towers"))
    with pytest.raises(UnknownLayer, match="nowhere"):
        wrapped.head(["left", "nowhere"], *copies("two towers"))
    with pytest.raises(UnknownLayer):
        wrapped.head([["left"]], *copies("two towers"))  # type: ignore[list-item]
    early = wrapped.head(["right"], *copies("two towers"))
    with pytest.raises(CutRefused, match="not along branches"):
        wrapped.forward(early, end="head")


def test_a_group_of_modules_is_a_set() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 50, "eos_token_id": 49, "bos_token_id": 48},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(5)
    model = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": torch.arange(10).reshape(2, 5), "pixel_values": torch.randn(1, 3, 8, 8)}
    with torch.no_grad():
        expected = model(**inputs)
    wrapped = WrappedModel(model)
    for group in ("vision", "language"):
        early = wrapped.head(f"group:{group}", **inputs)
        here = {layer.name.partition(".")[0] for layer in wrapped.get_layer_metrics()}
        assert here == {"vision": {"vision_model"}, "language": {"text_model"}}[group]
        output = wrapped.tail(EarlyOutput.from_bytes(early.to_bytes()))
        assert torch.equal(output.logits_per_image, expected.logits_per_image)
        assert early.crossing.digest == wrapped.head([f"group:{group}"], **inputs).crossing.digest
    with pytest.raises(UnknownLayer, match="the groups of this model are: .*vision"):
        wrapped.head("group:audio", **inputs)


def test_data_that_decide_between_branches_are_refused() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            one = self.one(value)
            if one.sum() > 1e9:
                one = one * 2
            out: Tensor = self.three(self.two(value)) + one
            return out

    with pytest.raises(CutRefused, match="data"):
        WrappedModel(Deciding().eval()).head(["two"], torch.ones(1, 4))


class Choosing(nn.Module):
    """Reads data behind its branches, and on one of three paths needs what the first layer gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right, self.end = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
        self.aside = nn.Linear(4, 4)

    def forward(self, value: Tensor, other: Tensor) -> Tensor:
        aside = self.aside(value)
        first = self.one(value)
        left = self.two(first)
        right = self.right(other)
        mixed: Tensor = self.end(left + right + aside)
        if value.sum() > 10:
            return mixed + first.relu()
        if value.sum() > 5:
            return mixed * other
        return mixed


@pytest.mark.parametrize("order", list(itertools.permutations((0.1, 2.0, 4.0))), ids=str)
@pytest.mark.parametrize("cut", [["right"], ["one", "right"], ["two", "right.0"], ["right.0"]], ids=str)
def test_data_may_decide_behind_the_cut(order: tuple[float, ...], cut: list[str]) -> None:
    edge, cloud, model = WrappedModel(Choosing().eval()), WrappedModel(Choosing().eval()), Choosing().eval()
    exact = mismatches = 0
    for size in (*order, *order):
        inputs = torch.full((1, 4), size), torch.arange(4.0)[None]
        with torch.no_grad():
            expected = model(*inputs)
        for _ in range(3):  # what the tail does not find is planned here, and sent then
            early = edge.head(cut, *inputs)
            try:
                assert torch.equal(cloud.tail(EarlyOutput.from_bytes(early.to_bytes())), expected)
            except PlanMismatch:
                mismatches += 1
                edge.plan(*inputs)
                continue
            exact += 1
            break
    assert exact == 6
    needs_other, needs_first = order[0] != 2.0, cut == ["two", "right.0"] and order[0] != 4.0
    assert mismatches == needs_other + needs_first  # of another path, once each


def test_random_numbers_between_branches_are_refused() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            noise = self.one(value) + torch.randn(4)
            out: Tensor = self.two(value) + noise
            return out

    with pytest.raises(CutRefused, match="random"):
        WrappedModel(Drawing().eval()).head(["two"], torch.ones(1, 4))


# What a stranger says of a branch cut


def described(early: EarlyOutput, **changes: Any) -> EarlyOutput:
    import dataclasses

    crossing = dataclasses.replace(early.crossing, cache={}, **changes)
    return dataclasses.replace(early, crossing=crossing)


def test_lies_about_what_is_left_to_the_tail_are_no_wrong_answers() -> None:
    name = "two towers"
    edge, cloud = WrappedModel(made(name)), WrappedModel(made(name))
    early = edge.head(["right"], *copies(name))
    place = early.crossing.later[0]
    for lie in (
        {"later": (place._replace(path="right"),)},
        {"later": (place._replace(path="nowhere"),)},
        {"later": (place._replace(number=7),)},
        {"later": (place._replace(path="", number=1, index=0),)},
        {"later": (place, place._replace(path="right"))},
        {"marks": ()},
    ):
        with pytest.raises((CutRefused, PlanMismatch, Disagreement)):
            cloud.tail(described(early, **lie))
    with pytest.raises((BadFrame, IsthmusError)):
        EarlyOutput.from_bytes(described(early, calls=()).to_bytes())
    assert torch.equal(cloud.tail(early), whole(name)[0][0])
