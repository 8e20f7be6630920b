"""``generate()`` with drafts: transformers' assisted decoding, with as many tokens a step as pay.

Greedy search gives what it gives without drafts, as far as a step over several tokens rounds as steps over one do.
Sampling keeps the distribution; which words are drawn depends on how many tokens are drafted, and that on times. With
a `Constant` pace the same seed gives the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from edge_client.generation.drafting.sources import Source
from shared_hooks.errors import InputMismatch
from shared_hooks.modules import put_instead

# How many tokens to draft: as many as give the most tokens a second, by what the steps so far have shown.
#
# A step that drafts n tokens gives 1 + p1 + p1 p2 + ... + p1...pn of them, where pi is how often the i-th is accepted
# when those before it were. It takes a + b n seconds: a is the round trip, the rest of a step and the beginning of a
# draft, b what one token more costs to be drafted, sent and verified. A step without drafts has a time of its own. All
# are estimated from steps, the last ones counting most.

FORGET = 0.95
"""What an observation counts for after one step more."""
FIRST = 4
"""Tokens drafted while nothing is known of times."""
AFTER, AGAIN = 5, 50
"""Steps with drafts after which one without shows what that takes: at first, and then."""
EXPECTED = 0.6
"""How often a token is taken to be accepted before there were any."""
OWN_WEIGHT = 2.0
"""Tokens that must have been tried at a place before its own rate counts half."""


class Pace(Protocol):
    """Says how many tokens to draft."""

    def choose(self) -> int:
        """For the next step; 0 for none."""

    def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """A step is over: so many tokens were asked for, found, and accepted. ``seconds``: of drafting and verifying;
        None where the step was no usual one (a prompt's).
        """


@dataclass
class Tally:
    """What was drafted, over all steps."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens; None before the first."""
        return self.accepted / self.drafted if self.drafted else None


class Constant:
    """Always the same number."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self) -> int:
        """As `Pace` says."""
        return self._tokens

    def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """As `Pace` says."""


class Measured:
    """What gives the most tokens a second, ``most`` at most. One object may serve any number of texts and threads that
    take turns.
    """

    def __init__(self, most: int = 32) -> None:
        self.most = most
        self._tried = [0.0] * most
        self._kept = [0.0] * most
        self._times = _Line()
        self._alone = _Line()
        self._last = 0
        self._drafting = 0  # steps since one without drafts

    def choose(self) -> int:
        """As `Pace` says."""
        base, slope = self._times.base, self._times.slope
        if base is None:
            return min(FIRST, self.most)
        if self._drafting >= (AFTER if self._alone.base is None else AGAIN):
            return 0
        best, best_rate, tokens, reached = 0, 1.0 / (self._alone.base or base), 1.0, 1.0
        for number, rate in enumerate(self.rates(), start=1):
            reached *= rate
            tokens += reached
            if tokens / (base + slope * number) > best_rate:
                best, best_rate = number, tokens / (base + slope * number)
        # step by step: what is far from what was tried is not known
        return min(best, 2 * self._last + 2)

    def rates(self) -> list[float]:
        """Of each place in a draft: how often it is accepted if those before it are."""
        tried, kept = sum(self._tried), sum(self._kept)
        before = (kept + EXPECTED) / (tried + 1.0)
        found = []
        for here, good in zip(self._tried, self._kept, strict=True):
            before = (good + OWN_WEIGHT * before) / (here + OWN_WEIGHT)
            found.append(before)
        return found

    def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """As `Pace` says."""
        self._last = asked
        drafted = min(drafted, self.most)
        if drafted or not asked:  # where nothing was asked for, what is known of drafts grows old
            self._tried = [one * FORGET for one in self._tried]
            self._kept = [one * FORGET for one in self._kept]
        for place in range(drafted):
            if place > accepted:
                break
            self._tried[place] += 1.0
            self._kept[place] += place < accepted
        self._drafting = self._drafting + 1 if drafted else 0
        self._times.age()
        self._alone.age()
        if seconds is not None:
            (self._times if drafted else self._alone).add(drafted, seconds)


class _Line:
    """Seconds as a line over tokens; of least squares, the last ones counting most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope = 0.0
        """Seconds for one token more; as it was, while all steps have as many."""

    def age(self) -> None:
        """One step more has gone by."""
        self._weight, self._x, self._y = self._weight * FORGET, self._x * FORGET, self._y * FORGET
        self._xx, self._xy = self._xx * FORGET, self._xy * FORGET

    def add(self, tokens: int, seconds: float) -> None:
        self._weight, self._x, self._y = self._weight + 1.0, self._x + tokens, self._y + seconds
        self._xx, self._xy = self._xx + tokens * tokens, self._xy + tokens * seconds
        spread = self._xx - self._x * self._x / self._weight
        together = self._xy - self._x * self._y / self._weight
        slope = (together + self.slope) / (spread + 1.0)  # a spread of less than a token tells little
        most = 0.9 * self._y / self._x if self._x else slope  # a step without drafts takes some time
        self.slope = max(0.0, min(slope, most))

    @property
    def base(self) -> float | None:
        """Seconds without the tokens' share; None before the first."""
        if not self._weight:
            return None
        return max((self._y - self.slope * self._x) / self._weight, 1e-9)


_HOOKED = ("generate", "_get_candidate_generator")


class Drafting:
    """While the ``with`` block runs, ``model.generate()`` drafts by ``source``. The model may be whole or split; drafts
    are made on this side alone. ``pace``: how many tokens; where nobody says, what gives most by what was measured.

    Raises InputMismatch for a model that is none of transformers', and in ``generate()`` for several rows at once.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not all(hasattr(type(model), name) for name in _HOOKED):
            raise InputMismatch(f"{type(model).__name__} has no generate() of transformers that takes drafts")
        self.pace: Pace = Measured() if pace is None else pace
        self.tally = Tally()
        self._model = model
        self._source = source
        self._clock = clock
        self._stack = ExitStack()

    def __enter__(self) -> Drafting:
        arguments = self._stack.enter_context(self._source.ready(self._model))
        generate: Any = self._model.generate
        candidates_of: Any = self._model._get_candidate_generator

        def drafting_generate(*args: Any, **kwargs: Any) -> Any:
            return generate(*args, **{**arguments, **kwargs})

        def drafting_candidates(*args: Any, **kwargs: Any) -> Any:
            rows = kwargs["input_ids"].shape[0]
            if rows != 1:
                raise InputMismatch(f"drafts are for one row, and generate() has {rows}")
            return _Candidates(candidates_of(*args, **kwargs), self._source, self.pace, self.tally, self._clock)

        ours = {"generate": drafting_generate, "_get_candidate_generator": drafting_candidates}
        self._stack.callback(put_instead(self._model, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class _Candidates:
    """Stands for transformers' generator of candidates: asks it for as many as pay, and measures."""

    requires_model_outputs = False

    def __init__(self, candidates: Any, source: Source, pace: Pace, tally: Tally, clock: Callable[[], float]) -> None:
        self._candidates = candidates
        self._source = source
        self._pace = pace
        self._tally = tally
        self._clock = clock
        self._asked = self._drafted = 0
        self._began: float | None = None
        self._first = True

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (1, length), with the drafted ones behind them, and the drafts' logits where there are any."""
        self._began = None if self._first else self._clock()
        # a model that drafts takes the prompt in the first step, or it does not find into the text later
        self._asked, found, logits = max(self._pace.choose(), int(self._first)), input_ids, None
        if self._asked:
            self._source.set_length(self._candidates, self._asked)
            found, logits = self._candidates.get_candidates(input_ids, **kwargs)
        self._drafted = found.shape[1] - input_ids.shape[1]
        return found, logits

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """The step is over; so many of the drafts were accepted."""
        accepted = min(int(num_matches), self._drafted)
        seconds = None if self._began is None else self._clock() - self._began
        self._first = False
        self._pace.step(self._asked, self._drafted, accepted, seconds)
        self._tally.steps += 1
        self._tally.drafted += self._drafted
        self._tally.accepted += accepted
        if self._asked:
            self._candidates.update_candidate_strategy(input_ids, scores, num_matches)
