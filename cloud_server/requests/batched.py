"""A request as part of a batch: begun, computed with the others, ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from cloud_server.decoding import Taken
from cloud_server.models import BegunTail, Computed
from cloud_server.requests.request import Request
from shared_hooks.errors import Cancelled, IsthmusError
from shared_hooks.generation.together import Outcome
from shared_hooks.tail import paid_by

Bounded = Callable[[Request, Callable[[], Any]], Any]
"""Calls a function within a request's time and on its account."""


class BatchedRequest(Protocol):
    """One of several that are computed together."""

    @property
    def request(self) -> Request: ...

    @property
    def started_ns(self) -> int:
        """When it was begun (`time.perf_counter_ns`)."""
        ...

    @property
    def own_seconds(self) -> float:
        """Seconds of the batch that were spent on this request alone."""
        ...

    def begin(self) -> None:
        """Unpacks it. Raises nothing: what goes wrong is raised by `alone`."""

    @property
    def is_begun(self) -> bool: ...

    @staticmethod
    def run(batch: Sequence[Any], bounded: Bounded) -> None:
        """Computes those that are begun."""

    @property
    def is_made(self) -> bool:
        """Whether `end` has its answer; else `alone` is called."""
        ...

    def end(self) -> Computed:
        """The answer. Raises what went wrong in this one."""
        ...

    def alone(self) -> Computed:
        """The answer, without the others. Raises what went wrong."""
        ...

    def doubt(self, reason: str) -> None:
        """The batch failed, and none of it did so alone."""


def batched(request: Request) -> BatchedRequest:
    """The request as part of a batch of its kind."""
    return _Tail(request) if request.turn is None else _Step(request)


class _Tail:
    """A request of a batch that is one forward."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started_ns = time.perf_counter_ns()
        self._begun: BegunTail | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        request = self.request
        try:
            assert request.batching is not None and request.crossing is not None
            with paid_by(*request.party):
                self._begun = request.batching.begin(
                    request.crossing, request.header, request.payload, request.want_metrics, request.end
                )
        except BaseException as error:
            self._error = error

    @property
    def is_begun(self) -> bool:
        return self._begun is not None

    @staticmethod
    def run(batch: Sequence[_Tail], bounded: Bounded) -> None:
        first = batch[0].request
        if first.batching is not None and len(batch) > 1:
            bounded(first, partial(first.batching.run, [one._begun for one in batch if one._begun is not None]))

    @property
    def is_made(self) -> bool:
        return self._begun is not None and self._begun.is_made

    @property
    def own_seconds(self) -> float:
        return self._begun.own_ns / 1e9 if self._begun is not None and self._begun.is_made else 0.0

    def end(self) -> Computed:
        assert self._begun is not None
        return self._begun.end()

    def alone(self) -> Computed:
        if self._begun is None:
            assert self._error is not None
            raise self._error
        return self._begun.alone()

    def doubt(self, reason: str) -> None:
        if self.request.batching is not None and self._begun is not None:
            self.request.batching.doubt(self._begun, reason)


class _Step:
    """A step of a decoding session, in lockstep with others."""

    is_made = True
    own_seconds = 0.0

    def __init__(self, request: Request) -> None:
        assert request.turn is not None
        self.request = request
        self.started_ns = time.perf_counter_ns()
        self._turn = request.turn
        self._taken: Taken | None = None
        self._outcome: Outcome[None] = Outcome(None, None, batch_size=1, meetings=0)

    def begin(self) -> None:
        try:
            self._taken = self._turn.begin(self.request.header, self.request.payload)
        except BaseException as error:  # `end` raises it
            self._outcome = Outcome(None, error, batch_size=1, meetings=0)

    @property
    def is_begun(self) -> bool:
        return self._taken is not None

    @staticmethod
    def run(batch: Sequence[_Step], bounded: Bounded) -> None:
        batching = batch[0].request.engine.step_batching
        assert batching is not None
        calls = [partial(bounded, one.request, one._taken.begun.run) for one in batch if one._taken is not None]
        try:
            outcomes = batching.run(calls, lambda number: batch[number]._ended)
        except BaseException as error:  # none of theirs
            outcomes = [Outcome(None, error, batch_size=1, meetings=0)] * len(batch)
        for one, outcome in zip(batch, outcomes, strict=True):
            one._outcome = outcome

    @property
    def _ended(self) -> IsthmusError | None:
        """Why it goes no further; None while it does."""
        return Cancelled("the client cancelled it while it ran") if self.request.cancelled else None

    def end(self) -> Computed:
        if self._taken is None:
            self._outcome.result()
        assert self._taken is not None
        return self._turn.end(self._taken, self._outcome)

    alone = end

    def doubt(self, reason: str) -> None:
        """A failing step is its session's alone."""
