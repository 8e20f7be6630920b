"""Computes the scheduler's batches: requests and steps of decoding sessions are run and answered.

The requests of a batch are begun one after the other, computed together and ended one after the other, so that hooks
and thread-local state see one request at a time. An error in one does not affect the others: if a batch fails, each
request is computed alone, and the client whose request fails then is excluded from batches for a while.

A single request is a batch of one (`BatchedRequest`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from cloud_server.access import Caller
from cloud_server.decoding import Taken
from cloud_server.limits import Limits
from cloud_server.models import BegunTail, Computed, Engine
from cloud_server.requests import Request, RequestState, RequestTable, ServerAnswer
from cloud_server.requests.request_table import computed_answer, failed_answer
from cloud_server.scheduling import Overtime, Scheduler, Task, TaskResult, Watchdog
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    CutRefused,
    InputMismatch,
    IsthmusError,
    ModelFailed,
    TooLarge,
    logged,
)
from shared_hooks.generation import StepLink
from shared_hooks.generation.together import Outcome
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.tail import paid_by

Bounded = Callable[[Request, Callable[[], Any]], Any]
"""Calls a function within a request's time limit and on its account."""


class BatchedRequest(Protocol):
    """One of several requests that are computed together."""

    @property
    def request(self) -> Request: ...

    @property
    def started_ns(self) -> int:
        """When `begin` was called (`time.perf_counter_ns`)."""
        ...

    @property
    def own_seconds(self) -> float:
        """The seconds of the batch that were spent on this request alone."""
        ...

    def begin(self) -> None:
        """Unpack the request. Raises nothing: errors are raised by `alone`."""

    @property
    def is_begun(self) -> bool: ...

    @staticmethod
    def run(batch: Sequence[Any], bounded: Bounded) -> None:
        """Compute the requests that were begun."""

    @property
    def is_made(self) -> bool:
        """Whether `end` can give the answer; otherwise `alone` is called."""
        ...

    def end(self) -> Computed:
        """Return the answer. Raises this request's error."""
        ...

    def alone(self) -> Computed:
        """Return the answer, computed without the others. Raises this request's error."""
        ...

    def doubt(self, reason: str) -> None:
        """Called if the batch failed although each request alone did not."""


def batched(request: Request) -> BatchedRequest:
    """Wrap the request as part of a batch of its kind."""
    return _Tail(request) if request.step_task is None else _Step(request)


