"""Models whose path depends on the data: planned on one path, run on another."""

from __future__ import annotations

import pytest

from shared_hooks import WrappedModel
from shared_hooks.errors import IsthmusError
from tests.engine.cutting import case_of, cuts_of, head, planned, tail, whole
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
