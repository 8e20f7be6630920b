"""How lines look: JSON that no text breaks out of, and times with their zone."""

from __future__ import annotations

import io
import json
import logging
from datetime import datetime
from typing import Any

import pytest

from shared_hooks.errors import ModelFailed
from shared_hooks.lifecycle import About, Lifecycle, Stage
from shared_hooks.lifecycle.log import FORMATS, Log, LogBounds, formatter

ABOUT = About(7, 0, None, "digits", "client-1", "alice", "identity alice")


class Written:
    """A logger of its own, as `show` sets one up."""

    def __init__(self, format: str) -> None:
        self._text = io.StringIO()
        handler = logging.StreamHandler(self._text)
        handler.setFormatter(formatter(format))
        handler.addFilter(LogBounds(handler))
        self.log = logging.getLogger(f"test_log_format.{format}")
        self.log.handlers, self.log.propagate = [handler], False
        self.log.setLevel(logging.INFO)
        self.lifecycle = Lifecycle("cloud")
        self.lifecycle.register(Log(self.log.name))

    @property
    def lines(self) -> list[str]:
        return self._text.getvalue().splitlines()

    def only(self) -> Any:
        (line,) = self.lines
        return json.loads(line)


def test_a_request_that_failed_in_json() -> None:
    written = Written("json")
    error = ModelFailed("no")
    error.__cause__ = ValueError("inner")
    written.lifecycle.emit(Stage.ON_ERROR, ABOUT, where="request", error=error)
    said, cause = (json.loads(line) for line in written.lines)
    assert said["level"] == "warning" and said["message"] == "request 7 client-1: ModelFailed: no"
    for entry in (said, cause):
        assert (entry["request"], entry["client"], entry["model"]) == (7, "client-1", "digits")
        assert (entry["identity"], entry["account"]) == ("alice", "identity alice")
    assert "ValueError: inner" in cause["exception"]


def test_a_stream_in_json() -> None:
    written = Written("json")
    facts = {"client": "client-1", "peer": "ipv4:1.2.3.4:5"}
    written.lifecycle.emit(Stage.AFTER_HANDSHAKE, model_id="digits", **facts)
    entry = written.only()
    assert (entry["client"], entry["model"]) == ("client-1", "digits") and "request" not in entry


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ['"}\n{"level": "error"', "\r\x1b[2J\u2028\x00", "\ud800", "é" * 5000])
def test_no_text_breaks_out(format: str, text: str) -> None:
    written = Written(format)
    about = About(1, 0, None, "m", text)
    written.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=ModelFailed(text))
    (line,) = written.lines
    assert line.isprintable()
    if format == "json":
        assert line.isascii() and json.loads(line)["level"] == "warning"


def test_times_have_a_zone() -> None:
    console, lines = Written("console"), Written("json")
    for one in (console, lines):
        one.log.info("here")
    for text in (console.lines[0].split()[0], lines.only()["time"]):
        when = datetime.fromisoformat(text)
        assert when.tzinfo is not None and abs(when.timestamp() - datetime.now().timestamp()) < 3600
