"""Who calls, and whether the call may be served: looked at once, for every RPC of every service.

A token is looked at before anything of the call is read, a certificate as soon as gRPC tells it. Whoever is let in is
known here until the call ends, and sent away when the credentials no longer hold.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError

from cloud_server import wire
from cloud_server.access import (
    Caller,
    Certificates,
    Credentials,
    Register,
    State,
    Tls,
    names_in,
    passport_in,
    state_of,
    token_in,
)
from cloud_server.limits import Limits
from cloud_server.transport.active_calls import ActiveCalls, Place, WaitingCalls
from protos import FACTS_WANTED
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, Cancelled, Disagreement, IsthmusError, NotAuthenticated, SpecError, TooLarge
from shared_hooks.lifecycle import Lifecycle, Stage, on_behalf_of

log = logging.getLogger(__name__)

SERVICE = split_pb2.DESCRIPTOR.services_by_name["Split"].full_name
INFERENCE = "inference.GRPCInferenceService"
"""The Open Inference Protocol's, on the wire."""
INFER = f"/{INFERENCE}/ModelInfer"
BEGINS_WORK = frozenset({*(f"/{SERVICE}/{name}" for name in ("Session", "Probe", "Profile")), INFER})
"""Calls that a draining server does not take; health, reflection and the list of models it answers to the end."""
SESSION = f"/{SERVICE}/Session"
OPEN_TO_ALL = frozenset({"/grpc.health.v1.Health/Check", f"/{INFERENCE}/ServerLive", f"/{INFERENCE}/ServerReady"})
"""What asks it has no credentials (an orchestrator), and hears one word."""
LOOK_SECONDS = 1.0
"""Between two looks whether credentials still hold."""
MAX_WAITING = 32
"""Calls that wait for their client's message, or listen, or ask for reflection."""
MESSAGE_SECONDS = 5.0
"""For the message of a call that has only one."""
MAX_MESSAGE_BYTES = 64 << 10
"""Largest message here."""
FETCH_SECONDS = 60.0
"""For a client to fetch a message, on calls other than sessions, which have bounds of their own (`StreamSession`)."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it arrives: the full name of the method (``/isthmus.v1.Split/Session``), and its metadata."""

    method: str
    metadata: tuple[tuple[str, str | bytes], ...]


class House(Protocol):
    """What serves the calls; `core.Core` does."""

    @property
    def limits(self) -> Limits: ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    def check_open(self) -> None:
        """Raises ServerUnavailable while draining."""
        ...


class AuthInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Authenticates every call of one server. ``register``: who is let in; None = all."""

    def __init__(self, house: House, register: Register | None = None) -> None:
        self._house = house
        self._register = register or Register()
        self.active_calls = ActiveCalls(self._register)
        """Calls that were let in: here, and by whom else it is lent to; here they are watched."""
        self._sending: dict[grpc.ServicerContext, float] = {}
        """When each began to send what it sends."""
        self._waiting = WaitingCalls(MAX_WAITING, MESSAGE_SECONDS)
        self._uploading = WaitingCalls(house.limits.max_clients, house.limits.deadline_seconds)
        """Requests in one message, which may be a large one."""
        self._closed = threading.Event()

    # Every call

    def check(self, call: Call) -> None:
        """Raises an `IsthmusError`, whose status the caller gets, for a call that is not to be served."""
        if call.method not in OPEN_TO_ALL and self._looks_at(call.metadata):
            self._register.check(Credentials(token_in(call.metadata), None, passport_in(call.metadata)))
        if call.method in BEGINS_WORK:
            self._house.check_open()

    def _looks_at(self, metadata: Any) -> bool:
        """Whether callers have to prove who they are, or another server says so of this one."""
        return self._register.asks or bool(passport_in(metadata or ()))

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        """gRPC's entry: the method's own handler, or one that refuses."""
        handler = continuation(details)
        if handler is None:
            return None
        try:
            self.check(Call(details.method, tuple(details.invocation_metadata or ())))
        except IsthmusError as error:
            return self._refusing(details.method, error)
        if details.method not in OPEN_TO_ALL and self._looks_at(details.invocation_metadata):
            handler = self._guarded(details.method, handler)
        if details.method == SESSION:
            return handler
        if handler.response_streaming:
            handler = self._fetched(handler)
        if handler.request_streaming and details.method in BEGINS_WORK:
            return handler
        return self._bounded(details.method, handler)

    def _bounded(self, method: str, handler: Any) -> Any:
        """A handler whose call counts among those that wait, for as long as nothing else bounds it.

        A single message is taken as the first of a stream: gRPC would wait for it without end, in a thread, and read it
        in the one thread that serves everybody.
        """
        behaviour = getattr(handler, _kind(handler))
        listens = handler.response_streaming and method not in BEGINS_WORK

        def one(incoming: Iterator[Any], context: grpc.ServicerContext, place: Place) -> Any:
            if handler.request_streaming:
                place.since = None
                return incoming
            data = next(incoming, None)
            if data is None or len(data) > MAX_MESSAGE_BYTES:
                most = f"a message of at most {MAX_MESSAGE_BYTES} bytes is taken"
                error = BadFrame(f"no message came; {most}") if data is None else TooLarge(f"{len(data)} bytes; {most}")
                self.refuse(method, context, error)
            try:
                message = handler.request_deserializer(data)
            except DecodeError:
                self.refuse(method, context, BadFrame("a message of another kind"))
            place.since = None
            if not listens:
                self._waiting.leave(place)
            return message

        def answer(incoming: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._placed(method, context) as place:
                return behaviour(one(incoming, context, place), context)

        def answers(incoming: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._placed(method, context) as place:
                yield from behaviour(one(incoming, context, place), context)

        reads = handler.request_deserializer if handler.request_streaming else None
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answers, reads, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, reads, handler.response_serializer)

    def message(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """A request's only message, for which it waits. Raises BadFrame, and ServerUnavailable for who has to go."""
        with self._uploading.place(Caller(context.peer()).address, context.cancel) as place:
            try:
                data = next(incoming, None)
            except Exception:  # gRPC raises a bare Exception here when the call ends
                raise place.error or Cancelled("the call has ended") from None
        if data is None:
            raise BadFrame("no message came")
        return data

    def is_open(self, method: str) -> bool:
        """Whether nobody is asked who he is."""
        return method in OPEN_TO_ALL

    def _fetched(self, handler: Any) -> Any:
        """A handler that ends when what it sends is not fetched: what it holds (a place, everybody's lock on profiles)
        would be held as long as its client likes.
        """
        kind = _kind(handler)
        behaviour = getattr(handler, kind)

        def fetched(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                for answer in behaviour(request, context):
                    self._sending[context] = time.monotonic()
                    yield answer
                    self._sending.pop(context, None)
            finally:
                self._sending.pop(context, None)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(fetched, handler.request_deserializer, handler.response_serializer)

    def _cut_unfetched(self) -> None:
        until = time.monotonic() - FETCH_SECONDS
        for context, began in list(self._sending.items()):
            if began < until and self._sending.pop(context, None) is not None:
                log.info("a call is cut: nothing of it was fetched for %g s", FETCH_SECONDS, extra=_by(context))
                context.cancel()

    @contextmanager
    def _placed(self, method: str, context: grpc.ServicerContext) -> Iterator[Place]:
        """Hooks and the log hear of a call that had to give way; its client, that it was cancelled."""
        with self._waiting.place(Caller(context.peer()).address, context.cancel) as place:
            try:
                yield place
            finally:
                if place.error is not None:
                    self._heard(method, context, place.error)

    def _guarded(self, method: str, handler: Any) -> Any:
        """The handler behind a look at the connection's certificate."""
        kind = _kind(handler)
        behaviour = getattr(handler, kind)

        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                self._admit(context)
            except IsthmusError as error:
                self.refuse(method, context, error)
            return behaviour(request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _refusing(self, method: str, error: IsthmusError) -> Any:
        """A handler that only refuses. To the wire every call is one of streams, so nothing is waited for or read."""
        return grpc.stream_stream_rpc_method_handler(lambda _, context: self.refuse(method, context, error))

    def refuse(self, method: str, context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
        """Ends a call that is not served; hooks hear of it, and so does the log, within what the caller may write."""
        self._heard(method, context, error)
        abort(context, error)

    def _heard(self, method: str, context: grpc.ServicerContext, error: IsthmusError) -> None:
        caller = self.active_calls.caller(context) or Caller(context.peer())
        with on_behalf_of(caller.account):
            self._house.lifecycle.emit(Stage.ON_ERROR, where=f"{method} of {context.peer()}", error=error)

    def _admit(self, context: grpc.ServicerContext) -> None:
        names = names_in(context.auth_context()) if self._register.certificates else ()
        metadata = context.invocation_metadata() or ()
        shown = Credentials(token_in(metadata), names, passport_in(metadata))
        self.active_calls.enter(context, context.peer(), shown, context.cancel)
        if not context.add_callback(lambda: self.active_calls.left(context)):
            self.active_calls.left(context)

    # Whoever is inside

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who is at the other end of a call that was let in. Raises NotAuthenticated where callers have to prove who
        they are, and this one is not inside (any more): nobody becomes a stranger with all rights by leaving early.
        """
        caller = self.active_calls.caller(context)
        if caller is not None:
            return caller
        if self._register.asks:
            raise NotAuthenticated("the call has ended")
        return Caller(context.peer())

    def when_sent_away(self, context: grpc.ServicerContext, tell: Callable[[IsthmusError], object]) -> None:
        """``tell`` ends the call with an error, from any thread: for who may no longer stay."""
        self.active_calls.when_sent_away(context, tell)

    def may_stay(self, context: grpc.ServicerContext) -> bool:
        """Whether the other end still listens. Raises what it is sent away with."""
        refused = self.active_calls.refused(context)
        if refused is not None:
            raise refused
        return bool(context.is_active())

    def open(self) -> None:
        """Begins to watch whether credentials still hold, and whether messages come."""
        threading.Thread(target=self._watch, name="isthmus-auth", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self._waiting.sweep()
            self._uploading.sweep()
            self._cut_unfetched()
            if self._register.refresh():
                self.active_calls.look_again()


def _by(context: grpc.ServicerContext) -> dict[str, str]:
    """For the log: on whom a line counts."""
    return {"account": Caller(context.peer()).account}


def _kind(handler: Any) -> str:
    """By the name that grpc gives to its attribute."""
    return f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"


_KINDS = {False: "unary", True: "stream"}


def abort(context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
    """End a call with the error's status, its class and what it says."""
    text = f"{type(error).__name__}: {wire.message(error)}"
    if isinstance(error, Disagreement) and error.wants_facts:
        context.set_trailing_metadata(((FACTS_WANTED, "1"),))
    # Beyond ASCII one character takes up to twelve bytes of a trailer.
    context.abort(grpc.StatusCode[error.status], text if text.isascii() else text[:600])
    raise AssertionError("unreachable: abort raises")


# Certificates, as gRPC and HTTP take them, read again for a new connection when their files have changed.


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Raises SpecError when the files cannot be used now."""
    files = CertificateFiles(tls)

    def changed() -> Any:
        found = files.changed()
        return None if found is None else _as_grpc(found)

    return grpc.dynamic_ssl_server_credentials(
        _as_grpc(files.first), changed, require_client_authentication=tls.client_ca is not None
    )


class CertificateFiles:
    """The files. What cannot be used later is logged, once for each change, and what was read before stays."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._state: State = state_of(tls.paths)
        self.first = self._known = tls.read()

    def changed(self) -> Certificates | None:
        """What is new since the last call, or None; asked before each handshake."""
        with self._lock:
            state = state_of(self._tls.paths)
            if state == self._state:
                return None
            self._state = state
            try:
                found = self._tls.read()
            except SpecError as error:
                log.error("%s; what was read before stays", error)
                return None
            if found == self._known:
                return None
            self._known = found
        log.info("%s was read again", self._tls.certificate)
        return found


def _as_grpc(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], root_certificates=found.client_ca)


def server_context(tls: Tls) -> ssl.SSLContext:
    """TLS for HTTP, by the same files as for gRPC. Raises SpecError when the files cannot be used now."""
    files = CertificateFiles(tls)
    outer = current = _as_ssl(tls)

    def newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        if files.changed() is not None:
            current = _as_ssl(tls)
        connection.context = current

    outer.sni_callback = newest  # asked in every handshake, whether the client names a server or not
    return outer


def _as_ssl(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # No tickets: with one a client would come back without the handshake in which its authority is looked for.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    if tls.client_ca is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # TLS 1.2 has sessions without tickets, too
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=str(tls.client_ca))
    return context
