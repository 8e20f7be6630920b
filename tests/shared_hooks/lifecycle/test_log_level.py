"""``--log-level``: our lines from that level up, and no other library's DEBUG lines between them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.lifecycle.log import OURS, Log, show


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", *OURS)]
    levels = [one.level for one in loggers]
    yield
    for one, level in zip(loggers, levels, strict=True):
        one.setLevel(level)


@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [("debug", "DEBUG", "INFO"), ("info", "INFO", "INFO"), ("warning", "WARNING", "WARNING")],
)
def test_debug_is_of_ours_alone(level: str, ours: str, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # the test runner's
    show(level)
    assert all(logging.getLevelName(logging.getLogger(name).getEffectiveLevel()) == ours for name in OURS)
    assert logging.getLevelName(logging.getLogger("PIL.PngImagePlugin").getEffectiveLevel()) == others


def test_a_server_that_is_lost_and_back_is_reported_once_each(caplog: pytest.LogCaptureFixture) -> None:
    edge = Lifecycle("edge")
    edge.register(Log("edge_client"))
    lost = {"address": "a:1", "reason": "it broke", "waiting": 1}
    with caplog.at_level(logging.WARNING, "edge_client"):
        edge.emit(Stage.BEFORE_RECONNECT, **lost)  # it never was there: whoever waits hears of it
        edge.emit(Stage.AFTER_CONNECT, address="a:1")
        for _ in range(2):
            edge.emit(Stage.BEFORE_RECONNECT, **lost)
            edge.emit(Stage.BEFORE_RECONNECT, **lost)
            edge.emit(Stage.AFTER_CONNECT, address="a:1")
            edge.emit(Stage.AFTER_RECONNECT, address="a:1", resent=0)
        edge.emit(Stage.AFTER_RECONNECT, address="a:1", resent=0)  # an idle one, which nobody missed
    lines = ["a:1: no stream (it broke), requests waiting: 1", "a:1: a stream again, sent again: 0"]
    assert [one.getMessage() for one in caplog.records] == 2 * lines
