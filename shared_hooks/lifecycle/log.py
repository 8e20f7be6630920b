"""The default hook, called "log": logs the rare events of a process, one line each."""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from shared_hooks.errors import Cancelled, IsthmusError, ModelFailed
from shared_hooks.lifecycle.stages import Event

# Bounds what a client may write to our log: one line at a time, of bounded length, and so many a minute.
#
# A record belongs to the account on whose behalf its thread works (`on_behalf_of`), or to the one that it carries:
# ``log.info(..., extra={"account": account})``; None is the process itself. Records that belong to no account are
# never dropped.


CHARACTERS = 1000
"""Most characters of a line."""
TRACEBACK_LINES = 40
"""Most lines of a traceback; the middle is left out."""
MARGIN = "    | "
"""Precedes each line of a traceback, so that none looks like a record."""
MINUTE = 60.0
ACCOUNTS = 1000
"""The number of accounts whose lines are counted separately."""
UNKNOWN = "unknown"
"""The account of records from gRPC's own code, which some client's calls cause."""


def one_line(text: str) -> str:
    """``text`` in printable characters, at most `CHARACTERS` of them; others are escaped."""
    text = text[: CHARACTERS + 1]  # before the work that follows: it may be megabytes
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 4] + " ..."


@dataclass(slots=True)
class Minute:
    """The lines of one account since ``began``."""

    began: float
    lines: int = 0
    left_out: int = 0


class _OnBehalf(threading.local):
    account: str | None = None


on_behalf = _OnBehalf()


class on_behalf_of:  # used as a function
    """What this thread logs in the block, including a model's own code, is charged to this account."""

    def __init__(self, account: str | None) -> None:
        self.account = account or None

    def __enter__(self) -> None:
        self.before, on_behalf.account = on_behalf.account, self.account

    def __exit__(self, *_: object) -> None:
        on_behalf.account = self.before


class LogBounds(logging.Filter):
    """A handler's filter: each record is one line, tracebacks are indented, and at most ``each`` lines per minute are
    written for what one account causes, ``together`` for all accounts. Warnings and less severe records count
    separately, so that neither hides the other. What was dropped is counted, and reported with the next record, or by
    `report_dropped`.

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
        """The dropped lines of all accounts."""
        self._lock = threading.Lock()
        self._minutes: dict[tuple[str, bool], Minute] = {}
        self._all = {grave: Minute(clock()) for grave in (False, True)}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; rewrites its text."""
        account = record.account = getattr(record, "account", on_behalf.account)
        if account is None and record.name.partition(".")[0] == "grpc":
            account = UNKNOWN
        self.report_dropped(MINUTE)
        if account is not None and not self._may(str(account), record):
            return False
        _bound(record)
        return True

    def report_dropped(self, age: float = 0.0) -> None:
        """Report how many lines were dropped in the minutes that began at least ``age`` seconds ago."""
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
            # A traceback is longer than what is left: the last record of a minute may exceed the bound, no other
            # follows.
            if own.lines >= self.each or every.lines >= self.together:
                own.left_out += 1
                self.left_out += 1
                return False
            own.lines += lines
            every.lines += lines
            return True


def _bound(record: logging.LogRecord) -> None:
    """Make the record one line, whatever its arguments hold; a traceback is indented."""
    try:
        text = record.getMessage()
    except Exception as error:  # arguments that do not match the format: logging would print them unescaped
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


# The format of log lines: for people, or JSON for log collectors. Times are ISO 8601, with the zone.
#
# A JSON line has ``time``, ``level``, ``logger`` and ``message``; records of a request also ``request``, ``client``,
# ``model`` and ``identity``; records caused by a client, ``account`` (which is charged); and ``exception``, a
# traceback.

FORMATS: Final = ("console", "json")


class Console(logging.Formatter):
    """``2026-11-22T01:49:28.921+00:00 INFO cloud_server: drained``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return when(record)


class JsonLines(logging.Formatter):
    """One JSON object per line, in ASCII, so that no text can add a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        about = getattr(record, "about", None)
        if about is not None:
            entry |= {"request": about.id, "client": about.client, "model": about.model_id, "identity": about.identity}
        else:
            entry |= {name: getattr(record, name, None) for name in ("client", "model")}
        entry["account"] = getattr(record, "account", None)
        if record.exc_info:
            entry["exception"] = record.exc_text or self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps({key: value for key, value in entry.items() if value not in (None, "")})


