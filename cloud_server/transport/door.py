"""The one door: who calls, and whether the call may be served, asked for every RPC of every service.

A token is looked at before anything of the call is read, a certificate as soon as gRPC tells it. Whoever is let in is
known here until the call ends, and sent away when the credentials no longer hold.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from cloud_server import wire
from cloud_server.access import Caller, Credentials, Register, names_in, token_in
from cloud_server.core import Core
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, ServerUnavailable
from shared_hooks.lifecycle import Stage, on_behalf_of

log = logging.getLogger(__name__)

SERVICE = split_pb2.DESCRIPTOR.services_by_name["Split"].full_name
BEGINS_WORK = frozenset(f"/{SERVICE}/{name}" for name in ("Session", "Probe", "Profile"))
"""Calls that a draining server does not take; health, reflection and the list of models it answers to the end."""
OPEN_TO_ALL = frozenset({"/grpc.health.v1.Health/Check"})
"""What asks it has no credentials (an orchestrator), and hears one word."""
LOOK_SECONDS = 1.0
"""Between two looks whether credentials still hold."""
LEAVE_SECONDS = 2.0
"""For who is sent away to hear why; then the call is cut."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it arrives: the full name of the method (``/isthmus.v1.Split/Session``), and its metadata."""

    method: str
    metadata: tuple[tuple[str, str | bytes], ...]


class _Admitted:
    """A call that was let in."""

    def __init__(self, caller: Caller, shown: Credentials) -> None:
        self.caller = caller
        self.shown = shown
        self.refused: IsthmusError | None = None
        """Why it is sent away."""
        self.tell: Callable[[IsthmusError], object] | None = None


class Door(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Of one server. ``register``: who is let in; None = everybody."""

    def __init__(self, core: Core, register: Register | None = None) -> None:
        self._core = core
        self._register = register or Register()
        self._lock = threading.Lock()
        self._admitted: dict[grpc.ServicerContext, _Admitted] = {}
        self._closed = threading.Event()

    # Every call

    def check(self, call: Call) -> None:
        """Raises an `IsthmusError`, whose status the caller gets, for a call that is not to be served."""
        if call.method not in OPEN_TO_ALL and self._register.asks:
            self._register.check_token(token_in(call.metadata))
        if call.method in BEGINS_WORK:
            self._core.check_open()

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        """gRPC's entry: the method's own handler, or one that refuses."""
        handler = continuation(details)
        if handler is None:
            return None
        try:
            self.check(Call(details.method, tuple(details.invocation_metadata or ())))
        except IsthmusError as error:
            return self._refusing(details.method, error)
        return (
            handler
            if details.method in OPEN_TO_ALL or not self._register.asks
            else self._guarded(details.method, handler)
        )

    def _guarded(self, method: str, handler: Any) -> Any:
        """The handler behind a look at the connection's certificate."""
        kind = f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"
        behaviour = getattr(handler, kind)

        @functools.wraps(behaviour)  # with the attributes by which gRPC knows health's own thread
        def guarded(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            try:
                self._admit(context)
            except IsthmusError as error:
                self.refuse(method, context, error)
            return behaviour(request, context, *more)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _refusing(self, method: str, error: IsthmusError) -> Any:
        """A handler that only refuses. To the wire every call is one of streams, so nothing is waited for or read."""
        return grpc.stream_stream_rpc_method_handler(lambda _, context: self.refuse(method, context, error))

    def refuse(self, method: str, context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
        """Ends a call that is not served; hooks hear of it, and so does the log, within what the caller may write."""
        with on_behalf_of(self.caller(context).account):
            self._core.lifecycle.emit(Stage.ON_ERROR, where=f"{method} of {context.peer()}", error=error)
        abort(context, error)

    def _admit(self, context: grpc.ServicerContext) -> None:
        names = names_in(context.auth_context()) if self._register.certificates else ()
        shown = Credentials(token_in(context.invocation_metadata() or ()), names)
        admitted = _Admitted(self._register.caller(context.peer(), shown), shown)
        with self._lock:
            self._admitted[context] = admitted
        if not context.add_callback(lambda: self._left(context)):
            self._left(context)

    def _left(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._admitted.pop(context, None)

    # Whoever is inside

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who is at the other end of a call that was let in."""
        with self._lock:
            admitted = self._admitted.get(context)
        return Caller(context.peer()) if admitted is None else admitted.caller

    def when_sent_away(self, context: grpc.ServicerContext, tell: Callable[[IsthmusError], object]) -> None:
        """``tell`` ends the call with an error, from any thread: for who may no longer stay."""
        with self._lock:
            admitted = self._admitted.get(context)
            if admitted is None:
                return
            admitted.tell = tell
            refused = admitted.refused
        if refused is not None:
            tell(refused)

    def may_stay(self, context: grpc.ServicerContext) -> bool:
        """Whether the other end still listens. Raises what it is sent away with."""
        with self._lock:
            admitted = self._admitted.get(context)
        if admitted is not None and admitted.refused is not None:
            raise admitted.refused
        return bool(context.is_active())

    def open(self) -> None:
        """Begins to watch whether credentials still hold."""
        if self._register.asks:
            threading.Thread(target=self._watch, name="isthmus-door", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if self._register.refresh():
                self._look_again()

    def _look_again(self) -> None:
        """Sends those away who would not be let in now, or not as who they are."""
        with self._lock:
            inside = [(context, one) for context, one in self._admitted.items() if one.refused is None]
        leaving = []
        for context, admitted in inside:
            try:
                now = self._register.caller(admitted.caller.peer, admitted.shown)
                if now == admitted.caller:
                    continue
                error: IsthmusError = ServerUnavailable(f'what "{now.identity}" may do was changed; begin anew')
            except IsthmusError as refused:
                error = refused
            log.info("%s is sent away: %s", admitted.caller.account, error)
            with self._lock:
                admitted.refused, tell = error, admitted.tell
            if tell is not None:
                tell(error)
            leaving.append(context)
        if leaving:
            timer = threading.Timer(LEAVE_SECONDS, lambda: [context.cancel() for context in leaving])
            timer.daemon = True
            timer.start()


_KINDS = {False: "unary", True: "stream"}


def abort(context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
    """End a call with the error's status, its class and what it says."""
    text = f"{type(error).__name__}: {wire.message(error)}"
    # Beyond ASCII one character takes up to twelve bytes of a trailer.
    context.abort(grpc.StatusCode[error.status], text if text.isascii() else text[:600])
    raise AssertionError("unreachable: abort raises")
