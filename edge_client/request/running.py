"""`Running`: a request on its way. `Done`: one that was answered on this side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.modes import CLOUD_FILE
from edge_client.request.edge_model import Cut, Head
from edge_client.transport import Connection, Exchange, Stamps, State, now_ns
from edge_client.witness import Kept
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    QuotaExceeded,
    RemoteError,
    ServerUnavailable,
    SpecError,
    UnknownModel,
    WorkerLost,
)
from shared_hooks.lifecycle import About

NOT_SERVED: Final = (
    *(ServerUnavailable, Disagreement, UnknownModel, AccessRefused, QuotaExceeded),
    *(RemoteError, WorkerLost),
)
"""The server's fault, or its wish: the whole model on this side has an answer, where it may be asked for one."""


@dataclass(slots=True)
class Running:
    """A request on its way, with what is needed to finish it or to start it over."""

    connection: Connection
    exchange: Exchange
    work: Call | Path
    cut: Cut
    head: Head
    about: About
    kept: Kept | None = None  # for a witness
    over: bool = False  # hooks have heard how it ended, or will
    again: Running | None = None  # what was begun in its place
    exact: bool = True
    codec: str = ""  # chosen with the cut
    bytes_ahead: int = 0  # of requests that were to be sent before it, where codecs are chosen

    @property
    def settled(self) -> bool:
        return self.exchange.settled


@dataclass(frozen=True, slots=True)
class Done:
    """What was answered on this side."""

    answer: Answer
    settled: bool = True


def settle(exchange: Exchange, connection: Connection) -> None:
    """Wait until it is answered, or has failed: its deadline, the last; and the connection is informed."""
    try:
        if not exchange.wait():
            connection.cancel(exchange, _too_late(exchange, connection))
    except BaseException:
        connection.cancel(exchange, Cancelled("the caller was interrupted"))
        raise


def restarted(old: Stamps) -> Stamps:
    """For a request that starts over: what was done until now was in vain, but for what was put aside."""
    stamps = Stamps(called=old.called, prepared=old.prepared, kept_ns=old.aside_ns)
    stamps.retry_ns = now_ns() - (old.called if old.prepared is None else old.prepared) - old.aside_ns
    return stamps


def work_of(item: object, cut: Cut) -> Path | None:
    """The file to send as it is; None where the cut is another one."""
    if cut != CLOUD_FILE:
        return None
    path = getattr(item, "path", item)
    if not isinstance(path, Path):
        raise SpecError(f'split="{CLOUD_FILE}" takes input files (a path or an InputItem), not {type(item).__name__}')
    return path


def _too_late(exchange: Exchange, connection: Connection) -> IsthmusError:
    what = f"no answer from {connection.address} to request {exchange.id} before its deadline"
    if connection.state is not State.READY:
        return ServerUnavailable(f"{what}: no connection (last: {connection.last_reason})")
    if exchange.put_off_by is not None:
        return DeadlineExceeded(f"{what}: put off {exchange.put_offs} times (last: {exchange.put_off_by})")
    return DeadlineExceeded(what)
