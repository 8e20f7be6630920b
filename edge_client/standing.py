"""`Standing`: where a client stands. Its model on this side, its connection, what the server said of itself there."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping

import torch

from edge_client.call import Call
from edge_client.request import EdgeModel
from edge_client.transport import Connection, ConnectionOptions, Counters, State
from edge_client.transport.wire import codecs_of
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel
from shared_hooks.codecs import CODECS
from shared_hooks.errors import Cancelled, SpecError
from shared_hooks.models import ModelSpec
from shared_hooks.profiling.kind import kind, unlike


class Standing:
    """One model here, and one connection, made when it is first needed, to the server of its tails (``HOST:PORT``, or
    None: everything runs here). Any thread may ask.
    """

    def __init__(
        self, server: str | None, edge_model: EdgeModel, connection: ConnectionOptions, *, otherwise: bool
    ) -> None:
        """``otherwise``: what the server does not answer is answered here."""
        self.server = server
        self.connection = connection
        self.lifecycle = edge_model.lifecycle
        self._edge_model = edge_model
        self._otherwise = otherwise
        self._client_id = uuid.uuid4().hex
        self._opening = threading.RLock()
        self._greeting = False
        self._connection: Connection | None = None
        self._closed = False

    @property
    def model_id(self) -> str:
        """What the server calls the model."""
        return self._edge_model.model_id

    @property
    def device(self) -> torch.device:
        """Where the model runs here."""
        return self._edge_model.device

    @property
    def loaded(self) -> str | None:
        """With `ModelChoice.only_head`: how much of the weights is in memory, in words; else None."""
        only_head = self._edge_model.only_head
        return None if only_head is None else only_head.summary

    @property
    def spec(self) -> ModelSpec | None:
        """The model's spec; None for a client made with a module."""
        return self._edge_model.spec

    @property
    def wrapped(self) -> WrappedModel:
        """The model as it runs here: its layers after `prepare` or `open`."""
        return self._edge_model.wrapped

    @property
    def max_in_flight(self) -> int:
        """Requests between head and answer, at most; of a run of many there may be more (`ConnectionOptions`)."""
        return self.connection.at_once

    @property
    def observers(self) -> tuple[str, ...]:
        """Observers of every request that is begun from now on. Raises SpecError for a name that there is not."""
        return self._edge_model.observers

    @observers.setter
    def observers(self, names: Iterable[str]) -> None:
        self._edge_model.observe(names)

    @property
    def server_about(self) -> Mapping[str, str]:
        """What the server said of its machine: versions, device, kind of processor, threads; nothing before it did."""
        welcome = self._welcome
        return {} if welcome is None else dict(welcome.about)

    @property
    def notes(self) -> tuple[str, ...]:
        """In what the two sides' models differ without any effect on results, as the server found: such as an attribute
        that only one release of torch keeps.
        """
        welcome = self._welcome
        return () if welcome is None else tuple(welcome.notes)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Why the last bits may differ between this machine and the server's, in words: release of torch, kind of
        processor, number of threads, what settings or tables the server found to differ. Empty where they are alike, or
        nothing is known.
        """
        welcome = self._welcome
        found = () if welcome is None else tuple(welcome.rounding)
        return (*unlike(kind(self.device), self.server_about), *found)

    @property
    def cuts(self) -> frozenset[str] | None:
        """What the server lets this side use: layers' names, "input", "cloud-only-file"; None: all, or unknown."""
        welcome = self._welcome
        return frozenset(welcome.cuts.names) if welcome is not None and welcome.HasField("cuts") else None

    @property
    def codecs(self) -> tuple[str, ...] | None:
        """The codecs that both sides have; None before the server has said which it has."""
        welcome = self._welcome
        return None if welcome is None else tuple(name for name in codecs_of(welcome) if name in CODECS)

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

    def plan_for(self, call: Call) -> str:
        """Plan this call here; the plan's digest. Raises InputMismatch, ModelFailed."""
        return self._edge_model.plan(call)

    @property
    def _welcome(self) -> split_pb2.Welcome | None:
        return self._connection.welcome if self._connection else None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Cancelled("the client is closed")

    def _connect(self) -> Connection:
        with self._opening:
            self._refuse_closed()
            if self.server is None:
                raise SpecError('no server: this client was made without one, for split="edge-only"')
            if self._connection is None:
                self._connection = Connection(
                    self.server,
                    self._hello(),
                    self.connection,
                    lifecycle=self.lifecycle,
                    describe=self._edge_model.manifest,
                    otherwise=self._otherwise,
                    codec=self._edge_model.codec,
                )
                if self.state is State.CLOSED:  # meanwhile, by a thread that found nothing to close
                    self._connection.close()
                    raise Cancelled("the client is closed")
            return self._connection

    def _hello(self) -> split_pb2.ClientFrame:
        """The greeting, made with the lock; hooks hear of its plan."""
        if self._greeting:
            raise SpecError("a hook at before_plan or after_plan asked for a request while the first one is planned")
        self._greeting = True
        try:
            return self._edge_model.greeting(self._client_id)
        finally:
            self._greeting = False
