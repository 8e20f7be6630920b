"""What a worker does: a request is computed and answered, or several steps of decoding sessions at once.

Several are begun one after the other, computed together, and ended one after the other, so that hooks, and whatever is
kept for a thread, know one request at a time. Of what goes wrong in one the others hear nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cloud_server.decoding import Taken
from cloud_server.limits import Limits
from cloud_server.models import Computed
from cloud_server.requests import Answer, Request, RequestTable, replies
from cloud_server.work import Overtime, QueueClocks, Watchdog
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Cancelled, IsthmusError, ModelFailed, TooLarge
from shared_hooks.generation.together import Outcome
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.tail import paid_by

Load = Callable[..., split_pb2.Load]
"""As `Core.load`."""
Result = TypeVar("Result")
NOT_BEGUN: Outcome[None] = Outcome(None, None, company=1, meetings=0)


@dataclass(frozen=True)
class Turn:
    """Of a request that waits: a `cloud_server.work.Job`. ``takes``: seconds that it may, going by those before it."""

    request: Request
    work: Callable[[Turn], bool]
    takes: Callable[[], float]

    def __call__(self) -> bool:
        return self.work(self)


class Turns:
    """The threads of all workers call `one` and `several`."""

    def __init__(self, limits: Limits, requests: RequestTable, lifecycle: Lifecycle, load: Load) -> None:
        self.waits = QueueClocks()
        self._limits = limits
        self._requests = requests
        self._lifecycle = lifecycle
        self._load = load
        self._overtime = Watchdog(limits.max_compute_seconds)

    def close(self) -> None:
        """No turn follows."""
        self._overtime.close()

    def one(self, turn: Turn) -> bool:
        """Decides whether the request is still wanted, computes, answers. False without a result."""
        return self._starts(turn) and self._alone(turn.request)

    def several(self, turns: Sequence[Any]) -> list[bool]:
        """The same of steps of one kin (`Request.kin`), computed together."""
        wanted = [turn.request for turn in turns if self._starts(turn)]
        counts = [self._alone(wanted[0])] if len(wanted) == 1 else self._together([_Step(one) for one in wanted])
        found = dict(zip(map(id, wanted), counts, strict=True))
        return [found.get(id(turn.request), False) for turn in turns]

    def _starts(self, turn: Turn) -> bool:
        if not self._requests.start(turn.request, turn.takes()):
            return False
        self.waits.add(turn.request.caller.account, time.perf_counter_ns() - turn.request.complete_ns)
        return True

    def _alone(self, request: Request) -> bool:
        started_ns, compute = time.perf_counter_ns(), partial(request.compute, self._limits.max_request_bytes)
        return self._answered(request, started_ns, partial(self._bounded, request, compute))

    def _together(self, steps: list[_Step]) -> list[bool]:
        for step in steps:
            with self._lifecycle.request(step.request.about):
                step.begin()
        begun = [(step, step.taken) for step in steps if step.taken is not None]
        if begun:
            calls = [partial(self._bounded, step.request, taken.begun.run) for step, taken in begun]
            company = begun[0][0].request.engine.company
            assert company is not None
            try:
                outcomes = company.run(calls, lambda number: begun[number][0].ended)
            except BaseException as error:  # none of theirs
                outcomes = [Outcome(None, error, company=1, meetings=0)] * len(begun)
            for (step, _), outcome in zip(begun, outcomes, strict=True):
                step.outcome = outcome
        return [self._answered(step.request, step.started_ns, step.end) for step in steps]

    def _bounded(self, request: Request, compute: Callable[[], Result]) -> Result:
        """``compute()``, within its time and on its account. Raises TooLarge."""
        try:
            with self._overtime.limited(), paid_by(*request.key[:2]):
                return compute()
        except Overtime:
            seconds = f"{self._limits.max_compute_seconds:g} s (max_compute_seconds)"
            raise TooLarge(f"the model computed for more than {seconds} on this request") from None
        except (SystemExit, KeyboardInterrupt) as error:  # a model may raise even these
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def _answered(self, request: Request, started_ns: int, compute: Callable[[], Computed]) -> bool:
        """The request is answered with what ``compute`` gives or raises; whether that is a result."""
        with self._lifecycle.request(request.about):
            answer, error = self._answer(request, started_ns, compute)
        self._requests.finish(request, answer, error)
        return error is None

    def _answer(
        self, request: Request, started_ns: int, compute: Callable[[], Computed]
    ) -> tuple[Answer, IsthmusError | None]:
        try:
            computed = compute()
            answer = replies.answer(request, computed, started_ns, self._load(request.caller, but=request))
        except IsthmusError as error:
            return replies.failure(request, error), error
        except BaseException as error:  # a worker survives everything
            failure = ModelFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return replies.failure(request, failure), failure
        self._lifecycle.emit(Stage.ON_RESULT, computed=computed)
        return answer, None


class _Step:
    """One of several steps."""

    def __init__(self, request: Request) -> None:
        assert request.turn is not None
        self.request = request
        self.started_ns = time.perf_counter_ns()
        self.taken: Taken | None = None
        self.outcome: Outcome[None] = NOT_BEGUN
        """What became of its computation, or of its beginning."""
        self._turn = request.turn

    def begin(self) -> None:
        """``taken`` stays None where it cannot be."""
        try:
            self.taken = self._turn.begin(self.request.header, self.request.payload)
        except BaseException as error:  # `end` raises it
            self.outcome = Outcome(None, error, company=1, meetings=0)

    @property
    def ended(self) -> IsthmusError | None:
        """Why it goes no further; None while it does."""
        return Cancelled("the client cancelled it while it ran") if self.request.cancelled else None

    def end(self) -> Computed:
        """The answer. Raises what went wrong."""
        if self.taken is None:
            self.outcome.result()
        assert self.taken is not None
        return self._turn.end(self.taken, self.outcome)
