"""`Running`: a request on its way. `Done`: one that was answered on this side."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.request.edge_model import Cut, EdgeModel, Head
from edge_client.request.many import Position
from edge_client.spoken import CLOUD_FILE
from edge_client.transport import Connection, Exchange, Stamps, State, now_ns
from edge_client.witness import Kept
from protos.isthmus.v1 import split_pb2
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
from shared_hooks.lifecycle import About, Stage

NOT_SERVED: Final = (
    *(ServerUnavailable, Disagreement, UnknownModel, AccessRefused, QuotaExceeded),
    *(RemoteError, WorkerLost),
)
"""The server's fault, or its wish: the whole model on this side has an answer, where it may be asked for one."""


Route = tuple[split_pb2.Hop, ...]
"""The parts of the model behind the first server's, and who computes them; empty: it computes to the end."""


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
    route: Route = ()  # of a chain
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


# `Reports`: requests get their numbers, and hooks hear what becomes of them.


class Reports:
    """Numbers the requests of one client, and calls its hooks. Any thread may call."""

    def __init__(self, edge_model: EdgeModel, client_id: str) -> None:
        self.lifecycle = edge_model.lifecycle
        self._edge_model = edge_model
        self._client_id = client_id
        self._ids = itertools.count(1)
        self._singles = itertools.count()

    def about(self, position: Position | None = None) -> About:
        """A new request; ``position``: where in its run its input is, None for one by itself."""
        position = position or Position(next(self._singles), None)
        return About(self.next_id(), position.index, position.total, self._edge_model.model_id, self._client_id)

    def next_id(self) -> int:
        """No other request of this client has it."""
        return next(self._ids)

    def ending(self, about: About, answer: Callable[[], Answer]) -> Answer:
        """``answer()``, with which the request is over: with what it gives, or with what it raises."""
        try:
            with self.lifecycle.request(about):
                given = answer()
                self.lifecycle.emit(Stage.ON_RESULT, answer=given)
        except BaseException as error:
            self.over(about, error)
            raise
        self.over(about, answer=given)
        return given

    def over(self, about: About, error: BaseException | None = None, answer: Answer | None = None) -> None:
        """Hooks hear how it ended. Ctrl-C and what abandons a hedge are no errors."""
        if error is not None and not isinstance(error, Exception):
            error = Cancelled("the caller was interrupted")
        if error is not None and not isinstance(error, Cancelled):
            self.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=error)
        self.lifecycle.emit(Stage.AFTER_REQUEST, about, error=error, answer=answer)
