"""``--log-level``: our lines from that level up, and no other library's DEBUG lines between them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from shared_hooks.lifecycle.log import OURS, show


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
