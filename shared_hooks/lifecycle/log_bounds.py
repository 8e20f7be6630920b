"""What a client may make of our log: no more than one line at a time, of bounded length, and so many a minute.

A record belongs to the account on whose behalf its thread works (`on_behalf_of`), or to the one that it carries:
``log.info(..., extra={"account": account})``; None is the process itself. What belongs to no account is never left out.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

CHARACTERS = 1000
"""Most of one line."""
TRACEBACK_LINES = 40
"""Most of one traceback; the middle is left out."""
MARGIN = "    | "
"""Before each line of a traceback, so that none reads as a record of its own."""
MINUTE = 60.0
ACCOUNTS = 1000
"""Whose lines are counted at a time; those beyond are counted together."""
UNKNOWN = "unknown"
"""The account of what gRPC's own code says: a client's calls are the cause, and whose they are is not known."""


def one_line(text: str) -> str:
    """``text`` in printable characters, at most `CHARACTERS` of them; others are escaped."""
    text = text[: CHARACTERS + 1]  # before the work that follows: it may be megabytes
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 4] + " ..."


@dataclass(slots=True)
class Minute:
    """What one account wrote since ``began``."""

    began: float
    lines: int = 0
    left_out: int = 0


class _OnBehalf(threading.local):
    account: str | None = None


on_behalf = _OnBehalf()


class on_behalf_of:  # used as a function
    """What this thread logs in the block, a model's own code included, is this account's doing."""

    def __init__(self, account: str | None) -> None:
        self.account = account or None

    def __enter__(self) -> None:
        self.before, on_behalf.account = on_behalf.account, self.account

    def __exit__(self, *_: object) -> None:
        on_behalf.account = self.before


class LogBounds(logging.Filter):
    """A handler's filter: each record one line, tracebacks in a margin, and at most ``each`` lines a minute for what
    one account causes, ``together`` for all accounts; warnings and what is less count apart, so that neither hides the
    other. What was left out is counted, and reported when the handler next writes anything, or with `tell`.

    Put one on every handler of your own: ``handler.addFilter(LogBounds(handler))``.
    """

    def __init__(
        self,
        handler: logging.Handler,
        each: int = 60,
        together: int = 300,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.each, self.together = each, together
        self._handler, self._clock = handler, clock
        self.left_out = 0
        """Lines of all accounts, since the beginning."""
        self._lock = threading.Lock()
        self._minutes: dict[tuple[str, bool], Minute] = {}
        self._all = {grave: Minute(clock()) for grave in (False, True)}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; rewrites its text."""
        account = record.account = getattr(record, "account", on_behalf.account)
        if account is None and record.name.partition(".")[0] == "grpc":
            account = UNKNOWN
        self.tell(MINUTE)
        if account is not None and not self._may(str(account), record):
            return False
        _bound(record)
        return True

    def tell(self, age: float = 0.0) -> None:
        """Write how many lines were left out in the minutes that began so many seconds ago."""
        now, reported = self._clock(), []
        with self._lock:
            for key, minute in list(self._minutes.items()):
                if now - minute.began >= age:
                    del self._minutes[key]
                    if minute.left_out:
                        reported.append((key[0], minute.left_out, now - minute.began))
        for account, left_out, seconds in reported:
            text = f"... {left_out:,} more lines like these in the last {seconds:.0f} s, caused by {one_line(account)}"
            record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
            record.account = None
            self._handler.handle(record)

    def _may(self, account: str, record: logging.LogRecord) -> bool:
        grave = record.levelno >= logging.WARNING
        lines = TRACEBACK_LINES if record.exc_info else 1
        now = self._clock()
        with self._lock:
            key = (account, grave)
            if key not in self._minutes and len(self._minutes) >= ACCOUNTS:
                key = ("others", grave)
            own, every = self._minutes.setdefault(key, Minute(now)), self._all[grave]
            if now - every.began >= MINUTE:
                self._all[grave] = every = Minute(now)
            # A traceback is longer than what is left: the last record of a minute may exceed the bound, none follows.
            if own.lines >= self.each or every.lines >= self.together:
                own.left_out += 1
                self.left_out += 1
                return False
            own.lines += lines
            every.lines += lines
            return True


def _bound(record: logging.LogRecord) -> None:
    """One line, whatever its arguments hold; a traceback in a margin."""
    try:
        text = record.getMessage()
    except Exception as error:  # arguments that do not fit: logging would print them as they are
        text = f"{record.msg} (its arguments do not fit: {error})"
    record.msg, record.args = one_line(text), None
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        record.exc_text = _in_margin("".join(traceback.format_exception(*record.exc_info)))
    if record.stack_info:
        record.stack_info = _in_margin(record.stack_info)


def _in_margin(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    half = TRACEBACK_LINES // 2
    if len(lines) > TRACEBACK_LINES:
        lines = [*lines[:half], f"... {len(lines) - 2 * half + 1} lines ...", *lines[1 - half :]]
    return "\n".join(MARGIN + one_line(line) for line in lines)
