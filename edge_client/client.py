"""`EdgeClient`: run a model up to a cut here, the rest on a server, and get the model's own output."""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import nn

from edge_client.answer import Answer, Failure
from edge_client.call import Call
from edge_client.dial import check_address
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.modes import EDGE_ONLY
from edge_client.request import (
    Cut,
    Done,
    EdgeModel,
    OldKeywords,
    Position,
    Requests,
    Running,
    in_order,
    taken_over,
    work_of,
)
from edge_client.transport import Connection, ConnectionOptions, Counters, Stamps, State, check_seconds, now_ns
from edge_client.witness import check_share
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel
from shared_hooks.errors import AccessRefused, Cancelled, Disagreement, ServerUnavailable, SpecError, UnknownModel
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.lifecycle.loading import default
from shared_hooks.models import ModelSpec
from shared_hooks.profiling.kind import kind, unlike

if TYPE_CHECKING:
    from typing_extensions import Unpack

CONNECTION_ERRORS: Final = (
    ServerUnavailable,
    Disagreement,
    UnknownModel,
    AccessRefused,
)  # no input's fault: the next would fail, too


class EdgeClient:
    """A model's heads here, and a standing connection to its tails on a server.

        with EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv1") as client:
            answer = client.infer(image)

    `server` is ``HOST:PORT``, or None if everything runs here. `model` is a name or spec that `load_spec` takes, or a
    `ModelChoice`, which also takes an ``nn.Module`` and sets the device and the number of threads. `split` is the
    default cut: a layer's id or name, "input" (or "cloud-only") to send the inputs themselves, "cloud-only-file" to
    send input files as they are, which the server then reads, or "edge-only": the whole model here, without a server.
    `codec` is how frontiers travel (`shared_hooks.codecs`). `metrics` asks for the layers' times on both sides.
    `deadline`: seconds for a whole request. `connection` has the limits (`ConnectionOptions`): how long to wait for a
    server, how many requests are between head and answer, and so how many frontiers are in memory; and the
    `Credentials` that prove who is who.

    `observers` are the names of those that look at every request, on both sides (`shared_hooks.observers.named`):
    `Answer.observations`. The server must allow them, else the request fails with ObserverRefused.

    `witness`, from 0 to 1, is the share of the split requests that are computed whole here, too, and compared with what
    came back (docs/witness.md): `Answer.witness`. A difference takes the cut out of use (`refused`): CutRefused.

    `fallback="edge"`: what the server does not answer (it is gone, serves something else, refuses us) is answered by
    the whole model here, and the answer says why (`Answer.fallback`). Once nothing was served for
    `connection.patience`, later requests do not wait for it again; the server is called beside them until it is back.

    `lifecycle` has the hooks of this client's stages (docs/lifecycle.md); None = the default one, which logs.

    Any thread may call `infer`. The constructor loads the model; `open` (or ``with``) plans, hashes and connects, or
    else the first request does. `state` says how the connection is.
    """

    def __init__(
        self,
        server: str | None,
        model: str | ModelSpec | nn.Module | ModelChoice,
        split: Cut = "input",
        *,
        codec: str = "raw",
        metrics: bool = True,
        deadline: float = 60.0,
        observers: Iterable[str] = (),
        witness: float = 0.0,
        fallback: Literal["edge"] | None = None,
        lifecycle: Lifecycle | None = None,
        connection: ConnectionOptions | None = None,
        **old: Unpack[OldKeywords],
    ) -> None:
        check_share(witness)
        if fallback not in (None, "edge"):
            raise SpecError(f'fallback={fallback!r}: must be "edge" or None')
        self.server = None if server is None else check_address(server)
        self.lifecycle = default("edge") if lifecycle is None else lifecycle
        self._split = split
        self.deadline = check_seconds("deadline", deadline)
        self.choice, self.connection, observers = taken_over(
            old, ModelChoice.of(model), connection or ConnectionOptions(), observers
        )
        if self.choice.only_head is not None and (witness or fallback or split == EDGE_ONLY):
            what = "witness" if witness else 'fallback="edge"' if fallback else f'split="{EDGE_ONLY}"'
            raise SpecError(f"only_head leaves the tail's weights in their files, and {what} runs the whole model here")
        self._edge_model = EdgeModel(
            self.choice, codec=codec, metrics=metrics, observers=observers, lifecycle=self.lifecycle
        )
        self._client_id = uuid.uuid4().hex
        self.requests = Requests(
            self._edge_model,
            self._connect,
            max_in_flight=self.connection.max_in_flight,
            metrics=metrics,
            max_answer_bytes=self.connection.max_answer_bytes,
            client_id=self._client_id,
            witness=witness,
            fallback=fallback is not None,
        )
        self._fallback = fallback
        self._opening = threading.RLock()
        self._greeting = False
        self._ending = threading.Lock()  # taken by the first who closes, and kept
        self._connection: Connection | None = None
        self._closed = False

    @property
    def split(self) -> Cut:
        """The cut of requests that name none; may be set at any time."""
        return self._split

    @split.setter
    def split(self, split: Cut) -> None:
        old, self._split = self._split, split
        if split != old:
            self.lifecycle.emit(Stage.ON_SPLIT_CHANGE, old=old, new=split, reason="it was set")

    @property
    def device(self) -> torch.device:
        """Where the model runs here."""
        return self._edge_model.device

    @property
    def loaded(self) -> str | None:
        """With `ModelChoice.only_head`: how much of the weights is in memory, in words; else None."""
        only_head = self._edge_model.only_head
        return None if only_head is None else only_head.told

    @property
    def max_in_flight(self) -> int:
        """Requests between head and answer, at most."""
        return self.connection.max_in_flight

    @property
    def spec(self) -> ModelSpec | None:
        """The model's spec; None for a client made with a module."""
        return self._edge_model.spec

    @property
    def wrapped(self) -> WrappedModel:
        """The model as it runs here: its layers after `prepare` or `open`."""
        return self._edge_model.wrapped

    @property
    def observers(self) -> tuple[str, ...]:
        """Observers of every request that is begun from now on. Raises SpecError for a name that there is not."""
        return self._edge_model.observers

    @observers.setter
    def observers(self, names: Iterable[str]) -> None:
        self._edge_model.observe(names)

    @property
    def hooks(self) -> tuple[str, ...]:
        """`observers` by the old name, which goes with 0.3."""
        warnings.warn("EdgeClient.hooks is called observers now", DeprecationWarning, stacklevel=2)
        return self.observers

    @hooks.setter
    def hooks(self, names: Iterable[str]) -> None:
        warnings.warn("EdgeClient.hooks is called observers now", DeprecationWarning, stacklevel=2)
        self.observers = tuple(names)

    @property
    def witness(self) -> float:
        """The share of the split requests that are computed whole here, too."""
        return self.requests.witnesses.share

    @property
    def refused(self) -> Mapping[str, str]:
        """Cuts that witnesses took out of use: the layer's name ("input": before the first), and what was found."""
        return self.requests.witnesses.refused

    @property
    def server_about(self) -> Mapping[str, str]:
        """What the server said of its machine: versions, device, kind of processor, threads; nothing before it did."""
        welcome = self._connection.welcome if self._connection else None
        return {} if welcome is None else dict(welcome.about)

    @property
    def notes(self) -> tuple[str, ...]:
        """In what the two sides' models differ without any effect on results, as the server found: such as an attribute
        that only one release of torch keeps.
        """
        welcome = self._connection.welcome if self._connection else None
        return () if welcome is None else tuple(welcome.notes)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Why the last bits may differ between this machine and the server's, in words: release of torch, kind of
        processor, number of threads, what settings or tables the server found to differ. Empty where they are alike, or
        nothing is known.
        """
        welcome = self._connection.welcome if self._connection else None
        found = () if welcome is None else tuple(welcome.rounding)
        return (*unlike(kind(self.device), self.server_about), *found)

    @property
    def cuts(self) -> frozenset[str] | None:
        """What the server lets this side use: layers' names, "input", "cloud-only-file"; None: all, or unknown."""
        welcome = self._connection.welcome if self._connection else None
        return frozenset(welcome.cuts.names) if welcome is not None and welcome.HasField("cuts") else None

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
        """Plan the example and hash the weights, without a server. If it was not called, `open` does it."""
        if self.server is None:
            self._edge_model.plan_example()
        else:
            self._connect()
        return self

    def open(self, seconds: float | None = None) -> EdgeClient:
        """Plan, hash, connect and wait for the server's Welcome, ``seconds`` (default: `patience`) at most.

        If the default cut is "edge-only" it plans and does not connect. Without a `fallback` it raises
        ServerUnavailable, Disagreement (naming what differs), UnknownModel, NotAuthenticated (saying why).
        """
        if self.split == EDGE_ONLY:
            self._edge_model.plan_example()
            return self
        try:
            self._connect().open(self.connection.patience if seconds is None else seconds)
        except CONNECTION_ERRORS:
            if self._fallback is None:
                raise
        return self

    def close(self) -> None:
        """End the connection and remove the hooks from the model; waiting requests end with Cancelled."""
        first, self._closed = self._ending.acquire(blocking=False), True
        if first:
            self.lifecycle.emit(Stage.BEFORE_SHUTDOWN)
        if self._connection is not None:
            self._connection.close()
        self.wrapped.detach()
        if first:
            self.lifecycle.emit(Stage.AFTER_SHUTDOWN)

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

        Raises DeadlineExceeded, ServerUnavailable, UnknownLayer, CutRefused, InputMismatch, ModelFailed, ...
        (shared_hooks.errors). If the model's own arguments are called ``split`` or ``deadline``, use `infer_many`
        with a `Call`.
        """
        stamps, cut = Stamps(), self._cut(split)
        call = Call(args, kwargs)
        work = work_of(args[0] if len(args) == 1 and not kwargs else call, cut) or call
        return self.requests.finish(self.requests.begin(work, cut, stamps, self.until(deadline)))

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

        An input is a `Call`, a tuple of positional arguments, a dictionary of keyword arguments, or the only argument.
        With ``prepare`` it may be anything, and ``prepare(input)`` gives ``(args, kwargs)`` (its time and errors belong
        to that input). With "cloud-only-file" it is an `InputItem` or a path, and the server prepares it. Heads run
        in the caller's thread, between two answers. A live source (`edge_client.sources`) is asked for a frame when
        there is a place for it, and answers do not wait for its next one.

        ``failures="raise"`` ends the iteration with the first failure, at its place in the order; "return" yields a
        `Failure` there and continues. Errors of the connection (`CONNECTION_ERRORS`) always end it. Leaving the
        iteration early cancels what is under way. Do not change an input before its answer has come: the frontier is
        sent from the input's memory (the checksum detects a change, and the request fails).
        """
        cut = self._cut(split)
        self.until(deadline)  # a wrong one is nobody's failure but the caller's

        def start(item: Any, position: Position) -> Running | Done:
            stamps, until = Stamps(), self.until(deadline)
            work = work_of(item, cut) or (Call(*prepare(item)) if prepare else Call.of(item))
            stamps.prepared = now_ns()
            return self.requests.begin(work, cut, stamps, until, position)

        return in_order(
            inputs,
            self.max_in_flight,
            start=start,
            finish=self.requests.finish,
            cancel=lambda running: self.requests.cancel(running, "the iteration was left"),
            fatal=CONNECTION_ERRORS,
            raise_failures=failures == "raise",
            lifecycle=self.lifecycle,
        )

    def _connect(self) -> Connection:
        with self._opening:
            if self._closed:
                raise Cancelled("the client is closed")
            if self.server is None:
                raise SpecError('no server: this client was made without one, for split="edge-only"')
            if self._connection is None:
                self._connection = Connection(
                    self.server,
                    self._hello(),
                    self.connection,
                    lifecycle=self.lifecycle,
                    describe=self._edge_model.manifest,
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

    def _cut(self, split: Cut | None) -> Cut:
        return self.split if split is None else split

    def until(self, deadline: float | None) -> float:
        """``time.monotonic()`` at which a request of now is given up. Raises SpecError."""
        return time.monotonic() + check_seconds("deadline", self.deadline if deadline is None else deadline)
