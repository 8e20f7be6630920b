"""Awkward models, each kind at one of its places: every cut with a cold tail is exact or refused by name."""

from __future__ import annotations

import pytest

from studies.awkward.__main__ import look
from studies.awkward.kinds import KINDS, PLACES, source
from tests.covering import ALL

EVERY = [(kind, place) for kind in KINDS for place in PLACES]
SOME = [(kind, [*PLACES][number % len(PLACES)]) for number, kind in enumerate(KINDS)]
MUST_BE_EXACT = (
    "memo list handed in",
    "conjugate",
    "written through a transpose",
    "class switched",
    "forces",
    "experts",
)


@pytest.mark.parametrize(("kind", "place"), EVERY if ALL else SOME)
def test_each_awkward_model_is_exact_or_refused(kind: str, place: str) -> None:
    found = look(kind, place)
    assert not set(found["counts"]) & {"wrong", "outside errors", "invalid"}, found["said"]
    assert found["counts"].get("exact") or kind not in MUST_BE_EXACT


def test_awkward_models_are_distinct() -> None:
    assert len({source(kind, place) for kind, place in EVERY}) == len(EVERY) >= 198
