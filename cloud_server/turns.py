"""What a worker does: a request is computed and answered, or several at once: steps of decoding sessions, or requests
of one cut as a batch.

Several are begun one after the other, computed together, and ended one after the other, so that hooks, and whatever is
kept for a thread, know one request at a time. Of what goes wrong in one the others hear nothing: where a batch fails,
each is computed alone, and whose request fails then goes alone for a while.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from cloud_server.decoding import Taken
from cloud_server.limits import Limits
from cloud_server.models import BatchKey, BegunTail, Computed
from cloud_server.requests import Answer, Request, RequestTable, replies
from cloud_server.work import Did, Overtime, QueueClocks, Watchdog
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Cancelled, CutRefused, InputMismatch, IsthmusError, ModelFailed, TooLarge
from shared_hooks.generation.together import Outcome
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.tail import paid_by

log = logging.getLogger(__name__)

Load = Callable[..., split_pb2.Load]
"""As `Core.load`."""
Result = TypeVar("Result")
APART_SECONDS = 60.0
"""How long a client goes alone of whom a request has spoilt a batch."""
MAX_APART = 4096
NOT_BEGUN: Outcome[None] = Outcome(None, None, company=1, meetings=0)


@dataclass(frozen=True)
class Turn:
    """A task for a worker: one request that waits; a `cloud_server.work.Job`. ``takes``: seconds that it may, by those
    before it.
    """

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
        self._apart: OrderedDict[tuple[str, ...], float] = OrderedDict()
        """Clients that go alone, and accounts of which all do, and until when."""

    def close(self) -> None:
        """No turn follows."""
        self._overtime.close()

    def one(self, turn: Turn) -> bool:
        """Decides whether the request is still wanted, computes, answers. False without a result."""
        if not self._starts(turn):
            return False
        return self._alone(turn.request) and not self._learns(turn.request)

    def batch_key(self, request: Request) -> BatchKey | None:
        """What it may be computed together with; None where it goes alone."""
        party, now = request.party, time.monotonic()
        is_apart = any(self._apart.get(key, now) > now for key in (party, party[:1]))
        return None if is_apart else request.batch_key

    def compatible_keys(
        self, turn: Any, batch_key: Hashable, waiting: Callable[[Hashable], int], most: int
    ) -> Sequence[Hashable]:
        """Other batch keys whose requests are worth computing together with those of a turn's."""
        batching = turn.request.batching
        return () if batching is None else batching.compatible_keys(batch_key, waiting, most)

    def several(self, turns: Sequence[Any]) -> list[Did]:
        """The same for steps or requests with equal or related batch keys (`Request.batch_key`), computed at once."""
        started = [turn for turn in turns if self._starts(turn)]
        hurried = self._hurried(started)
        wanted = [turn.request for turn in started if turn.request not in hurried]
        done = [Did(self._alone(one)) for one in hurried]
        if len(wanted) < 2:
            done += [Did(self._alone(one)) for one in wanted]
        elif wanted[0].turn is None:
            joint = self._joint(wanted)
            joint = joint if joint > 1 else 0
            done += self._batched([_Part(one) for one in wanted[:joint]]) if joint else []
            done += [Did(self._alone(one)) for one in wanted[joint:]]
        else:
            done += map(Did, self._together([_Step(one) for one in wanted]))
        found = dict(zip(map(id, [*hurried, *wanted]), done, strict=True))
        return [found.get(id(turn.request), Did(False)) for turn in turns]

    def _hurried(self, turns: Sequence[Turn]) -> list[Request]:
        """Requests that a batch would answer too late, for it takes as long as all of them: first, and
        alone.
        """
        takes, most = sum(turn.takes() for turn in turns), self._limits.deadline_seconds
        requests = [turn.request for turn in turns if turn.request.turn is None and turn.request.deadline_ms]
        return [one for one in requests if one.age_seconds + takes > one.deadline_seconds(most)]

    def _joint(self, requests: Sequence[Request]) -> int:
        """How many of them may be decoded at one time: as much as one request may take. Encoded, they may be small."""
        sizes = accumulate(one.crossing.storage_bytes for one in requests if one.crossing is not None)
        return sum(size <= self._limits.max_request_bytes for size in sizes)

    def _starts(self, turn: Turn) -> bool:
        if not self._requests.start(turn.request, turn.takes()):
            return False
        request = turn.request
        self.waits.add(request.caller.account, time.perf_counter_ns() - request.complete_ns - request.read_ns)
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

    def _batched(self, parts: list[_Part]) -> list[Did]:
        for part in parts:
            with self._lifecycle.request(part.request.about):
                part.begin()
        begun = [part.begun for part in parts if part.begun is not None]
        batching = parts[0].request.batching
        error: BaseException | None = None
        if batching is not None and len(begun) > 1:
            try:
                self._bounded(parts[0].request, partial(batching.run, begun))
            except (CutRefused, InputMismatch):
                pass  # they are no batch, and nobody's fault
            except BaseException as wrong:
                error = wrong
        alone = [part.begun is None or not part.begun.is_made for part in parts]
        counts = []
        for part, on_its_own in zip(parts, alone, strict=True):
            end = partial(self._bounded, part.request, part.alone) if on_its_own else part.end
            counts.append(self._answered(part.request, part.started_ns, end))
        if error is not None:
            self._blame(parts, counts, error)
            _let_go(error)
        return [Did(count, part.own_seconds) for part, count in zip(parts, counts, strict=True)]

    def _blame(self, parts: list[_Part], counts: list[bool], error: BaseException) -> None:
        """A batch failed: whose request fails alone, too, goes alone for a while; else all of its batch key do."""
        spoilt = [part.request.party for part, count in zip(parts, counts, strict=True) if not count]
        now = time.monotonic()
        for party in spoilt:
            others = [key for key, until in self._apart.items() if key[0] == party.account and until > now]
            # of a second client of an account all others go alone, too: what a client calls itself costs nothing
            for key in (party, *([party[:1]] if others and others != [party] else [])):
                self._apart[key] = now + APART_SECONDS
                self._apart.move_to_end(key)
        while len(self._apart) > MAX_APART:
            self._apart.popitem(last=False)
        batching = parts[0].request.batching
        if not spoilt and batching is not None and parts[0].begun is not None:
            batching.doubt(parts[0].begun, f"{type(error).__name__}: {error}")

    def _learns(self, request: Request) -> bool:
        """Finds out whether the next ones like this may be batched, if that is not known: whether it did. The request
        is answered already, and pays for it.
        """
        if request.batching is None or request.crossing is None:
            return False
        try:
            # meanwhile this worker answers nobody else, as while it rehearses
            limited = self._overtime.limited(self._limits.max_rehearsal_seconds)
            with self._lifecycle.request(request.about), limited, paid_by(*request.party):
                return request.batching.learn(request.crossing)
        except BaseException as error:
            log.warning("whether requests at %s may be batched: %s: %s", request.split, type(error).__name__, error)
            return True

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
        _let_go(error)
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


def _let_go(error: BaseException | None) -> None:
    """Hooks have heard of it. Its frames hold it, and all that was made of its request: without them that goes now, and
    not when Python looks for circles.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # a model may have made a circle of causes
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Part:
    """One of several requests."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started_ns = time.perf_counter_ns()
        self.begun: BegunTail | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """``begun`` stays None where it cannot be."""
        request = self.request
        try:
            assert request.batching is not None and request.crossing is not None
            with paid_by(*request.party):
                self.begun = request.batching.begin(
                    request.crossing, request.header, request.payload, request.want_metrics
                )
        except BaseException as error:  # `alone` raises it
            self._error = error

    @property
    def own_seconds(self) -> float:
        """The part of the batch's time that this one took to join it."""
        return self.begun.own_ns / 1e9 if self.begun is not None and self.begun.is_made else 0.0

    def end(self) -> Computed:
        """Its part of the batch."""
        assert self.begun is not None
        return self.begun.end()

    def alone(self) -> Computed:
        """Computed by itself. Raises what went wrong."""
        if self.begun is None:
            assert self._error is not None
            raise self._error
        return self.begun.alone()


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
