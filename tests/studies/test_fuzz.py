"""The generator in short: a few hundred random models, the same each time. `make fuzz` runs it long."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from shared_hooks import WrappedModel
from studies.fuzz.alone import PARTS, alone
from studies.fuzz.calls import inputs
from studies.fuzz.hunt import Hunt
from studies.fuzz.judge import Outcome, judge
from studies.fuzz.party import FILE, Party, world_kept
from studies.fuzz.program import Program, Step
from studies.fuzz.source import source_of
from studies.fuzz.strategies import programs
from tests.covering import ALL, examples


@settings(max_examples=examples(120), suppress_health_check=list(HealthCheck), derandomize=True, print_blob=False)
@given(programs())
def test_every_cut_of_a_random_model_is_exact_or_refused(program: Program) -> None:
    """Requests in a row, the cut moving, on separate instances; an error outside of the tree fails, too."""
    judgement = judge(program)
    assert judgement.failure is None, "\n" + judgement.reported()


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck), derandomize=True)
@given(programs())
def test_every_program_is_python(program: Program) -> None:
    compile(source_of(program).text, "program", "exec")


PLAIN = Program(root=(Step("linear"), Step("relu_"), Step("linear", n=1), Step("add", b=1), Step("norm", n=2)))


def test_a_plain_program_is_exact_at_every_cut() -> None:
    outcomes = judge(PLAIN).counts()
    assert set(outcomes) == {Outcome.EXACT}
    assert outcomes[Outcome.EXACT] >= 5  # input, two linear layers, the norm, the root


def test_a_printed_program_reads_like_a_module() -> None:
    assert (
        source_of(PLAIN).text
        == """\
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(8, 8)
        self.l1 = nn.Linear(8, 8)
        self.n2 = nn.LayerNorm(8)
    def forward(self, x):
        y0 = self.l0(x)
        y0.relu_()
        y1 = self.l1(y0)
        y2 = y1 + y0
        y3 = self.n2(y2)
        return y3
"""
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_every_statement_alone_is_exact_or_refused(part: int) -> None:
    """Every fourth one; `make fuzz` takes all."""
    found = Hunt().alone(alone()[part :: PARTS if ALL else 4 * PARTS])
    assert not found, "\n".join([f"{len(found)} failures", *(known.reported for known in found)])


def test_every_statement_runs() -> None:
    """A template that always fails would test nothing."""
    failing = []
    with world_kept(), torch.no_grad():
        for program in alone():
            text = source_of(program).text
            code = compile(text, FILE, "exec")
            with Party(text, code, name="Model", training=False, seed=1) as party:
                args, kwargs = inputs(party, program.inputs, 1, 2)
                try:
                    party.model(*args, **kwargs)
                except Exception as error:
                    failing.append(f"{error!r} in\n{text}")
    assert not failing, "\n".join([f"{len(failing)} of {len(alone())}", *failing])


def test_the_judge_sees_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that answers a little more is a failure."""
    whole = WrappedModel.forward

    def off_by_a_bit(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        answer = whole(self, *args, **kwargs)
        return answer * (1 + 1e-6) if "start" in kwargs else answer

    monkeypatch.setattr(WrappedModel, "forward", off_by_a_bit)
    failure = judge(PLAIN).failure
    assert failure is not None
    assert failure.outcome is Outcome.WRONG
