"""`ClientCore`: a model on this side, a connection to its tails, and requests at a given cut."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from edge_client import dial
from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.choosing import chooser_of
from edge_client.model_choice import ModelChoice
from edge_client.request import Books, Cut, EdgeModel, Requests
from edge_client.settings import chain_of
from edge_client.transport import Connection, ConnectionOptions, Counters, Stamps, State
from edge_client.transport.wire import codecs_of
from edge_client.user_text import check_seconds
from edge_client.witness import check_share
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel, codecs
from shared_hooks.codecs import CODECS, is_offered
from shared_hooks.errors import AccessRefused, Cancelled, Disagreement, ServerUnavailable, SpecError, UnknownModel
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.lifecycle.registry import default
from shared_hooks.models import ModelSpec
from shared_hooks.profiling.machine import kind, unlike

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_client.planning.codecs import Codecs, LossTable
    from edge_client.planning.link import Link

CONNECTION_ERRORS: Final = (
    ServerUnavailable,
    Disagreement,
    UnknownModel,
    AccessRefused,
)  # not the input's fault: the next one would fail, too


class ClientCore:
    """What `EdgeClient`, the policies that choose cuts for it, and generation have in common: one model here, and one
    connection, opened when it is first needed, to the server of its tails (``HOST:PORT``; a list: the servers of a
    chain; None: everything runs here).

    Arguments are those of `EdgeClient`; ``postprocess``: output -> `Answer.result`. Thread-safe. Use it as a context
    manager, which plans, hashes and connects, or call `close` at the end.
    """

    def __init__(
        self,
        server: str | Sequence[str] | None,
        choice: ModelChoice,
        *,
        codec: str = "raw",
        calibration: str | Path | LossTable | None = None,
        max_loss: str | float | None = None,
        metrics: bool = True,
        deadline: float = 60.0,
        observers: Iterable[str] = (),
        witness: float = 0.0,
        fallback: bool = False,
        exact: bool = True,
        lifecycle: Lifecycle | None = None,
        connection: ConnectionOptions | None = None,
        postprocess: Callable[[Any], Any] | None = None,
    ) -> None:
        check_share(witness)
        self.chain = chain_of(server)
        """The servers, in order: the first is connected to, and each hands on to the next."""
        self.server = self.chain[0] if self.chain else None
        self.choice = choice
        self.codec = codec = codec if codec == "auto" else codecs.check(codec)
        self.connection = connection = connection or ConnectionOptions()
        self.lifecycle = default("edge") if lifecycle is None else lifecycle
        self.deadline = check_seconds("deadline", deadline)
        chooser, table = chooser_of(
            codec, calibration, max_loss, server=self.server, credentials=connection.credentials
        )
        self._edge_model = EdgeModel(
            choice,
            codec=codec if chooser is None else "raw",
            chooser=chooser,
            learnt=table,
            metrics=metrics,
            observers=observers,
            lifecycle=self.lifecycle,
        )
        self._fallback = fallback
        self._client_id = uuid.uuid4().hex
        self._opening = threading.RLock()
        self._ending = threading.Lock()  # acquired by the first caller that closes, and kept
        self._greeting = False
        self._connection: Connection | None = None
        self._closed = False
        self.requests = Requests(
            self._edge_model,
            self._connect,
            max_concurrent=connection.max_concurrent,
            max_pipelined=connection.max_pipelined,
            max_in_flight_bytes=connection.max_in_flight_bytes,
            metrics=metrics,
            max_answer_bytes=connection.max_answer_bytes,
            client_id=self._client_id,
            witness=witness,
            fallback=fallback,
            exact=exact,
            postprocess=postprocess,
        )

    def prepare(self) -> Self:
        """Plan the example and hash the weights, without a server. Connecting does it otherwise."""
        if self.server is None:
            self._edge_model.plan_example()
        else:
            self._connect()
        return self

    def check_unchanged(self) -> None:
        """Raise Disagreement if the model's weights or numbers have changed since the server agreed on them."""
        self._edge_model.check_unchanged()

    def connect(self, seconds: float | None = None) -> None:
        """Plan, hash, connect and wait for the server's Welcome, at most ``seconds`` (default: `patience`).

        Without a `fallback` it raises ServerUnavailable, Disagreement, UnknownModel, NotAuthenticated.
        """
        try:
            self._connect().open(self.connection.patience if seconds is None else seconds)
        except CONNECTION_ERRORS:
            if not self._fallback:
                raise

    def close(self) -> None:
        """Close the connection and remove the hooks from the model; waiting requests end with Cancelled."""
        first, self._closed = self._ending.acquire(blocking=False), True
        if first:
            self.lifecycle.emit(Stage.BEFORE_SHUTDOWN)
        self._stop()
        if self._connection is not None and not dial.is_forked:  # there it is the other process's
            self._connection.close()
        self.wrapped.detach()
        if first:
            self.lifecycle.emit(Stage.AFTER_SHUTDOWN)

    def _stop(self) -> None:
        """Stop what must end before the connection does."""

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def request(self, call: Call, cut: Cut) -> Answer:
        """Return the answer to one call, cut there. Raises as `EdgeClient.infer`."""
        return self.requests.finish(self.requests.begin(call, cut, Stamps(), self.until(None)))

    def until(self, deadline: float | None) -> float:
        """Return the deadline of a request that starts now, on ``time.monotonic()``. Raises SpecError."""
        return time.monotonic() + check_seconds("deadline", self.deadline if deadline is None else deadline)

    def codec_link(self, link: Callable[[], Link]) -> None:
        """If codecs are chosen, use this estimate of the link from now on, as ``split="auto"`` does."""
        if self._edge_model.chooser is not None:
            self._edge_model.chooser.follow(link)

    @property
    def codecs_chosen_from(self) -> Codecs | None:
        """With ``codec="auto"``: the codecs, and what they may lose; else None."""
        return None if self._edge_model.chooser is None else self._edge_model.chooser.codecs

    @property
    def books(self) -> dict[str, Books]:
        """The books of "basis" and "frames" for the pieces of each cut, by its name (`shared_hooks.crossing.books_of`).

        Empty without a calibration; may be changed at any time. At a cut without books these codecs send raw bytes.
        """
        return self._edge_model.books

    @property
    def witness(self) -> float:
        """The share of the split requests that are also computed completely on this side."""
        return self.requests.witnesses.share

    @property
    def refused(self) -> Mapping[str, str]:
        """Cuts that witnesses have disabled: the layer's name ("input": before the first), and the reason."""
        return self.requests.witnesses.refused

    @property
    def model_id(self) -> str:
        """The server's name for the model."""
        return self._edge_model.model_id

    @property
    def device(self) -> torch.device:
        """The device of the model on this side."""
        return self._edge_model.device

    @property
    def loaded(self) -> str | None:
        """With `ModelChoice.only_head`: how much of the weights is in memory, as text; else None."""
        only_head = self._edge_model.only_head
        return None if only_head is None else only_head.summary

    @property
    def spec(self) -> ModelSpec | None:
        """The model's spec; None for a client created with a module."""
        return self._edge_model.spec

    @property
    def wrapped(self) -> WrappedModel:
        """The model as it runs here; it has layers after `prepare` or `open`."""
        return self._edge_model.wrapped

    @property
    def max_in_flight(self) -> int:
        """The maximum number of concurrent single requests; a run of many may have more (`ConnectionOptions`)."""
        return self.connection.max_concurrent

    @property
    def observers(self) -> tuple[str, ...]:
        """The observers of every request that begins from now on. Raises SpecError for an unknown name."""
        return self._edge_model.observers

    @observers.setter
    def observers(self, names: Iterable[str]) -> None:
        self._edge_model.observe(names)

    @property
    def server_about(self) -> Mapping[str, str]:
        """The server's description of its machine: versions, device, kind of processor, threads; empty before the
        handshake.
        """
        welcome = self._welcome
        return {} if welcome is None else dict(welcome.about)

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences between the two sides' models without any effect on results, as the server found: such as an
        attribute that only one release of torch keeps.
        """
        welcome = self._welcome
        return () if welcome is None else tuple(welcome.notes)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Why the last bits may differ between this machine and the server's: torch's release, kind of processor,
        number of threads, settings or tables that differ. Empty if they are alike, or nothing is known.
        """
        welcome = self._welcome
        found = () if welcome is None else tuple(welcome.rounding)
        return (*unlike(kind(self.device), self.server_about), *found)

    @property
    def cuts(self) -> frozenset[str] | None:
        """The cuts that the server lets this client use: layers' names, "input", "cloud-only-file"; None: all, or
        unknown.
        """
        welcome = self._welcome
        return frozenset(welcome.cuts.names) if welcome is not None and welcome.HasField("cuts") else None

    @property
    def codecs(self) -> tuple[str, ...] | None:
        """The codecs that both sides support; None before the handshake."""
        welcome = self._welcome
        return None if welcome is None else tuple(name for name in CODECS if is_offered(name, codecs_of(welcome)))

    @property
    def state(self) -> State:
        """The state of the connection."""
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
        dial.check_process()
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
                    otherwise=self._fallback,
                    codec=self._edge_model.codec,
                )
                if self.state is State.CLOSED:  # closed meanwhile by a thread that found nothing to close
                    self._connection.close()
                    raise Cancelled("the client is closed")
            return self._connection

    def _hello(self) -> split_pb2.ClientFrame:
        """Return the greeting, made with the lock; hooks hear of its plan."""
        if self._greeting:
            raise SpecError("a hook at before_plan or after_plan asked for a request while the first one is planned")
        self._greeting = True
        try:
            return self._edge_model.greeting(self._client_id)
        finally:
            self._greeting = False
