"""Executes the batches of the scheduler: requests and steps of decoding sessions are computed and answered.

The requests of a batch are begun one after the other, computed together, and ended one after the other, so that hooks,
and whatever is kept for a thread, know one request at a time. Of what goes wrong in one the others hear nothing: where
a batch fails, each is computed alone, and the client whose request fails then is isolated for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from cloud_server.access import Caller
from cloud_server.limits import Limits
from cloud_server.models import Computed, Engine
from cloud_server.requests import Answer, Request, RequestTable, store
from cloud_server.requests.batched import BatchedRequest, batched
from cloud_server.scheduling import Overtime, Result, Scheduler, Task, Watchdog
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import AccessRefused, CutRefused, InputMismatch, IsthmusError, ModelFailed, TooLarge
from shared_hooks.generation import Link
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.tail import paid_by

log = logging.getLogger(__name__)

Load = Callable[..., split_pb2.Load]
"""As `Core.load`."""
Value = TypeVar("Value")


Finish = Callable[[Request, Answer, IsthmusError | None], None]
"""As `RequestTable.finish`."""


class Onward(Protocol):
    """The next servers of chains (`cloud_server.chain`). Any thread may call."""

    def check(self, server: str) -> None:
        """Raises AccessRefused where none has that name or address."""

    def send(self, request: Request, part: Computed, own: split_pb2.ReplyHeader, finish: Finish) -> Callable[[], None]:
        """Asks the next server of the request's route for the rest, and calls ``finish`` with the answer, in some
        thread. ``own``: what is reported of this part. Gives what takes it back, which never waits.
        """

    def link(self, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]) -> Link:
        """The way of a generation's steps to the next server of a route."""
        ...

    def profile(self, request: split_pb2.ProfileRequest) -> Iterator[split_pb2.ProfileReply]:
        """Progress, and at last the profile of the server that the request's names lead to, with the link to it. Raises
        as `check`, and what the next server answers with.
        """
        ...

    def give_up(self, rest: Callable[[], Computed]) -> None:
        """Nobody wants what is left of a step: its session is as before."""

    def close(self) -> None:
        """Nothing is handed on any more."""


class LastOfChain:
    """A server that is the last of every chain."""

    def check(self, server: str) -> None:
        raise AccessRefused(
            f'this server hands nothing on, and not to "{server[:256]}": it was started without --next (docs/chains.md)'
        )

    def send(self, request: Request, part: Computed, own: split_pb2.ReplyHeader, finish: Finish) -> Callable[[], None]:
        raise AssertionError("unreachable: `check` raises")

    def link(self, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]) -> Link:
        raise AssertionError("unreachable: `check` raises")

    def profile(self, request: split_pb2.ProfileRequest) -> Iterator[split_pb2.ProfileReply]:
        self.check(request.next[0])
        return iter(())

    def give_up(self, rest: Callable[[], Computed]) -> None:
        raise AssertionError("unreachable: `check` raises")

    def close(self) -> None:
        """Nothing is open."""


