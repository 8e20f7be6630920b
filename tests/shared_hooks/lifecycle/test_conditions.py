"""When a hook acts."""

from __future__ import annotations

from typing import Any

import pytest

from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import (
    About,
    Event,
    Lifecycle,
    Stage,
    every_n_requests,
    every_n_seconds,
    is_first,
    is_last,
    stages,
)


def event(index: int | None, total: int | None = None) -> Event:
    about = None if index is None else About(7, index, total)
    return Event(Stage.AFTER_REQUEST, "edge", about, {})


def test_every_n_requests() -> None:
    third = every_n_requests(3)
    assert [index for index in range(10) if third(event(index))] == [0, 3, 6, 9]
    assert not third(event(None)) and not third(event(-1))
    assert all(every_n_requests(1)(event(index)) for index in range(3))


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "3", None])
def test_numbers_that_are_none(n: Any) -> None:
    with pytest.raises(SpecError, match="every_n_requests takes a number from 1 up"):
        every_n_requests(n)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_seconds_that_are_none(seconds: float) -> None:
    with pytest.raises(SpecError, match="every_n_seconds takes a number of seconds above 0"):
        every_n_seconds(seconds)


def test_every_n_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stages.time, "monotonic", lambda: now)
    condition, acted = every_n_seconds(2), []
    for now in (100.0, 101.9, 102.0, 103.0, 110.0, 111.9, 112.0):
        if condition(event(None)):
            acted.append(now)
    assert acted == [100.0, 102.0, 110.0, 112.0]


def test_first_and_last() -> None:
    assert is_first(event(0)) and not is_first(event(1)) and not is_first(event(None)) and not is_first(event(-1))
    assert is_last(event(4, 5)) and not is_last(event(3, 5)) and not is_last(event(4)) and not is_last(event(None))
    assert is_last(event(0, 1)) and is_first(event(0, 1)) and not is_last(event(-1))


def test_a_condition_of_registration_counts_calls_only_where_it_holds() -> None:
    lifecycle, heard = Lifecycle("edge"), []
    lifecycle.on("after_request", when=every_n_requests(2))(lambda event: heard.append(event.request.index))
    for index in range(5):
        lifecycle.emit(Stage.AFTER_REQUEST, About(index + 1, index))
    assert heard == [0, 2, 4] and lifecycle.listing()[0].calls == 3
