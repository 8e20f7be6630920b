"""Silent wrong answers that were found once: each must be exact or refused by name, over requests in a row.

The models are in `studies.fuzz.listed`, each run as three instances in modules of their own (no shared globals), with
random generators of their own.
"""

from __future__ import annotations

import pytest

from studies.fuzz.judge import Judge, Judgement, Subject
from studies.fuzz.listed import subjects
from tests.covering import every

SUBJECTS = subjects()


def _judged(judgement: Judgement) -> None:
    assert judgement.valid, judgement.verdicts
    failures = [verdict for verdict in judgement.verdicts if verdict.bad]
    assert not failures, "\n".join(f"{v.outcome.value} at {v.where}: {v.detail}" for v in failures)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_cut_is_exact_or_refused_by_name(subject: Subject) -> None:
    """Three requests in a row at each cut, on instances of their own; the whole model in the end."""
    _judged(Judge(subject).staying(3))


@pytest.mark.parametrize("subject", every(2, SUBJECTS), ids=lambda subject: subject.name)
def test_exactness_holds_when_the_cut_moves(subject: Subject) -> None:
    """One pair of instances for all cuts: what one request leaves behind shows in the next."""
    _judged(Judge(subject).moving())
