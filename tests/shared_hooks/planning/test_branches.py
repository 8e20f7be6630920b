"""Models whose path depends on the data: planned on one path, run on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import IsthmusError
from tests.shared_hooks.cutting import case_of, cuts_of, head, planned, tail, whole
from tests.zoo import CASES, Case
from tests.zoo.case import Draw
from tests.zoo.compare import differences

branching = pytest.mark.parametrize("case", [case for case in CASES if case.branches], ids=lambda case: case.name)


@branching
def test_the_other_path_is_exact_or_an_error(case: Case) -> None:
    """Whatever was planned: a right answer or a clear error, never a quiet wrong one."""
    edge, cloud = planned(case), WrappedModel(case.build())
    calls = [case.make, case.alternative or case.make]
    for make in calls:
        for seed in range(4):
            expected = case.run(case.build(), make(Draw(seed)))
            assert not list(differences(whole(edge, case, make(Draw(seed))), expected))
            for cut in cuts_of(edge):
                try:
                    got = tail(cloud, case, cut, head(edge, case, cut, make(Draw(seed))))
                except IsthmusError:
                    continue
                assert not list(differences(got, expected)), (cut, seed)


@branching
def test_both_sides_planned_on_different_paths(case: Case) -> None:
    edge, cloud = planned(case), WrappedModel(case.build())
    args, kwargs = case.other_inputs()
    with case.setting():
        cloud.plan(*args, **kwargs)
    for make in (case.inputs, case.other_inputs):
        expected = case.run(case.build(), make())
        for cut in cuts_of(edge):
            try:
                got = tail(cloud, case, cut, head(edge, case, cut, make()))
            except IsthmusError:
                continue
            assert not list(differences(got, expected)), cut


@pytest.mark.parametrize("name", ["branch_on_item", "branch_on_hidden_item", "early_return"])
def test_the_planned_path_works_at_the_first_try(name: str) -> None:
    case = case_of(name)
    for make in (case.inputs, case.other_inputs):
        args, kwargs = make()
        expected = case.run(case.build(), make())
        edge, cloud = WrappedModel(case.build()), WrappedModel(case.build())
        edge.plan(*args, **kwargs)
        for cut in cuts_of(edge):
            assert not list(differences(tail(cloud, case, cut, head(edge, case, cut, make())), expected)), cut


class LateInput(nn.Module):
    """Below 0 the input itself is read after the cut: more crosses when both paths are known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        below = x.sum().item() < 0
        hidden = self.first(x * 2)
        if below:
            return x + torch.tanh(self.last(hidden))
        out: Tensor = self.last(hidden)
        return out


PLUS, MINUS = torch.ones(1, 4), -torch.ones(1, 4)


@pytest.mark.parametrize("wide", [False, True])
def test_a_path_that_another_thread_adds_while_a_cut_is_made(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """What was made of fewer paths is not kept, and what does not fit together is made again."""
    edge, cloud = WrappedModel(LateInput()), WrappedModel(LateInput())
    cloud.model.load_state_dict(edge.model.state_dict())
    plan = edge.plan(PLUS)
    cut = plan._cut

    def added_meanwhile(number: int, is_wide: bool) -> Any:
        made = cut(number, is_wide)
        if is_wide is wide and len(plan.siblings) == 1:
            edge.plan(MINUS)
            return cut(number, is_wide) if wide else made
        return made

    monkeypatch.setattr(plan, "_cut", added_meanwhile)
    for x in (PLUS * 3, PLUS * 3, MINUS * 3):  # other values than the plan has: storages cross whole
        early = edge.forward(x, end="first")
        assert torch.equal(cloud.forward(early, start="first"), edge.forward(x))
    assert len(plan.siblings) == 2
    assert plan.cutting("first")[1].payload_bytes == 2 * 16 and edge.layers[0].frontier_bytes == 2 * 16
