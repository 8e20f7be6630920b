"""The dropping queue: never more than so many wait, the newest are kept, order is kept, nothing is lost uncounted."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.sources import Closed, Late, Latest


@given(most=st.integers(1, 5), steps=st.lists(st.booleans(), max_size=60))
def test_queue_holds_the_newest_in_order(most: int, steps: list[bool]) -> None:
    queue: Latest[int] = Latest(most)
    model: deque[int] = deque()
    came, taken, dropped = 0, [], 0
    for put in steps:
        if put:
            queue.put(came)
            model.append(came)
            came += 1
            if len(model) > most:
                model.popleft()
                dropped += 1
        elif model:
            assert queue.ready(0) and queue.newest(0) == model[-1]
            taken.append(queue.take(0))
            assert taken[-1] == model.popleft()
        else:
            assert not queue.ready(0)
            with pytest.raises(Late):
                queue.take(0)
    assert queue.dropped == dropped and came == len(taken) + dropped + len(model)
    queue.end()
    left = [queue.take(0) for _ in model]
    assert left == list(model) and len(left) <= most and taken + left == sorted({*taken, *left})
    if came:
        assert came - 1 in taken + left  # the newest of all is never the one that is evicted
    with pytest.raises(Closed):
        queue.take(0)


@given(most=st.integers(1, 4), frames=st.integers(0, 300))
def test_two_threads_lose_nothing_uncounted(most: int, frames: int) -> None:
    queue: Latest[int] = Latest(most)

    def put() -> None:
        for number in range(frames):
            queue.put(number)
        queue.end(ValueError("the last"))

    thread = threading.Thread(target=put)
    thread.start()
    taken: list[int] = []
    with pytest.raises(ValueError, match="the last"):
        while True:
            taken.append(queue.take())
    thread.join()
    assert taken == sorted(set(taken)) and len(taken) + queue.dropped == frames
    assert taken[-1:] == ([frames - 1] if frames else [])


def test_frames_after_the_end_are_ignored() -> None:
    queue: Latest[int] = Latest(2)
    queue.put(1)
    queue.end(OSError("first"))
    queue.end(OSError("second"))
    queue.put(2)
    assert queue.take() == 1
    with pytest.raises(OSError, match="first"):
        queue.take()
