"""The stages where hooks are called: when each occurs on which side, and what its event contains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shared_hooks.errors import SpecError, near


class Stage(Enum):
    """The stages, roughly in chronological order. A value is also the name of a hook object's method.

    Each has `edge` and `cloud`: when it occurs on that side, empty if it does not; and `facts`: what its event has
    besides `stage`, `side` and `request`. Values are live; do not change them.

    For run, request, shutdown, and the cloud's drain, ``after_X`` always follows ``before_X``; for the others only on
    success. Send, receive and the connection's stages occur in threads of their own: ``after_send`` may come when the
    answer is already there.
    """

    edge: str
    cloud: str
    facts: tuple[str, ...]

    def __new__(cls, value: str, edge: str, cloud: str, facts: str) -> Stage:
        made = object.__new__(cls)
        made._value_ = value
        made.edge, made.cloud, made.facts = edge, cloud, tuple(facts.split())
        return made

    __hash__ = object.__hash__  # Enum's own hash is written in Python, and every stage would pay for it

    BEFORE_MODEL_LOAD = "before_model_load", "a client is made", "the server starts", "model_id"
    AFTER_MODEL_LOAD = (
        "after_model_load",
        "the model is wrapped",
        "the same, and planned",
        ("model_id wrapped identity"),
    )
    BEFORE_RUN = "before_run", "many inputs are begun (infer_many)", "the server is about to listen", "total address"
    BEFORE_CONNECT = "before_connect", "a stream is tried", "", "address attempt"
    BEFORE_HANDSHAKE = "before_handshake", "hello is about to go", "hello has come", "hello peer"
    AFTER_HANDSHAKE = (
        "after_handshake",
        "the server has welcomed",
        "both sides agree",
        "welcome client peer model_id brief",
    )
    AFTER_CONNECT = "after_connect", "requests can flow", "a client's stream is there", "address peer"
    BEFORE_PLAN = "before_plan", "a model is about to be recorded on inputs", "the same", "args kwargs"
    AFTER_PLAN = "after_plan", "the plan is made, or was known", "the same", "plan"
    BEFORE_REQUEST = (
        "before_request",
        "an input is about to be run; HookRefused refuses it",
        "a request is announced and has a place; HookRefused refuses it",
        "inputs split client nbytes began_ns",
    )
    BEFORE_HEAD = "before_head", "the model runs up to the cut, or (edge-only) to its end", "", "split"
    BEFORE_BANK = "before_bank", "the cut is reached; what crosses is taken", "", "split"
    AFTER_BANK = "after_bank", "the frontier is there", "", "split early"
    AFTER_HEAD = "after_head", "the head is over", "", "split early output"
    BEFORE_ENCODE = "before_encode", "a frontier or a file is packed", "an output is packed", "value"
    AFTER_ENCODE = "after_encode", "it is bytes", "it is bytes", "nbytes"
    BEFORE_SEND = "before_send", "a request's first frame goes", "an answer's first frame goes", "nbytes"
    AFTER_SEND = "after_send", "gRPC has its last", "gRPC has its last", "nbytes"
    BEFORE_RECEIVE = "before_receive", "an answer's header has come", "a request's header has come", "nbytes"
    AFTER_RECEIVE = "after_receive", "all of it is there", "all of it is there", "nbytes"
    BEFORE_DECODE = "before_decode", "an answer is unpacked", "a frontier is unpacked or a file is read", "nbytes"
    AFTER_DECODE = "after_decode", "the output is there", "what crossed is there", "value"
    BEFORE_INJECT = "before_inject", "", "what crossed is put in its place", "split early"
    AFTER_INJECT = "after_inject", "", "the cut is reached", "split"
    BEFORE_TAIL = "before_tail", "", "the rest of the model runs, or (a file) all of it", "split"
    AFTER_TAIL = "after_tail", "", "the output is there", "split output"
    ON_RESULT = "on_result", "the caller gets the answer", "the answer is ready to be sent", "answer computed"
    ON_ERROR = "on_error", "a request or the connection failed", "a request, a stream or a call failed", "where error"
    AFTER_REQUEST = (
        "after_request",
        "it is answered, failed or cancelled",
        "the same",
        ("error answer split nbytes reply began_ns"),
    )
    ON_SPLIT_CHANGE = "on_split_change", "requests are cut elsewhere from now on", "", "old new reason"
    ON_DISCONNECT = (
        "on_disconnect",
        "a stream that had been welcomed ended",
        "a client's stream ended",
        ("address client peer reason brief"),
    )
    BEFORE_RECONNECT = (
        "before_reconnect",
        "a caller waits, and there is no stream; back-off",
        "",
        ("address reason waiting"),
    )
    AFTER_RECONNECT = (
        "after_reconnect",
        "there is a stream again; what was unanswered is sent again",
        "",
        ("address resent"),
    )
    AFTER_RUN = "after_run", "the last is answered, or the caller left", "the server no longer listens", "total address"
    BEFORE_DRAIN = "before_drain", "the server announces that it drains", "nothing new is taken from now on", "address"
    AFTER_DRAIN = "after_drain", "", "all is answered, or the time is up", "answered"
    BEFORE_SHUTDOWN = "before_shutdown", "the client is closed", "streams and threads are ended", ""
    AFTER_SHUTDOWN = "after_shutdown", "threads are ended, the model is as it was", "they have ended", ""

    def comes(self, side: str) -> bool:
        """Return whether the stage exists on this side; a `WrappedModel` by itself ("local") may have any."""
        return bool({"edge": self.edge, "cloud": self.cloud}.get(side, "yes"))

    @classmethod
    def of(cls, stage: Stage | str) -> Stage:
        """Return the stage of this name. Raises SpecError, with similar names, if there is none."""
        if isinstance(stage, Stage):
            return stage
        names = {known.value: known for known in cls}
        if stage not in names:
            raise SpecError(f'no stage is called "{str(stage)[:80]}".{near(str(stage), names)}')
        return names[stage]


# The argument of a hook.


@dataclass(frozen=True, slots=True)
class About:
    """The request that an event belongs to.

    ``index`` counts from 0: on the edge within the run (`infer_many`), or within the client's single requests; on the
    cloud within the process (-1: it was not accepted). ``total``: the number of requests in the run; None if unknown.
    ``id`` is the same on both sides, together with ``client``; but an input whose path the plan did not contain is sent
    once more under another (`Answer.request_id`). On the cloud, ``identity`` is the name that the client's credentials
    prove, empty without; ``account``: what the request is charged to. ``carrier`` is sent with the request: a hook at
    ``before_request`` on the edge may set its "traceparent".
    """

    id: int
    index: int
    total: int | None = None
    model_id: str = ""
    client: str = ""
    identity: str = ""
    account: str = ""
    carrier: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


class Event:
    """The event of one stage: ``stage``, ``side`` ("edge", "cloud", or "local" for a `WrappedModel` by itself),
    ``request`` (None if it belongs to none), and the stage's facts as attributes.
    """

    __slots__ = ("facts", "request", "side", "stage")

    def __init__(self, stage: Stage, side: str, request: About | None, facts: Mapping[str, Any]) -> None:
        self.stage = stage
        self.side = side
        self.request = request
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Event.__slots__:  # looked up while a copy is being made
            raise AttributeError(name)
        if name not in self.stage.facts:
            known = ", ".join(("stage", "side", "request", *self.stage.facts))
            raise AttributeError(f'an event of {self.stage.value} has no "{name}"; it has {known}')
        return self.facts.get(name)  # facts that only the other side has are None

    def __repr__(self) -> str:
        return f"Event({self.stage.value}, {self.side}, {self.request}, {', '.join(self.facts)})"


# When a hook acts: ``when=every_n_seconds(5)`` at registration, or ``if is_first(event)`` inside a hook.


Condition = Callable[[Event], bool]


def every_n_requests(n: int) -> Condition:
    """True for the first request of a run and every n-th after it. False for events without a request."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise SpecError(f"every_n_requests takes a number from 1 up, not {n!r}")
    return lambda event: event.request is not None and event.request.index % n == 0


def every_n_seconds(seconds: float) -> Condition:
    """True for the first event, and then at most once in ``seconds``. Thread-safe."""
    if not 0 < seconds < float("inf"):
        raise SpecError(f"every_n_seconds takes a number of seconds above 0, not {seconds!r}")
    lock, due = threading.Lock(), 0.0

    def condition(event: Event) -> bool:
        nonlocal due
        now = time.monotonic()
        with lock:
            if now < due:
                return False
            due = now + seconds
            return True

    return condition


def is_first(event: Event) -> bool:
    """Return whether it belongs to the first request of its run."""
    return event.request is not None and event.request.index == 0


def is_last(event: Event) -> bool:
    """Return whether it belongs to the last request of its run; False if their number is unknown."""
    return event.request is not None and event.request.index + 1 == event.request.total