def when(record: logging.LogRecord) -> str:
    """Return a record's time, to the millisecond, in local time with its UTC offset."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def formatter(name: str) -> logging.Formatter:
    """Return the formatter of that name among `FORMATS`."""
    return JsonLines() if name == "json" else Console()


OURS = ("edge_client", "cloud_server", "shared_hooks")


def show(level: str, format: str = "console") -> LogBounds:
    """Log to standard error, from ``level`` ("debug" ... "error") up; below INFO only this package's loggers.

    ``format``: of `FORMATS`. Returns the filter that limits the lines that clients cause. Other libraries' DEBUG
    records, several for every image, would bury the others.
    """
    number = getattr(logging, level.upper())
    handler = logging.StreamHandler()
    bounds = LogBounds(handler)
    handler.addFilter(bounds)
    handler.setFormatter(formatter(format))
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler])
    for name in OURS:
        logging.getLogger(name).setLevel(number)
    return bounds


def _caused_by(event: Event) -> Mapping[str, object]:
    """Return a log record's ``extra``: the request and its account; otherwise the account that the thread works for."""
    about = event.request
    if about is None:
        return {"client": event.facts.get("client"), "model": event.facts.get("model_id")}
    return {"about": about, "account": about.account} if about.account else {"about": about}


class Log:
    """Logs to the logger of the side ("edge_client", "cloud_server"). Replace or remove it by its name, "log".

    A failure that the caller gets anyway is logged on the edge at DEBUG; on the cloud, where it would be unseen, at
    INFO, with its traceback if the model is to blame. The loss of a connected server, and its return, are logged once
    at WARNING, because a fallback would hide it.
    """

    name = "log"
    built_in = True

    def __init__(self, logger: str) -> None:
        self._log = logging.getLogger(logger)
        self._there: set[str] = set()
        self._lost: set[str] = set()

    def after_model_load(self, event: Event) -> None:
        who, device = event.identity, event.wrapped.device
        more = f"{who.layers} layers on {device}, weights {who.weights_hash}" if who is not None else f"on {device}"
        if who is not None and who.part:
            more += f"; the weights from {who.part[0]} to {who.part[-1]}"
        # Also where a request's own thread loads it again: this is about the server.
        self._log.info("model %s: %s", event.model_id, more, extra={"account": None})

    def after_handshake(self, event: Event) -> None:
        if event.side == "cloud":
            text = "client %s at %s uses model %s"
            level = logging.DEBUG if event.brief else logging.INFO
            self._log.log(level, text, event.client, event.peer, event.model_id, extra=_caused_by(event))

    def after_connect(self, event: Event) -> None:
        if event.side == "edge":
            self._there.add(event.address)
            self._log.info("connected to %s", event.address)

    def before_reconnect(self, event: Event) -> None:
        first = event.address in self._there and event.address not in self._lost
        level = logging.WARNING if first else logging.INFO
        self._log.log(level, "%s: no stream (%s), requests waiting: %d", event.address, event.reason, event.waiting)
        if first:
            self._lost.add(event.address)

    def after_reconnect(self, event: Event) -> None:
        level = logging.WARNING if event.address in self._lost else logging.INFO
        self._lost.discard(event.address)
        self._log.log(level, "%s: a stream again, sent again: %d", event.address, event.resent)

    def on_disconnect(self, event: Event) -> None:
        who = event.address if event.side == "edge" else f"client {event.client} at {event.peer}"
        level, why = logging.DEBUG if event.brief else logging.INFO, event.reason or "the other side left"
        self._log.log(level, "stream of %s ended: %s", who, why, extra=_caused_by(event))

    def on_error(self, event: Event) -> None:
        error, request = event.error, event.request
        if event.side == "edge":
            level = logging.DEBUG
        elif type(error) is IsthmusError:  # a bug of ours
            level = logging.ERROR
        else:
            level = logging.WARNING if isinstance(error, ModelFailed) else logging.INFO
        what = event.where if request is None else f"request {request.id} {request.client}".rstrip()
        who = _caused_by(event)
        self._log.log(level, "%s: %s: %s", what, type(error).__name__, error, extra=who)
        if event.side == "cloud" and error.__cause__ is not None and not isinstance(error, Cancelled):
            self._log.log(max(level, logging.INFO), "its cause:", exc_info=error.__cause__, extra=who)

    def on_split_change(self, event: Event) -> None:
        self._log.debug("split: %s -> %s (%s)", event.old, event.new, event.reason)

    def before_drain(self, event: Event) -> None:
        self._log.info("%sdraining", f"{event.address}: " if event.side == "edge" else "")

    def after_drain(self, event: Event) -> None:
        if event.answered:
            self._log.info("drained")
        else:
            self._log.warning("ended before every request was answered")
