"""Many programs judged, in rounds: what fails in a way not seen before is shrunk by hypothesis, the rest is counted.

A failure is *known* when it is of the same kind as one that was shrunk and its program has all features that were left
of that one. So each mistake is shrunk once, and a run continues.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from studies.fuzz.judge import Judgement, Outcome, Verdict, judge
from studies.fuzz.kinds import LAYERS
from studies.fuzz.program import Program
from studies.fuzz.strategies import programs

ROUND = 200
_NEUTRAL = frozenset(LAYERS) | {"inputs: one", "output: last", "block"}


@dataclass
class Tally:
    """What a run has seen. ``cuts`` are requests at a cut, and cuts that the plan refuses."""

    programs: int = 0
    invalid: int = 0
    failing: int = 0
    cuts: Counter[Outcome] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    busy: float = 0.0
    """Seconds of processor time, shrinking included."""

    def add(self, judgement: Judgement) -> None:
        if not judgement.valid:
            self.invalid += 1
            return
        self.programs += 1
        self.failing += judgement.failure is not None
        counts = judgement.counts()
        del counts[Outcome.FAILS]
        self.cuts.update(counts)
        self.reasons.update(v.detail[:100] for v in judgement.verdicts if v.outcome in (Outcome.REFUSED, Outcome.LATE))

    def join(self, other: Tally) -> None:
        self.programs += other.programs
        self.invalid += other.invalid
        self.failing += other.failing
        self.cuts.update(other.cuts)
        self.reasons.update(other.reasons)
        self.busy += other.busy

    def table(self) -> str:
        """One line of a table under its head."""
        cuts = sum(self.cuts.values())
        head = ["programs", "cuts", *(outcome.value for outcome in Outcome if outcome is not Outcome.FAILS)]
        cells = [f"{self.programs}", f"{cuts}"]
        for outcome in (Outcome.EXACT, Outcome.REFUSED, Outcome.LATE, Outcome.WRONG, Outcome.OUTSIDE):
            count = self.cuts[outcome]
            cells.append(f"{count} ({100 * count / max(cuts, 1):.1f} %)")
        head += ["failing programs", "invalid", "seconds", "of a processor"]
        cells += [f"{self.failing}", f"{self.invalid}", f"{self.seconds:.0f}", f"{self.busy:.0f}"]
        return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), cells))


@dataclass(frozen=True)
class Known:
    """A failure that was shrunk."""

    verdict: Verdict
    features: frozenset[str]
    reported: str

    def explains(self, judgement: Judgement) -> bool:
        failure = judgement.failure
        assert failure is not None
        left = (self.features - _NEUTRAL) or self.features
        same = (failure.outcome, failure.kind) == (self.verdict.outcome, self.verdict.kind)
        return same and left <= judgement.subject.features


class New(Exception):
    """A failure that none of the known ones explains."""


class Hunt:
    """Rounds of programs. ``before`` is called with each source: it may be the last thing seen of the process."""

    def __init__(self, *, before: Callable[[str], None] = lambda text: None) -> None:
        self.before = before
        self.tally = Tally()
        self.known: list[Known] = []
        self.counted: Counter[int] = Counter()
        """Failing programs by the number of the known failure that explains them."""

    def round(self, number: int, examples: int = ROUND, shrink: bool = True) -> Known | None:
        """Judge that many programs, drawn from this seed; a new failure ends the round, shrunk."""
        began, seen, found = time.process_time(), set[Program](), list[Judgement]()

        def one(program: Program) -> None:
            if program in seen and not found:
                return
            seen.add(program)
            judgement = self._judged(program, count=not found)
            if judgement.failure is None:
                return
            index = next((i for i, known in enumerate(self.known) if known.explains(judgement)), None)
            if index is not None:
                self.counted[index] += not found
            elif not found or judgement.failure.kind == found[0].failure.kind:  # type: ignore[union-attr]
                found.append(judgement)
                raise New

        phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
        quiet: dict[str, Any] = {"database": None, "deadline": None, "report_multiple_bugs": False, "print_blob": False}
        run = settings(max_examples=examples, phases=phases, suppress_health_check=list(HealthCheck), **quiet)
        try:
            seed(number)(run(given(programs())(one)))()
        except (New, Flaky):
            pass
        self.tally.busy += time.process_time() - began
        if not found:
            return None
        smallest = min(found, key=lambda judgement: (len(judgement.subject.text), judgement.subject.text))
        assert smallest.failure is not None
        self.known.append(Known(smallest.failure, smallest.subject.features, smallest.reported()))
        self.counted[len(self.known) - 1] += 1
        return self.known[-1]

    def alone(self, small: list[Program]) -> list[Known]:
        """Judge statements that are alone in their programs; what fails is as small as it gets."""
        began, first = time.process_time(), len(self.known)
        for program in small:
            judgement = self._judged(program, count=True)
            if judgement.failure is not None:
                index = next((i for i, known in enumerate(self.known) if known.explains(judgement)), len(self.known))
                if index == len(self.known):
                    self.known.append(Known(judgement.failure, judgement.subject.features, judgement.reported()))
                self.counted[index] += 1
        self.tally.busy += time.process_time() - began
        return self.known[first:]

    def _judged(self, program: Program, *, count: bool) -> Judgement:
        judgement = judge(program, self.before)
        if count:
            self.tally.add(judgement)
        return judgement
