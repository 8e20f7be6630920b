"""The life of a connection, and what happened in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """The life of a connection."""

    UNOPENED = "unopened"  # no stream, and nobody wants one: at first, after giving up, after an idle stream broke
    CONNECTING = "connecting"  # a stream is being opened; no Welcome yet
    READY = "ready"  # welcomed: requests flow
    BACKOFF = "back-off"  # the last attempt failed or the stream broke; waiting before the next
    CLOSED = "closed"  # for good


@dataclass(slots=True)
class Counters:
    """What has happened on this connection so far."""

    streams: int = 0  # welcomed
    attempts: int = 0  # streams tried, welcomed or not
    resent: int = 0  # requests begun again
    stray: int = 0  # answers nobody waits for: repeated, or to a request given up
