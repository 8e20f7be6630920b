"""Rings that forget, and work beside the requests: nothing grows, and nobody waits."""

from __future__ import annotations

import logging
import threading

import pytest

from edge_client.live.board import RINGS, Aside, Board
from tests.waiting import PATIENCE, eventually


def test_a_reader_gets_what_is_new_since_it_last_asked() -> None:
    board = Board({"title": "t"})
    board.add("requests", {"n": 1})
    number, whole = board.whole()
    assert whole["requests"] == [{"n": 1}] and whole["events"] == [] and whole["about"] == {"title": "t"}
    assert board.since(number) == (number, {})
    board.add("requests", {"n": 2})
    board.add("events", {"kind": "moved"})
    board.set("observed", {"of": 2})
    later, more = board.since(number)
    assert more["requests"] == [{"n": 2}] and more["events"] == [{"kind": "moved"}] and more["observed"] == {"of": 2}
    assert board.since(later)[1] == {} and later > number


def test_the_board_is_bounded_and_a_slow_reader_misses_what_is_gone() -> None:
    board = Board({})
    for n in range(10 * RINGS["requests"]):
        board.add("requests", {"n": n})
        board.set("observed", n)
    _, found = board.since(5)
    assert [entry["n"] for entry in found["requests"]] == list(range(9 * RINGS["requests"], 10 * RINGS["requests"]))
    assert found["observed"] == 10 * RINGS["requests"] - 1


def test_tasks_run_in_order_and_before_the_end() -> None:
    done: list[int] = []
    aside: Aside[int] = Aside("a test", done.append)
    for number in range(100):
        aside.put(number)
    aside.close()
    aside.close()
    aside.put(100)
    assert done == list(range(100)) and aside.left_out == 0


def test_producer_never_waits_for_a_slow_consumer() -> None:
    gate, done = threading.Event(), []

    def work(number: int) -> None:
        assert gate.wait(PATIENCE)
        done.append(number)

    aside: Aside[int] = Aside("a test", work, most=3)
    aside.put(0)
    eventually(lambda: aside._items.empty())
    for number in range(1, 10):
        aside.put(number)
    assert aside.left_out == 6
    gate.set()
    aside.close()
    assert done == [0, 1, 2, 3]


def test_work_that_raises_is_reported_once_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if not number:
            raise ValueError("nothing to do")
        done.append(10 // number)

    with caplog.at_level(logging.WARNING):
        aside: Aside[int] = Aside("a test", work)
        for number in (0, 0, 5):
            aside.put(number)
        aside.close()
    assert done == [2] and aside.failures == 2
    assert [record.getMessage() for record in caplog.records if "a test" in record.getMessage()] == [
        "a test failed, and continues: ValueError: nothing to do"
    ]
