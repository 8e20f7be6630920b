"""Many inputs, several under way, answers in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from edge_client.answer import Answer, Failure
from shared_hooks.errors import IsthmusError
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.showing import summary_of

# How many requests of a run are under way: as few as keep the way to the server, and the server, busy.
#
# A request that meets nobody on its way takes what the fastest took. What later ones take beyond that they spend in
# queues: on this side, in the network's buffers or at the server, which need not be distinguished. So of ``n`` under
# way ``n * (1 - fastest / took)`` wait somewhere. While less than one does, and this side had to wait for an answer,
# one more may be under way (until the pipe was full once, twice as many); where more than `TOO_MANY` do, half of those
# fewer. More would make answers late and nothing faster. What was begun before a change says nothing of it.

ENOUGH: Final = 1
TOO_MANY: Final = 3
RENEWED: Final = 4096
"""Answers after which the fastest is measured again, with few under way: another path may be slower for good."""


class Window:
    """From ``least`` to ``most``. One thread calls."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self._least = least
        self._most = max(least, most)
        self._fastest: float | None = None
        self._of = ""
        self._left = RENEWED
        self._unaware = 0
        """Answers still to come to what was begun before the last change."""
        self._has_met_end = False

    def answered(self, split: str, took_ns: int, under_way: int, waited: bool) -> None:
        """A request, begun as the last of so many under way, has taken ``took_ns`` from its packed frontier to the
        last byte of its answer.

        ``split``: where it was cut; another cut is measured again. ``waited``: the answer was not there, with no place
        left.
        """
        if took_ns <= 0:  # nothing was sent
            return
        self._left -= 1
        if split != self._of or not self._left:
            self.size, self._of, self._fastest, self._left = self._least, split, None, RENEWED
            self._unaware, self._has_met_end = 0, False
        fastest = self._fastest = took_ns if self._fastest is None else min(self._fastest, took_ns)
        self._unaware -= 1
        waiting = under_way * (1 - fastest / took_ns)
        if self._unaware >= 0 or under_way < self.size:
            return
        if waiting > TOO_MANY:
            if under_way <= self._least:  # so few do not wait for each other: all is slower than it was
                self._fastest = took_ns
            self._has_met_end = True
            self._change(round(under_way - waiting / 2))
        elif waited and waiting < ENOUGH:
            self._change(self.size + (1 if self._has_met_end else self.size))

    def _change(self, size: int) -> None:
        self._unaware = self.size
        self.size = max(self._least, min(self._most, size))


class Started(Protocol):
    """A request under way."""

    @property
    def settled(self) -> bool:
        """Whether its answer or error is there."""


Request = TypeVar("Request", bound=Started)

LOOK_SECONDS: Final = 0.005
"""While a live source has no frame: how often it is looked whether an answer has come."""


@runtime_checkable
class LiveInputs(Protocol):
    """Inputs that come by themselves (`edge_client.sources`): the next is taken when there is a place for it, and until
    it comes, answers are given out.
    """

    @property
    def live(self) -> bool:
        """Whether they do."""

    def wait_for_input(self, seconds: float) -> bool:
        """Whether the next input (or the end) is there, or comes within so long."""


@dataclass(frozen=True, slots=True)
class Position:
    """Which of a run's inputs it is, from 0, and of how many; None where the inputs have no length."""

    index: int
    total: int | None


def in_order(
    inputs: Iterable[Any],
    most: int,
    more: int | None = None,
    *,
    start: Callable[[Any, Position], Request],
    finish: Callable[[Request], Answer],
    cancel: Callable[[Request], None],
    fatal: tuple[type[Exception], ...],
    raise_failures: bool,
    lifecycle: Lifecycle,
) -> Iterator[Answer | Failure]:
    """``finish(start(input))`` of each input, in order, with up to ``most`` started and not finished; up to ``more``
    where these do not fill the pipe (`Window`).

    A failure takes its place in the order: raised, or yielded as `Failure` unless it is ``fatal``. A server that says
    when to ask again is there: only that request has failed. An error of ``inputs`` is raised after the answers to all
    that came before it. Whatever is under way when the iteration ends is cancelled. Hooks hear of the run here.
    """
    window: deque[tuple[int, Any, Request | Exception, int]] = deque()
    allowed = Window(most, more or most)
    total = _length(inputs)

    def collect() -> Answer | Failure:
        is_full = len(window) >= allowed.size
        index, item, started, under_way = window.popleft()
        try:
            if isinstance(started, Exception):
                raise started
            waited = is_full and not started.settled
            answer = finish(started)
            if more is not None:
                allowed.answered(answer.split, answer.times.round_trip, under_way, waited)
            return answer
        except Exception as error:
            again = isinstance(error, IsthmusError) and error.retry_after_seconds is not None
            if raise_failures or (isinstance(error, fatal) and not again):
                raise
            return Failure(index, item, error)

    def over(full: bool) -> bool:
        return bool(window) and (_is_over(window[0][2]) or (full and len(window) >= allowed.size))

    live = inputs if isinstance(inputs, LiveInputs) and inputs.live else None
    broken: Exception | None = None
    lifecycle.emit(Stage.BEFORE_RUN, total=total)
    try:
        rest = enumerate(inputs)
        while True:
            while over(full=live is not None):
                yield collect()
            if live is not None and window and not live.wait_for_input(LOOK_SECONDS):
                continue
            try:
                index, item = next(rest)
            except StopIteration:
                break
            except Exception as error:
                broken = error
                break
            while over(full=True):
                yield collect()
            try:
                started: Request | Exception = start(item, Position(index, total))
            except Exception as error:
                started = error
            window.append((index, item, started, len(window) + 1))
        while window:
            yield collect()
        if broken is not None:
            raise broken
    finally:
        for _, _, left, _ in window:
            if not isinstance(left, Exception):
                cancel(left)
        lifecycle.emit(Stage.AFTER_RUN, total=total)


def closing_with(source: Any, answers: Iterator[Answer | Failure]) -> Iterator[Answer | Failure]:
    """``source`` is closed at their end: nobody else has it."""
    with closing(source):
        yield from answers


def _length(inputs: Iterable[Any]) -> int | None:
    """None where nobody knows: a `DataLoader`, for one, may have a length that raises."""
    try:
        return len(inputs) if isinstance(inputs, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _is_over(started: Started | Exception) -> bool:
    return isinstance(started, Exception) or started.settled


# `Pending`: a request under way, for who does not want to wait for it at once.


@dataclass(frozen=True, slots=True, repr=False)
class Pending:
    """Its head has run, and the rest is under way. Ask for the answer once, or give it up.

    Made by `EdgeClient.submit`. Any thread may cancel it while another waits for its answer.
    """

    request: Any
    finish: Callable[[Any], Answer]
    leave: Callable[[Any, str], None]

    @property
    def settled(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        started: Started = self.request
        return started.settled

    def result(self) -> Answer:
        """Waits for the answer. Raises as `EdgeClient.infer`, and Cancelled after `cancel`."""
        return self.finish(self.request)

    def cancel(self, why: str = "the caller wants it no more") -> None:
        """Nobody wants it any more, and the server is informed; no effect on what is answered."""
        self.leave(self.request, why)

    def __repr__(self) -> str:
        return summary_of(self, "settled" if self.settled else "under way")
