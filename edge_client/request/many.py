"""Many inputs, several under way, answers in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from edge_client.answer import Answer, Failure
from edge_client.request.window import Window
from shared_hooks.errors import IsthmusError
from shared_hooks.lifecycle import Lifecycle, Stage


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