class _Tail:
    """A request that is one forward."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started_ns = time.perf_counter_ns()
        self._begun: BegunTail | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        request = self.request
        try:
            assert request.batching is not None and request.crossing is not None
            with paid_by(*request.owner):
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
    """A step of a decoding session, computed in lockstep with others."""

    is_made = True
    own_seconds = 0.0

    def __init__(self, request: Request) -> None:
        assert request.step_task is not None
        self.request = request
        self.started_ns = time.perf_counter_ns()
        self._turn = request.step_task
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
        except BaseException as error:  # not caused by these requests
            outcomes = [Outcome(None, error, batch_size=1, meetings=0)] * len(batch)
        for one, outcome in zip(batch, outcomes, strict=True):
            one._outcome = outcome

    @property
    def _ended(self) -> IsthmusError | None:
        """Why the step cannot continue, or None."""
        return Cancelled("the client cancelled it while it ran") if self.request.cancelled else None

    def end(self) -> Computed:
        if self._taken is None:
            self._outcome.result()
        assert self._taken is not None
        return self._turn.end(self._taken, self._outcome)

    alone = end

    def doubt(self, reason: str) -> None:
        """Does nothing: an error in a step concerns its own session only."""


log = logging.getLogger(__name__)

Load = Callable[..., split_pb2.Load]
"""As `Core.load`."""
Value = TypeVar("Value")


Finish = Callable[[Request, ServerAnswer, IsthmusError | None], None]
"""As `RequestTable.finish`."""


class Onward(Protocol):
    """Connections to the next servers of chains (`cloud_server.chain`). Thread-safe."""

    def check(self, server: str) -> None:
        """Raise AccessRefused if no server with that name or address is configured."""

    def send(self, request: Request, part: Computed, own: split_pb2.ReplyHeader, finish: Finish) -> Callable[[], None]:
        """Ask the next server of the request's route for the rest, and call ``finish`` with the answer in some thread.

        ``own``: the report on this server's part. Returns a function that cancels it without blocking.
        """

    def link(self, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]) -> StepLink:
        """Return the connection over which the steps of a generation are passed to the next server of a route."""
        ...

    def profile(self, request: split_pb2.ProfileRequest) -> Iterator[split_pb2.ProfileReply]:
        """Yields progress, then the profile of the server that the request's route leads to, with the link to it.

        Raises as `check`, and what the next server answers with.
        """
        ...

    def give_up(self, rest: Callable[[], Computed]) -> None:
        """Cancel the rest of a step, whose session is then as before it."""

    def close(self) -> None:
        """Stop; requests are no longer passed on."""


class LastOfChain:
    """A server without next servers."""

    def check(self, server: str) -> None:
        raise AccessRefused(
            f'this server hands nothing on, and not to "{server[:256]}": it was started without --next (docs/chains.md)'
        )

    def send(self, request: Request, part: Computed, own: split_pb2.ReplyHeader, finish: Finish) -> Callable[[], None]:
        raise AssertionError("unreachable: `check` raises")

    def link(self, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]) -> StepLink:
        raise AssertionError("unreachable: `check` raises")

    def profile(self, request: split_pb2.ProfileRequest) -> Iterator[split_pb2.ProfileReply]:
        self.check(request.next[0])
        return iter(())

    def give_up(self, rest: Callable[[], Computed]) -> None:
        raise AssertionError("unreachable: `check` raises")

    def close(self) -> None:
        """Does nothing: there are no connections."""


class Executor:
    """Called by all workers' threads with what `Scheduler.next_batch` returns."""

    def __init__(
        self,
        limits: Limits,
        requests: RequestTable,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        load: Load,
        onward: Onward,
    ) -> None:
        """``onward``: connections to the next servers of chains."""
        self._limits = limits
        self._requests = requests
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._load = load
        self._onward = onward
        self._watchdog = Watchdog(limits.max_compute_seconds)

    def close(self) -> None:
        """Stop executing."""
        self._watchdog.close()

    def __call__(self, tasks: Sequence[Task]) -> list[TaskResult]:
        """Compute and answer those requests that are still wanted.

        An unexpected error of the server itself fails the requests, which would otherwise hold their memory, and is
        raised.
        """
        try:
            return self._execute(tasks)
        except BaseException as error:
            failure = ModelFailed(f"{type(error).__name__}: {error}")
            for request in [task.work for task in tasks if isinstance(task.work, Request)]:
                if request.state in (RequestState.QUEUED, RequestState.RUNNING):
                    with logged(log, "ending a request"):
                        self._requests.finish(request, failed_answer(request, failure), failure)
            raise

    def _execute(self, tasks: Sequence[Task]) -> list[TaskResult]:
        started = [task for task in tasks if self._starts(task)]
        if len(started) == 1:
            task = started[0]
            counts = task.work() if callable(task.work) else self._alone(task.work)
            results = [TaskResult(counts and not (len(tasks) == 1 and self._learns(task.work)))]
        else:
            results = self._together([batched(task.work) for task in started]) if started else []
        found = dict(zip(map(id, started), results, strict=True))
        return [found.get(id(task), TaskResult(False)) for task in tasks]

    def _starts(self, task: Task) -> bool:
        """Return whether the task is still wanted, and can be done in time."""
        request = task.work
        if not isinstance(request, Request):
            return True
        if not self._requests.start(request, self._scheduler.takes(task.payer)):
            return False
        waited = time.perf_counter_ns() - request.complete_ns - request.read_ns
        self._scheduler.waits.add(request.caller.account, waited)
        return True

    def _alone(self, request: Request) -> bool:
        started_ns, compute = time.perf_counter_ns(), partial(request.compute, self._limits.max_request_bytes)
        return self._answered(request, started_ns, partial(self._bounded, request, compute))

    def _together(self, batch: list[BatchedRequest]) -> list[TaskResult]:
        for one in batch:
            with self._lifecycle.request(one.request.about):
                one.begin()
        begun = [one for one in batch if one.is_begun]
        error: BaseException | None = None
        try:
            if begun:
                type(begun[0]).run(begun, self._bounded)
        except (CutRefused, InputMismatch):
            pass  # they do not form a batch, which is no error
        except BaseException as wrong:
            error = wrong
        results = []
        for one in batch:
            end = one.end if one.is_made else partial(self._bounded, one.request, one.alone)
            results.append(TaskResult(self._answered(one.request, one.started_ns, end), one.own_seconds))
        if error is not None:
            spoilt = [one for one, result in zip(batch, results, strict=True) if not result.counts]
            self._scheduler.isolate(one.request.payer for one in spoilt)
            if not spoilt:
                begun[0].doubt(f"{type(error).__name__}: {error}")
            _let_go(error)
        return results

    def _learns(self, request: object) -> bool:
        """Find out whether further requests like this one may be batched, unless that is known; returns whether it did.

        The request has been answered already; its client is charged for it.
        """
        if not isinstance(request, Request) or request.batching is None or request.crossing is None:
            return False
        try:
            # this worker serves no other request meanwhile, as during a rehearsal
            limited = self._watchdog.limited(self._limits.max_rehearsal_seconds)
            with self._lifecycle.request(request.about), limited, paid_by(*request.owner):
                return request.batching.learn(request.crossing, request.end)
        except BaseException as error:
            log.warning("whether requests at %s may be batched: %s: %s", request.split, type(error).__name__, error)
            return True

    def _bounded(self, request: Request, compute: Callable[[], Value]) -> Value:
        """Run ``compute()`` within the time limit and on the request's account. Raises TooLarge."""
        try:
            with self._watchdog.limited(), paid_by(*request.key[:2]):
                return compute()
        except Overtime:
            seconds = f"{self._limits.max_compute_seconds:g} s (max_compute_seconds)"
            raise TooLarge(f"the model computed for more than {seconds} on this request") from None
        except (SystemExit, KeyboardInterrupt) as error:  # a model may raise even these
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def _answered(self, request: Request, started_ns: int, compute: Callable[[], Computed]) -> bool:
        """Answer the request with what ``compute`` returns or raises; returns whether that is a result."""
        with self._lifecycle.request(request.about):
            answer, error, part = self._answer(request, started_ns, compute)
        if part is None:
            self._requests.finish(request, answer, error)
        else:
            assert answer.reply is not None
            handed = partial(self._onward.send, request, part, answer.reply, self._requests.finish)
            if not self._requests.forward_to_next(request, handed) and part.rest is not None:
                self._onward.give_up(part.rest)
        _let_go(error)
        return error is None

    def _answer(
        self, request: Request, started_ns: int, compute: Callable[[], Computed]
    ) -> tuple[ServerAnswer, IsthmusError | None, Computed | None]:
        """Return the answer; or, if the next server computes the rest, the report on this part, and the part itself."""
        try:
            computed = compute()
            answer = computed_answer(request, computed, started_ns, self._load(request.caller, but=request))
        except IsthmusError as error:
            return failed_answer(request, error), error, None
        except BaseException as error:  # a worker survives any failure
            failure = ModelFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return failed_answer(request, failure), failure, None
        self._lifecycle.emit(Stage.ON_RESULT, computed=computed)
        return answer, None, computed if computed.is_part else None


def _let_go(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that hooks have seen. Their frames refer to everything that was made of the
    request, which is freed now instead of by the garbage collector.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # the causes of a model's exception may form a cycle
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
