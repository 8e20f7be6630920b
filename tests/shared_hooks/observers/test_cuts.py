"""Observers on both sides of every cut: answers stay exact, every call is seen once, nothing is left."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import UnknownLayer
from shared_hooks.observers import (
    ActivationStats,
    AttentionCapture,
    Custom,
    MemoryUse,
    NonFiniteGuard,
    Observer,
    TopTokens,
)
from shared_hooks.tensors.staging import identical
from tests.shared_hooks.cutting import case_of, cuts_of, head, planned, tail, whole
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Residual, bert, image

CASES = [
    "hf_bert", "hf_bert_eager", "hf_gpt2", "hf_gpt2_with_cache", "hf_t5", "hf_vit", "hf_resnet", "hf_clip",
    "hf_llama", "hf_swin",
]  # fmt: skip


def every_observer(wrapped: WrappedModel, stack: contextlib.ExitStack) -> list[Observer]:
    """One of each, on all modules where it makes sense."""
    found: list[Observer] = [
        ActivationStats("*"),
        MemoryUse("*"),
        NonFiniteGuard("*"),
        TopTokens(),
        Custom(lambda module, inputs, output, name: (name, torch.rand(1)), "*", timeout=None),
        AttentionCapture("*" if not any("ttention" in type(one).__name__ for one in wrapped.model.modules()) else None),
    ]
    for observer in found:
        stack.enter_context(observer.attach(wrapped))
    return found


@pytest.mark.parametrize("name", CASES)
def test_answers_are_exact_at_cuts_and_every_call_is_seen_on_one_side(name: str) -> None:
    case = case_of(name)
    reference = case.run(case.build())
    edge, cloud = planned(case), planned(case)
    cuts = list(cuts_of(edge))
    with contextlib.ExitStack() as stack:
        plain = ActivationStats("*")
        with plain.attach(edge):
            assert identical(whole(edge, case, case.inputs()), reference)
        expected = sorted({record.name for record in plain.records})
        heads, tails = every_observer(edge, stack), every_observer(cloud, stack)
        for cut in [cuts[0], *cuts[1 :: max(1, len(cuts) // 6)], cuts[-1]]:
            for observer in (*heads, *tails):
                observer.clear()
            answer = tail(cloud, case, cut, head(edge, case, cut, case.inputs()))
            assert identical(answer, reference), cut
            seen = [{record.name for record in side[0].records} for side in (heads, tails)]
            assert sorted(seen[0] | seen[1]) == expected, cut
            assert not seen[0] & seen[1], cut
        assert {observer.last_failure for observer in (*heads, *tails)} == {""}
    edge.detach()
    cloud.detach()
    assert not hooks_left(edge.model) and not hooks_left(cloud.model)


def test_every_cut_of_a_small_model() -> None:
    with WrappedModel(Residual()) as edge, WrappedModel(Residual()) as cloud:
        edge.plan(image())
        with contextlib.ExitStack() as stack:
            heads, tails = every_observer(edge, stack), every_observer(cloud, stack)
            expected = Residual()(image())
            for cut in ["input", *range(len(edge.layers))]:
                early = edge.forward(image(), end=cut)
                assert torch.equal(cloud.forward(EarlyOutput.from_bytes(early.to_bytes()), start=cut), expected)
        names = [record.name for record in heads[0].records]
        # a module around the cut ends on the tail's side
        assert "(model)" not in names and names.count("stem") == 5 and names.count("body") == 1
        assert {record.step for record in tails[0].records} == set(range(6))
    assert not hooks_left(edge.model) and not hooks_left(cloud.model)


def test_planning_is_shown_to_nobody() -> None:
    with WrappedModel(Residual()) as wrapped, ActivationStats().attach(wrapped) as stats:
        wrapped.plan(image())
        assert stats.records == [] and stats.calls == 0
        assert wrapped.verify(image(batch=1)).ok
        stats.clear()
        wrapped.forward(image())
        assert [record.name for record in stats.records] == ["stem", "body.0", "body.1", "body.2", "classifier"]


def test_the_statistics_of_a_cut_model_are_those_of_the_whole() -> None:
    with WrappedModel(Residual()) as edge, WrappedModel(Residual()) as cloud:
        stats = [ActivationStats(), ActivationStats(), ActivationStats()]
        with stats[0].attach(edge):
            edge.forward(image())
        with stats[1].attach(edge), stats[2].attach(cloud):
            cloud.forward(edge.forward(image(), end="body.1"), start="body.1")
    # NaN is not equal to itself, but there is none here
    assert stats[0].records == [*stats[1].records, *stats[2].records]
    assert [record.name for record in stats[1].records] == ["stem", "body.0", "body.1"]


def test_an_observer_of_one_wrapped_model_does_not_see_another_of_the_same_model() -> None:
    model = Residual()
    with WrappedModel(model) as one, WrappedModel(model) as other, ActivationStats("stem").attach(one) as stats:
        other.forward(image())
        assert stats.records == []
        one.forward(image())
        model(image())
        assert [record.step for record in stats.records] == [0, 1]
        with ActivationStats("stem").attach(model) as all_of_it:
            one.forward(image())
            other.forward(image())
        assert [record.step for record in all_of_it.records] == [0, 1]


def test_a_part_of_a_model_may_be_observed_while_the_whole_is_too() -> None:
    model = Residual()
    with ActivationStats().attach(model.body) as part, ActivationStats("stem").attach(model) as all_of_it:
        model(image())
        with WrappedModel(model) as wrapped:
            wrapped.forward(image())
    assert [record.name for record in part.records] == ["0", "1", "2"] * 2
    assert [(record.name, record.step) for record in all_of_it.records] == [("stem", 0), ("stem", 1)]
    assert not hooks_left(model)


def test_a_part_that_runs_twice_is_asked_for_twice_where_nobody_looks_at_the_whole() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.part(self.part(x))
            return found

    model = Twice()
    with ActivationStats(every_n=10).attach(model) as whole, ActivationStats(every_n=3).attach(model.part) as part:
        for _ in range(4):
            model(torch.zeros(1, 2))
    assert [record.step for record in whole.records] == [0, 0]
    assert [record.step for record in part.records] == [0, 3, 6]


def test_a_wrapped_model_that_does_not_descend_can_be_observed_all_the_way_down() -> None:
    with WrappedModel(Residual(), depth=1) as wrapped, ActivationStats("body.*").attach(wrapped) as stats:
        wrapped.forward(wrapped.forward(image(), end="stem"))
    assert [record.name for record in stats.records] == ["body.0", "body.1", "body.2"]


def test_calls_of_a_shared_module_are_numbered_over_the_cut() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(torch.relu(self.linear(x)))

    torch.manual_seed(0)
    with WrappedModel(Shared()) as wrapped, ActivationStats().attach(wrapped) as stats:
        early = wrapped.forward(torch.ones(1, 4), end="linear")
        wrapped.forward(early, start="linear")
        wrapped.model(torch.ones(1, 4))
    assert [record.name for record in stats.records] == ["linear", "linear#2", "linear", "linear#2"]


class Branching(torch.nn.Module):
    """Takes another path for inputs with a negative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plus, self.minus, self.last = (torch.nn.Identity() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.last(self.plus(x) * 2 if x.sum().item() > 0 else self.minus(x) * 3)


def test_a_head_that_is_tried_on_the_wrong_plan_is_not_counted() -> None:
    with WrappedModel(Branching()) as edge, WrappedModel(Branching()) as cloud:
        edge.plan(torch.ones(2))
        with ActivationStats().attach(edge) as heads, ActivationStats().attach(cloud) as tails:
            for number, sign in enumerate([1, -1, 1, -1, -1]):
                x = torch.ones(2) * sign
                assert torch.equal(cloud.forward(edge.forward(x, end="last"), start="last"), Branching()(x))
                way = "plus" if sign > 0 else "minus"
                assert [(record.name, record.step) for record in heads.records[-3:]] == [
                    ("first", number), (way, number), ("last", number),
                ]  # fmt: skip
                assert len(heads.records) == 3 * (number + 1) and tails.records == []


def test_attention_is_seen_on_the_side_where_it_is_computed() -> None:
    ids = torch.arange(6)[None]
    with WrappedModel(bert()) as edge, WrappedModel(bert()) as cloud:
        edge.plan(ids)
        for layer in edge.layers:
            with AttentionCapture().attach(edge) as heads, AttentionCapture().attach(cloud) as tails:
                cloud.forward(edge.forward(ids, end=layer.layer_id), start=layer.layer_id)
            names = [record.name for record in (*heads.records, *tails.records)]
            assert names == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"], layer.name


def test_unmatched_observer_is_removed() -> None:
    model = Residual()
    with WrappedModel(model) as wrapped, pytest.raises(UnknownLayer):
        ActivationStats("nothing").attach(wrapped)
    assert not hooks_left(model)
