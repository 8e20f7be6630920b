"""The settings of a connection: limits, keep-alive, credentials. Checked on construction."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final, cast

import grpc

from edge_client.credentials import Credentials
from edge_client.dial import why_not
from edge_client.transport import wire
from edge_client.user_text import check_seconds
from protos import FACTS_WANTED
from shared_hooks.errors import (
    AccessRefused,
    BadFrame,
    Disagreement,
    IsthmusError,
    NotAuthenticated,
    RemoteError,
    ServerUnavailable,
    SpecError,
    UnknownModel,
    by_name,
)
from shared_hooks.showing import short

# The states of a connection, and its counters.


class State(enum.Enum):
    """The state of a connection."""

    UNOPENED = "unopened"  # no stream, and none wanted: at first, after giving up, after an idle stream broke
    CONNECTING = "connecting"  # a stream is being opened; no Welcome yet
    READY = "ready"  # welcomed: requests flow
    BACKOFF = "back-off"  # the last attempt failed or the stream broke; waiting before the next
    CLOSED = "closed"  # permanently


@dataclass(slots=True)
class Counters:
    """What has happened on this connection so far."""

    streams: int = 0  # accepted streams
    attempts: int = 0  # streams tried, accepted or not
    resent: int = 0  # requests sent again
    stray: int = 0  # answers without a waiter: repeated, or to an abandoned request


MAX_CONCURRENT: Final = 4
MAX_PIPELINED: Final = 32
"""As many as a server accepts from one client by default."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How soon a silent peer is noticed that owes no heartbeat: after ``every`` + ``timeout`` seconds at most.

    The defaults are patient: a ping, and its answer, wait behind all that a slow link holds of an upload (two frontiers
    of 3.3 MB at 200 kB/s: 32 s; with 5 s every attempt broke). While requests are in progress, heartbeats are sooner.

    Without `grpc.http2.ping_timeout_ms` gRPC waits a minute for the answer to a ping, whatever the keep-alive timeout
    (measured: 61.7 s without, 3.7 s with it).
    """

    every: float = 10.0
    timeout: float = 60.0

    def __post_init__(self) -> None:
        check_seconds("every", self.every)
        check_seconds("timeout", self.timeout)

    def options(self) -> list[tuple[str, int]]:
        """Return the gRPC channel arguments."""
        timeout_ms = int(self.timeout * 1000)
        return [
            ("grpc.keepalive_time_ms", int(self.every * 1000)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


@short
@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Limits in seconds and bytes."""

    patience: float = 15.0  # how long a caller waits without a stream before giving up
    welcome_within: float = 10.0  # from opening a stream to Welcome
    heartbeat: float = 1.0  # interval of the server's heartbeats; four missing ones break the stream
    max_in_flight: int | None = None  # unanswered requests; None: `MAX_CONCURRENT`, `MAX_PIPELINED` in a run
    max_in_flight_bytes: int = 128 << 20  # ... and the bytes that they send; a single request is always allowed
    chunk_bytes: int = wire.CHUNK_BYTES
    area_bytes: int = 32 << 20  # of shared memory for payloads to a server on this machine; 0 = none
    ahead: bool = True  # whether values that cross may be sent before their head has ended
    max_answer_bytes: int = 1 << 30
    keep_alive: KeepAlive = field(default_factory=KeepAlive)
    credentials: Credentials = field(default_factory=Credentials)

    def __post_init__(self) -> None:
        if not wire.MIN_CHUNK_BYTES <= self.chunk_bytes <= wire.MAX_CHUNK_BYTES:
            raise SpecError(f"chunk_bytes={self.chunk_bytes}: must be {wire.MIN_CHUNK_BYTES} to {wire.MAX_CHUNK_BYTES}")
        for name in ("max_in_flight", "max_in_flight_bytes"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise SpecError(f"{name}={most}: must be 1 or more")
        if not 0 <= self.area_bytes <= 1 << 40:
            raise SpecError(f"area_bytes={self.area_bytes}: must be 0 to {1 << 40}")
        for name in ("patience", "welcome_within", "heartbeat"):
            check_seconds(name, getattr(self, name))

    @property
    def max_concurrent(self) -> int:
        """The maximum number of concurrent single requests."""
        return self.max_in_flight or MAX_CONCURRENT

    @property
    def max_pipelined(self) -> int:
        """The maximum number of concurrent requests of a run, which uses as few as keep the link busy."""
        return self.max_in_flight or MAX_PIPELINED


# The meaning of a stream's end: an error that retrying does not fix, or a break to recover from.


# Every other status is a break: a killed server shows as UNAVAILABLE, INTERNAL, UNKNOWN or CANCELLED.
_FINAL: Final[dict[grpc.StatusCode, type[IsthmusError]]] = {
    grpc.StatusCode.FAILED_PRECONDITION: Disagreement,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.INVALID_ARGUMENT: BadFrame,
    grpc.StatusCode.UNIMPLEMENTED: Disagreement,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: AccessRefused,
}


def final_error(error: grpc.RpcError, address: str, credentials: Credentials | None = None) -> IsthmusError | None:
    """Return the error for a stream that ended permanently; None for one that broke.

    ``credentials``: used to open it, if it is not known yet whether they are accepted.
    """
    call = _call(error)
    made = _FINAL.get(call.code())
    if made is not None:
        text = (call.details() or "").removeprefix(f"{made.__name__}: ")
        refused = made(f"{address} refused: {text}")
        if isinstance(refused, Disagreement):
            refused.wants_facts = any(key == FACTS_WANTED for key, _ in call.trailing_metadata() or ())
        return refused
    if credentials is None or call.code() is not grpc.StatusCode.UNAVAILABLE or is_port_closed(error):
        return None
    return why_not(address, credentials)


def refusal(error: grpc.RpcError, address: str, credentials: Credentials | None = None) -> IsthmusError:
    """Return the error that a call ended with, by the name that an Isthmus server gives it; otherwise
    `ServerUnavailable`.

    ``credentials``: as in `final_error`.
    """
    call = _call(error)
    if call.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Disagreement(f"{address} cannot be asked for this: an older server, or another one ({call.details()})")
    name, colon, text = (call.details() or "").partition(": ")
    made = by_name(name) if colon else RemoteError
    if made is RemoteError:
        return final_error(error, address, credentials) or ServerUnavailable(f"{address}: {reason(error)}")
    return made(f"{text} (reported by {address})")


def reason(error: grpc.RpcError) -> str:
    """Return why the stream ended, for messages."""
    call = _call(error)
    return f"{call.code().name}: {call.details() or 'no details'}"


def pinged_too_often(error: grpc.RpcError) -> bool:
    """Return whether the server ended the connection because of keep-alive pings."""
    return "too_many_pings" in (_call(error).details() or "")


def is_port_closed(error: grpc.RpcError) -> bool:
    """Return whether the other machine reported that the port is closed."""
    return "Connection refused" in (_call(error).details() or "")


def _call(error: grpc.RpcError) -> Any:
    # gRPC raises the call itself, which has code() and details(); its base class declares neither.
    return cast(Any, error)
