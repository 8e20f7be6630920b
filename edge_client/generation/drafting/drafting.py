"""``generate()`` with drafts: transformers' assisted decoding, with as many tokens a step as pay.

Greedy search gives what it gives without drafts, as far as a step over several tokens rounds as steps over one do.
Sampling keeps the distribution; which words are drawn depends on how many tokens are drafted, and that on times. With
a `Constant` pace the same seed gives the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from edge_client.generation.drafting.pace import Measured, Pace, Tally
from edge_client.generation.drafting.sources import Source
from shared_hooks.errors import InputMismatch
from shared_hooks.modules import put_instead

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
