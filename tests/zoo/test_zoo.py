"""The zoo itself: every model runs, and two separately built instances give the same bits."""

from __future__ import annotations

import pytest

from tests.zoo import CASES, Case
from tests.zoo.compare import differences


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_instances_agree(case: Case) -> None:
    first, second = case.build(), case.build()
    assert first is not second
    output = case.run(first)
    assert not list(differences(case.run(second), output))
    assert not list(differences(case.run(first), output)), "the second call of one instance differs"
    case.run(first, case.other_inputs())