class Executor:
    """The threads of all workers call it with what `Scheduler.next_batch` gave them."""

    def __init__(
        self,
        limits: Limits,
        requests: RequestTable,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        load: Load,
        onward: Onward,
    ) -> None:
        """``onward``: asks the next servers of chains."""
        self._limits = limits
        self._requests = requests
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._load = load
        self._onward = onward
        self._watchdog = Watchdog(limits.max_compute_seconds)

    def close(self) -> None:
        """Nothing is executed any more."""
        self._watchdog.close()

    def __call__(self, tasks: Sequence[Task]) -> list[Result]:
        """Computes and answers those requests that are still wanted. Raises nothing."""
        started = [task for task in tasks if self._starts(task)]
        if len(started) == 1:
            task = started[0]
            counts = task.work() if callable(task.work) else self._alone(task.work)
            results = [Result(counts and not (len(tasks) == 1 and self._learns(task.work)))]
        else:
            results = self._together([batched(task.work) for task in started]) if started else []
        found = dict(zip(map(id, started), results, strict=True))
        return [found.get(id(task), Result(False)) for task in tasks]

    def _starts(self, task: Task) -> bool:
        """Whether the task is still wanted, and can be done in time."""
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

    def _together(self, batch: list[BatchedRequest]) -> list[Result]:
        for one in batch:
            with self._lifecycle.request(one.request.about):
                one.begin()
        begun = [one for one in batch if one.is_begun]
        error: BaseException | None = None
        try:
            if begun:
                type(begun[0]).run(begun, self._bounded)
        except (CutRefused, InputMismatch):
            pass  # they are no batch, and nobody's fault
        except BaseException as wrong:
            error = wrong
        results = []
        for one in batch:
            end = one.end if one.is_made else partial(self._bounded, one.request, one.alone)
            results.append(Result(self._answered(one.request, one.started_ns, end), one.own_seconds))
        if error is not None:
            spoilt = [one for one, result in zip(batch, results, strict=True) if not result.counts]
            self._scheduler.isolate(one.request.payer for one in spoilt)
            if not spoilt:
                begun[0].doubt(f"{type(error).__name__}: {error}")
            _let_go(error)
        return results

    def _learns(self, request: object) -> bool:
        """Finds out whether the next requests like this may be batched, if that is not known: whether it did. The
        request is answered already, and pays for it.
        """
        if not isinstance(request, Request) or request.batching is None or request.crossing is None:
            return False
        try:
            # meanwhile this worker answers nobody else, as while it rehearses
            limited = self._watchdog.limited(self._limits.max_rehearsal_seconds)
            with self._lifecycle.request(request.about), limited, paid_by(*request.party):
                return request.batching.learn(request.crossing, request.end)
        except BaseException as error:
            log.warning("whether requests at %s may be batched: %s: %s", request.split, type(error).__name__, error)
            return True

    def _bounded(self, request: Request, compute: Callable[[], Value]) -> Value:
        """``compute()``, within its time and on its account. Raises TooLarge."""
        try:
            with self._watchdog.limited(), paid_by(*request.key[:2]):
                return compute()
        except Overtime:
            seconds = f"{self._limits.max_compute_seconds:g} s (max_compute_seconds)"
            raise TooLarge(f"the model computed for more than {seconds} on this request") from None
        except (SystemExit, KeyboardInterrupt) as error:  # a model may raise even these
            raise ModelFailed(f"{type(error).__name__}: {error}") from error

    def _answered(self, request: Request, started_ns: int, compute: Callable[[], Computed]) -> bool:
        """The request is answered with what ``compute`` gives or raises; whether that is a result."""
        with self._lifecycle.request(request.about):
            answer, error, part = self._answer(request, started_ns, compute)
        if part is None:
            self._requests.finish(request, answer, error)
        else:
            assert answer.reply is not None
            handed = partial(self._onward.send, request, part, answer.reply, self._requests.finish)
            if not self._requests.hand_on(request, handed) and part.rest is not None:
                self._onward.give_up(part.rest)
        _let_go(error)
        return error is None

    def _answer(
        self, request: Request, started_ns: int, compute: Callable[[], Computed]
    ) -> tuple[Answer, IsthmusError | None, Computed | None]:
        """What it is answered with; or the report of its part, and the part, which others finish."""
        try:
            computed = compute()
            answer = store.answer(request, computed, started_ns, self._load(request.caller, but=request))
        except IsthmusError as error:
            return store.failure(request, error), error, None
        except BaseException as error:  # a worker survives everything
            failure = ModelFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return store.failure(request, failure), failure, None
        self._lifecycle.emit(Stage.ON_RESULT, computed=computed)
        return answer, None, computed if computed.is_part else None


def _let_go(error: BaseException | None) -> None:
    """Hooks have heard of it. Its frames hold it, and all that was made of its request: without them that goes now, and
    not when Python looks for circles.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # a model may have made a circle of causes
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
