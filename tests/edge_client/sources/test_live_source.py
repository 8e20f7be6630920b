"""Frames that come by themselves: a reader that never waits, a taker that never holds it up."""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edge_client import sources
from edge_client.request.sending import Position, in_order
from edge_client.sources import Frame
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.frames import FrameId, Pixels
from shared_hooks.lifecycle import Lifecycle
from tests.edge_client.sources.streams import number_of, picture
from tests.waiting import eventually


class Shutter:
    """A camera that gives a frame on command."""

    def __init__(self) -> None:
        self.pressed = threading.Semaphore(0)
        self.given = 0
        self.closed = False

    def press(self, times: int = 1) -> None:
        """Give so many frames, and wait until they are read."""
        until = self.given + times
        for _ in range(times):
            self.pressed.release()
        eventually(lambda: self.given == until)

    def frames(self, most: int | None = None) -> Iterator[Pixels]:
        try:
            while most is None or self.given < most:
                while not self.pressed.acquire(timeout=0.02):
                    if self.closed:
                        return
                # counted once it was put: the reader comes back for the next
                yield picture(self.given)
                self.given += 1
        finally:
            self.closed = True


def test_slow_reader_gets_the_newest_frame_and_the_number_dropped() -> None:
    shutter = Shutter()
    with sources.live(shutter.frames(), "mine", queue=2) as source:
        shutter.press(5)
        assert source.first().id.name == "mine#4" and source.taken == 0
        assert source.dropped == 0, "what went by before anybody asked was not dropped"
        items = iter(source)
        assert [number_of(next(items).pixels) for _ in range(2)] == [3, 4]  # type: ignore[union-attr]
        shutter.press(6)
        assert [next(items).id.index for _ in range(2)] == [9, 10]  # type: ignore[union-attr]
        assert (source.taken, source.dropped) == (4, 4)
        shutter.closed = True
        assert list(items) == []


def test_closing_ends_the_thread_and_the_generator() -> None:
    shutter = Shutter()
    source = sources.live(shutter.frames())
    shutter.press()
    before = threading.active_count()
    shutter.pressed.release()
    source.close()
    source.close()
    assert shutter.closed and threading.active_count() < before
    assert not list(source)[1:]  # at most what was there


def test_camera_error_follows_earlier_frames() -> None:
    def frames() -> Iterator[Pixels]:
        yield picture(0)
        raise OSError("unplugged")

    source = sources.live(frames(), queue=4)
    taken = []
    with pytest.raises(OSError, match="unplugged"):
        for item in source:
            taken.append(item)
    assert len(taken) == 1


@pytest.mark.parametrize("error", [SystemExit("bye"), CancelledError(), KeyboardInterrupt()], ids=repr)
def test_base_exception_ends_the_source(error: BaseException) -> None:
    def frames() -> Iterator[Pixels]:
        yield picture(0)
        raise error

    with sources.live(frames(), "mine", queue=4, timeout=5) as source:  # it is not the timeout that ends it
        items = iter(source)
        assert number_of(next(items).pixels) == 0  # type: ignore[union-attr]
        with pytest.raises(InputMismatch, match="mine: its frames ended by") as reported:
            next(items)
        assert repr(error) in str(reported.value) and reported.value.__cause__ is error


def test_a_look_at_the_first_of_none() -> None:
    none = sources.live(iter(()), "none")
    for _ in range(2):
        with pytest.raises(InputMismatch, match="none: ended without a frame"):
            none.first()
        none.close()
    one = sources.live([picture(0)], "one")
    assert len(list(one)) == 1
    with pytest.raises(InputMismatch, match="one: ended without another frame"):
        one.first()


def test_a_camera_without_frames_is_given_up() -> None:
    shutter = Shutter()
    source = sources.live(shutter.frames(), "still", timeout=0.05)
    with pytest.raises(InputMismatch, match="still: no frame for 0.05 s"):
        source.first()
    shutter.closed = True
    source.close()


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((4, 4), np.uint8), "uint8 of (4, 4)"),
        (np.zeros((4, 4, 3), np.float32), "float32 of (4, 4, 3)"),
        (np.zeros((3, 4, 4), np.uint8), "uint8 of (3, 4, 4)"),
        (np.zeros((0, 4, 3), np.uint8), "uint8 of (0, 4, 3)"),
        ([1, 2], "found list"),
    ],
)
def test_frames_are_rgb(array: Any, found: str) -> None:
    with pytest.raises(InputMismatch) as reported:
        Frame(FrameId("cam", 1), array)
    assert found in str(reported.value) and "cam#1" in str(reported.value)


def test_a_queue_of_none_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one"):
        sources.live([], queue=0)


class Answered:
    """Requests that are answered when the test says so."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.settled: set[int] = set()

    def start(self, item: Any, position: Position) -> Any:
        self.started.append(item)
        owner, number = self, position.index

        class Request:
            @property
            def settled(self) -> bool:
                return number in owner.settled

        return Request()

    def many(self, inputs: Any, most: int) -> Iterator[Any]:
        return in_order(
            inputs,
            most,
            start=self.start,
            finish=lambda request: "answer",  # type: ignore[arg-type,return-value]
            cancel=lambda request: None,
            fatal=(),
            raise_failures=True,
            lifecycle=Lifecycle("edge"),
        )


def test_an_answer_does_not_wait_for_the_next_frame() -> None:
    shutter, requests = Shutter(), Answered()
    with sources.live(shutter.frames()) as source:
        shutter.press()
        requests.settled.add(0)
        assert next(requests.many(source, 4)) == "answer"  # though no second frame ever comes
        shutter.closed = True


def test_a_frame_is_taken_when_there_is_a_place_for_it_and_not_before() -> None:
    shutter, requests = Shutter(), Answered()
    with sources.live(shutter.frames(), queue=1) as source:
        shutter.press()
        answers = requests.many(source, 1)
        next(answers)  # `finish` has waited for it
        shutter.press(5)
        next(answers)
        assert [one.id.index for one in requests.started] == [0, 5], "the newest, not the one that came first"
        shutter.closed = True


def test_inputs_that_break_off_do_so_after_the_answers_before_them() -> None:
    def inputs() -> Iterator[int]:
        yield from (1, 2)
        raise InputMismatch("damaged")

    requests = Answered()
    answers = requests.many(inputs(), 4)
    assert [next(answers), next(answers)] == ["answer", "answer"]
    with pytest.raises(InputMismatch, match="damaged"):
        next(answers)


def test_a_rate() -> None:
    with sources.live([picture(0)] * 3, "three", queue=3) as source:
        tally = sources.SourceTally(source)
        for _ in source:
            tally.add()
        time.sleep(0.01)
        tally.stop()
    assert tally.summary().startswith("three: 3 taken, 0 dropped, 3 answered, ")
    known = tally.as_dict()
    assert known["frames_per_second"] == 3 / known["seconds"] and known["live"] is True
    assert "frames/s" in tally.line()
