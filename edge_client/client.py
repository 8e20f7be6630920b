"""`EdgeClient`: run a model up to a cut here, the rest on a server, and get the model's own output."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, overload

from torch import nn

from edge_client import wire
from edge_client.answer import Answer, Call, Failure
from edge_client.connection import Connection
from edge_client.exchange import Exchange
from edge_client.half import Cut, EdgeHalf, Head, Inputs
from edge_client.many import in_order
from edge_client.options import ConnectionOptions, KeepAlive, check_address, check_seconds
from edge_client.state import Counters, State
from edge_client.times import Stamps, Times, now_ns
from shared_hooks import WrappedModel
from shared_hooks.errors import (
    Cancelled,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    PlanMismatch,
    ServerUnavailable,
    UnknownModel,
)
from shared_hooks.models import ModelSpec, pick_device, set_threads

CONNECTION_ERRORS: Final = (ServerUnavailable, Disagreement, UnknownModel)  # no input's fault: the next would fail, too


@dataclass(slots=True)
class _Running:
    """A request on its way, with what is needed to finish it or to start it over."""

    connection: Connection
    exchange: Exchange
    call: Call
    cut: Cut
    head: Head

    @property
    def settled(self) -> bool:
        return self.exchange.settled


class EdgeClient:
    """The edge half of a model, and a standing connection to the cloud half.

        with EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv1") as client:
            answer = client.infer(image)

    `server` is ``HOST:PORT``. `model` is a name or spec that `load_spec` takes, a `ModelSpec`, or an ``nn.Module`` (in
    eval mode, with its weights; then `model_id` is what the server calls it, and `example` its ``(args, kwargs)`` to
    plan on, if the server's spec has one). `split` is the default cut: a layer's id or name, or "input" to send the
    inputs themselves. Seconds: `deadline` for a request as a whole; `patience` to go without a server before giving up.
    `max_in_flight` bounds the requests between head and answer, and with them the frontiers in memory. `codec` is
    "raw" or "lz4". `metrics` asks for the layers' times on both sides. `threads` is a setting of the whole process.

    Any thread may call `infer`. The constructor loads the model; `open` (or ``with``) plans, hashes and connects, and
    the first request does so otherwise. The connection's life is `State`.
    """

    def __init__(
        self,
        server: str,
        model: str | ModelSpec | nn.Module,
        split: Cut = "input",
        *,
        model_id: str | None = None,
        example: Inputs | None = None,
        device: str = "auto",
        threads: int | None = None,
        depth: int | None = None,
        codec: str = "raw",
        metrics: bool = True,
        deadline: float = 60.0,
        patience: float = 15.0,
        max_in_flight: int = 4,
        chunk_bytes: int = wire.CHUNK_BYTES,
        max_answer_bytes: int = 1 << 30,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        self.server = check_address(server)
        self.split = split
        self.deadline = check_seconds("deadline", deadline)
        self._options = ConnectionOptions(
            patience=patience,
            max_in_flight=max_in_flight,
            chunk_bytes=chunk_bytes,
            keep_alive=keep_alive or KeepAlive(),
        )
        set_threads(threads)
        self.device = pick_device(device)
        self._half = EdgeHalf(
            model, self.device, model_id=model_id, example=example, depth=depth, codec=codec, metrics=metrics
        )
        self._metrics = metrics
        self._max_answer_bytes = max_answer_bytes
        self._client_id = uuid.uuid4().hex
        self._ids = itertools.count(1)
        self._places = threading.Semaphore(max_in_flight)
        self._opening = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False

    @property
    def spec(self) -> ModelSpec | None:
        """The model's spec; None for a client made with a module."""
        return self._half.spec

    @property
    def wrapped(self) -> WrappedModel:
        """The model as it runs here: its layers after `prepare` or `open`."""
        return self._half.wrapped

    @property
    def state(self) -> State:
        """Where the connection stands."""
        if self._closed:
            return State.CLOSED
        return self._connection.state if self._connection else State.UNOPENED

    @property
    def counters(self) -> Counters:
        """Streams, attempts, requests sent again, stray answers."""
        return self._connection.counters if self._connection else Counters()

    def prepare(self) -> EdgeClient:
        """Plan the example and hash the weights; no server is needed. `open` does it otherwise."""
        self._connect()
        return self

    def open(self, seconds: float | None = None) -> EdgeClient:
        """Plan, hash, connect and wait for the server's Welcome, ``seconds`` (default: `patience`) at most.

        Raises ServerUnavailable, Disagreement (naming what differs), UnknownModel.
        """
        self._connect().open(self._options.patience if seconds is None else seconds)
        return self

    def close(self) -> None:
        """End the connection and take the hooks off the model; requests still waiting end with Cancelled."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        self.wrapped.detach()

    def __enter__(self) -> EdgeClient:
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def infer(self, *args: Any, split: Cut | None = None, deadline: float | None = None, **kwargs: Any) -> Answer:
        """The model's output for ``(*args, **kwargs)``: head here, tail on the server.

        Raises what went wrong by its name: DeadlineExceeded, ServerUnavailable, UnknownLayer, CutRefused,
        InputMismatch, ModelFailed, ... (shared_hooks.errors). A model whose own arguments are called ``split`` or
        ``deadline`` takes them through `infer_many` and `Call`.
        """
        stamps = Stamps()
        return self._finish(self._begin(Call(args, kwargs), self._cut(split), stamps, self._until(deadline)))

    @overload
    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        split: Cut | None = None,
        deadline: float | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise"] = "raise",
    ) -> Iterator[Answer]: ...
    @overload
    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        split: Cut | None = None,
        deadline: float | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["return"],
    ) -> Iterator[Answer | Failure]: ...
    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        split: Cut | None = None,
        deadline: float | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise", "return"] = "raise",
    ) -> Iterator[Answer | Failure]:
        """Answers in the order of ``inputs``, with up to `max_in_flight` requests under way.

        An input is a `Call`, a tuple of positional arguments, a dictionary of keyword arguments, or the only argument;
        with ``prepare`` it is anything, and ``prepare(input)`` gives ``(args, kwargs)`` (its time and its errors belong
        to that input). Heads run in the caller's thread, between two answers.

        ``failures="raise"`` ends the iteration with the first failure, at its place in the order; "return" yields a
        `Failure` there and goes on. Errors of the connection (`CONNECTION_ERRORS`) always end it. An iteration that is
        left early cancels what is under way. An input must not be changed before its answer has come: the frontier is
        sent from where it lies (one that was changed is noticed by its checksum, and fails).
        """
        cut = self._cut(split)
        self._until(deadline)  # a wrong one is nobody's failure but the caller's

        def start(item: Any) -> _Running:
            stamps, until = Stamps(), self._until(deadline)
            call = Call(*prepare(item)) if prepare else Call.of(item)
            stamps.prepared = now_ns()
            return self._begin(call, cut, stamps, until)

        return in_order(
            inputs,
            self._options.max_in_flight,
            start=start,
            finish=self._finish,
            cancel=lambda running: running.connection.cancel(running.exchange, Cancelled("the iteration was left")),
            fatal=CONNECTION_ERRORS,
            raise_failures=failures == "raise",
        )

    def _begin(self, call: Call, cut: Cut, stamps: Stamps, until: float) -> _Running:
        """Wait for a place, run the head, submit."""
        connection = self._connect()
        if not self._places.acquire(timeout=max(0.0, until - time.monotonic())):
            most = self._options.max_in_flight
            raise DeadlineExceeded(f"{most} requests are in flight and none was answered before the deadline")
        stamps.admitted = now_ns()
        try:
            head = self._half.head(call, cut, stamps)
            exchange = Exchange(
                next(self._ids),
                head.outgoing,
                until=until,
                stamps=stamps,
                check_header=lambda header, size: wire.check_answer(header, size, self._max_answer_bytes),
                want_metrics=self._metrics,
                on_settled=self._places.release,
            )
        except BaseException:
            self._places.release()
            raise
        connection.submit(exchange)
        return _Running(connection, exchange, call, cut, head)

    def _finish(self, running: _Running) -> Answer:
        """Wait for the answer. A path that the plan did not hold is added to it, and the input sent once more."""
        try:
            return self._collect(running)
        except PlanMismatch as error:
            if running.exchange.error is not error:
                raise
        old = running.exchange.stamps
        self._half.plan(running.call)
        stamps = Stamps(called=old.called, prepared=old.prepared)
        stamps.retry_ns = now_ns() - (old.called if old.prepared is None else old.prepared)
        return self._collect(self._begin(running.call, running.cut, stamps, running.exchange.until))

    def _collect(self, running: _Running) -> Answer:
        exchange, connection = running.exchange, running.connection
        try:
            if not exchange.wait():
                connection.cancel(exchange, self._too_late(exchange, connection))
        except BaseException:
            connection.cancel(exchange, Cancelled("the caller was interrupted"))
            raise
        stamps = exchange.stamps
        stamps.taken = now_ns()
        if exchange.error is not None:
            raise exchange.error
        assert exchange.reply is not None
        output = self._half.output(exchange)
        stamps.unpacked = finished = now_ns()
        return Answer(
            output=output,
            request_id=exchange.id,
            split=running.head.split,
            layer_id=running.head.layer_id,
            times=Times.from_stamps(stamps, wire.server_times(exchange.reply.durations)),
            layers_edge=running.head.layers,
            layers_cloud=wire.layer_metrics(exchange.reply),
            bytes_up=exchange.bytes_up,
            bytes_down=exchange.bytes_down,
            sends=exchange.sends,
            measured_ns=finished - stamps.called,
            finished_ns=finished,
        )

    def _too_late(self, exchange: Exchange, connection: Connection) -> IsthmusError:
        what = f"no answer from {self.server} to request {exchange.id} before its deadline"
        if connection.state is not State.READY:
            return ServerUnavailable(f"{what}: no connection (last: {connection.last_reason})")
        if exchange.put_off_by is not None:
            return DeadlineExceeded(f"{what}: put off {exchange.put_offs} times (last: {exchange.put_off_by})")
        return DeadlineExceeded(what)

    def _connect(self) -> Connection:
        with self._opening:
            if self._closed:
                raise Cancelled("the client is closed")
            if self._connection is None:
                self._connection = Connection(self.server, self._half.greeting(self._client_id), self._options)
            return self._connection

    def _cut(self, split: Cut | None) -> Cut:
        return self.split if split is None else split

    def _until(self, deadline: float | None) -> float:
        return time.monotonic() + check_seconds("deadline", self.deadline if deadline is None else deadline)
