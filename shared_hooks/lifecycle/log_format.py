"""How a log line looks: for people, or JSON for what collects logs. Times are ISO 8601, with the zone.

A JSON line has ``time``, ``level``, ``logger`` and ``message``; what belongs to a request also ``request``, ``client``,
``model`` and ``identity``; what a client caused, ``account`` (on whom it is charged); and ``exception``, a traceback.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Final

FORMATS: Final = ("console", "json")


class Console(logging.Formatter):
    """``2026-11-22T01:49:28.921+00:00 INFO cloud_server: drained``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return when(record)


class JsonLines(logging.Formatter):
    """One object a line, in ASCII: no text can break out of it."""

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
    """Of a record, to the millisecond, in local time with its difference to UTC."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def formatter(name: str) -> logging.Formatter:
    """Of `FORMATS`."""
    return JsonLines() if name == "json" else Console()
