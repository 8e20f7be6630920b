"""How many requests of a run are under way, on a simulated way to a server."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as some

from edge_client.request.sending import RENEWED, RequestWindow

MS = 1_000_000


class Way:
    """A server that takes ``service`` for each request, one after the other, ``latency`` away there and back."""

    def __init__(self, window: RequestWindow, latency: int, service: int, head: int = 0) -> None:
        self.window, self.latency, self.service, self.head = window, latency, service, head
        self._now = self._free = 0
        self._under_way: deque[tuple[int, int, int]] = deque()

    def run(self, count: int) -> float:
        """So many requests, heads one after the other; how many the server answered for each it could have."""
        began = self._now
        for _ in range(count):
            while len(self._under_way) >= self.window.size:
                start, end, under_way = self._under_way.popleft()
                self.window.answered("cut", end - start, under_way, end > self._now)
                self._now = max(self._now, end)
            self._now += self.head
            arrives = self._now + self.latency // 2
            self._free = max(arrives, self._free) + self.service
            under_way = len(self._under_way) + 1
            self._under_way.append((self._now, self._free + self.latency // 2, under_way))
        return count * max(self.service, self.head) / (self._now - began)


@settings(max_examples=200)
@given(some.integers(0, 200), some.integers(5, 50))
def test_window_fills_the_pipe(latency: int, service: int) -> None:
    fits = latency / service + 1
    window = RequestWindow(4, 64)
    way = Way(window, latency * MS, service * MS)
    way.run(1000)
    assert way.run(300) >= 0.9 * min(1.0, 64 / fits)
    assert window.size <= max(4, min(64, fits + 4))


@given(some.integers(0, 50), some.integers(1, 30))
def test_slow_heads_need_no_more_than_the_least(latency: int, service: int) -> None:
    window = RequestWindow(4, 64)
    Way(window, latency * MS, service * MS, head=(latency + service) * MS).run(300)
    assert window.size == 4


def test_a_server_that_slows_down_gets_fewer() -> None:
    window = RequestWindow(4, 64)
    way = Way(window, 100 * MS, 5 * MS)
    way.run(300)
    assert window.size > 15
    way.service = 50 * MS
    way.run(300)
    assert window.size < 8


def test_a_path_that_got_longer_is_found_in_the_end() -> None:
    window = RequestWindow(4, 64)
    way = Way(window, 20 * MS, 5 * MS)
    way.run(300)
    way.latency = 100 * MS
    way.run(RENEWED)
    assert way.run(300) > 0.95


def test_another_cut_is_measured_again_and_what_was_not_sent_says_nothing() -> None:
    window = RequestWindow(4, 64)
    Way(window, 100 * MS, 5 * MS).run(300)
    large = window.size
    window.answered("edge-only", 0, 1, waited=False)
    assert window.size == large
    window.answered("another", 50 * MS, 1, waited=False)
    assert window.size == 4


def test_fixed_window_does_not_grow() -> None:
    window = RequestWindow(2, 2)
    assert Way(window, 100 * MS, 5 * MS).run(100) < 0.2
    assert window.size == 2
