"""What a client may make of a log: one line at a time, in characters that print, and so many a minute."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from shared_hooks.lifecycle import Lifecycle, on_behalf_of
from shared_hooks.lifecycle.log import CHARACTERS, TRACEBACK_LINES, Log, LogBounds, one_line
from shared_hooks.lifecycle.stages import About, Stage


@dataclass
class Written:
    """A logger whose clock stands still until it is moved."""

    now: float = 1000.0
    text: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        handler = logging.StreamHandler(self.text)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        self.bounds = LogBounds(handler, each=5, together=12, clock=lambda: self.now)
        handler.addFilter(self.bounds)
        self.log = logging.getLogger("cloud_server.written")
        self.log.handlers, self.log.propagate = [handler], False

    @property
    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


@pytest.fixture
def written() -> Iterator[Written]:
    made = Written()
    made.log.setLevel(logging.DEBUG)
    yield made
    made.log.handlers, made.log.propagate = [], True


FORGED = "me\n2026-01-01 INFO cloud_server: drained\r\x1b[2J\u2028\u202e\x85"


def test_a_client_id_makes_one_line_that_prints(written: Written) -> None:
    written.log.info("client %s at %s", FORGED, "ipv4:127.0.0.1:1", extra={"account": "a"})
    (line,) = written.lines
    assert line.isprintable() and line.startswith("INFO client me\\n2026-01-01 INFO")


def test_a_line_has_a_length(written: Written) -> None:
    for text in ("x" * 10_000_000, "\n" * 10_000_000, "\U000e0001" * CHARACTERS):
        assert len(one_line(text)) == CHARACTERS
    written.log.warning("%s", "y" * 10_000_000)
    assert len(written.text.getvalue()) < CHARACTERS + 20


def test_a_traceback_stands_in_a_margin(written: Written) -> None:
    def deep(left: int) -> None:
        if not left:
            raise ValueError(FORGED)
        deeper(left - 1)

    def deeper(left: int) -> None:
        deep(left)

    try:
        deep(60)
    except ValueError as error:
        written.log.warning("its cause:", exc_info=error, extra={"account": "a"})
    first, *more = written.lines
    assert first == "WARNING its cause:" and all(line.startswith("    | ") and line.isprintable() for line in more)
    assert len(more) <= TRACEBACK_LINES and any("drained" in line for line in more[-6:])


def test_an_account_has_so_many_lines_a_minute_and_the_rest_is_counted(written: Written) -> None:
    for _ in range(1239):
        written.log.info("hello", extra={"account": "loud"})
    written.log.info("hello", extra={"account": "quiet"})
    written.log.warning("trouble", extra={"account": "loud"})  # is not hidden by what is less
    assert written.lines == ["INFO hello"] * 6 + ["WARNING trouble"]
    written.now += 61
    written.log.info("about the server")
    reported, server = written.lines[7:]
    assert reported == "WARNING ... 1,234 more lines like these in the last 61 s, caused by loud"
    assert server == "INFO about the server"


def test_many_accounts_have_a_bound_together_and_the_server_has_none(written: Written) -> None:
    for number in range(3000):
        written.log.info("hello", extra={"account": f"one of many {number}"})
    assert len(written.lines) == 12
    for _ in range(100):
        written.log.info("about the server")
    assert len(written.lines) == 112
    written.bounds.report_dropped()
    assert sum(int(line.split()[2].replace(",", "")) for line in written.lines if "more lines" in line) == 2988


def test_log_of_a_thread_is_charged_to_its_client(written: Written) -> None:
    lifecycle = Lifecycle("cloud")
    with lifecycle.request(About(1, 0, account="loud")):
        for _ in range(10):
            written.log.info("a model's own line")
        written.log.info("about the server", extra={"account": None})
    written.log.info("afterwards")
    assert written.lines == ["INFO a model's own line"] * 5 + ["INFO about the server", "INFO afterwards"]


def test_grpc_s_own_lines_are_some_client_s(written: Written) -> None:
    other = logging.getLogger("grpc._server")
    other.handlers, other.propagate = written.log.handlers, False
    try:
        for _ in range(10):
            other.error("Exception calling application: %s", FORGED)
    finally:
        other.handlers, other.propagate = [], True
    assert len(written.lines) == 5 and all(line.isprintable() for line in written.lines)


def test_the_log_s_own_hook_says_whose_lines_they_are(written: Written) -> None:
    lifecycle = Lifecycle("cloud")
    lifecycle.register(Log("cloud_server.written"))
    for _ in range(10):
        with on_behalf_of("x"):
            lifecycle.emit(Stage.AFTER_HANDSHAKE, client=FORGED, peer="ipv4:1.2.3.4:5", model_id=FORGED)
        lifecycle.emit(Stage.ON_ERROR, About(1, 0, account="y"), where="request", error=ValueError(FORGED))
        lifecycle.emit(Stage.BEFORE_DRAIN)
    text = "\n".join(written.lines)
    assert (text.count("uses model"), text.count("ValueError"), text.count("draining")) == (5, 5, 10)
