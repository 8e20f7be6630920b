"""Authenticates and authorises callers: once, for every RPC of every service.

A token is checked before anything of the call is read, a certificate as soon as gRPC reports it. An authenticated call
is registered here until it ends, and ended when its credentials expire.
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
    CallCredentials,
    Caller,
    Certificates,
    Register,
    State,
    Tls,
    names_in,
    passport_in,
    state_of,
    token_in,
)
from cloud_server.limits import Limits
from cloud_server.transport.active_calls import ActiveCalls, WaitingCall, WaitingCalls
from protos import FACTS_WANTED
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    BadFrame,
    Cancelled,
    Disagreement,
    IsthmusError,
    NotAuthenticated,
    SpecError,
    TooLarge,
    logged,
)
from shared_hooks.lifecycle import Lifecycle, Stage, on_behalf_of

log = logging.getLogger(__name__)

SERVICE = split_pb2.DESCRIPTOR.services_by_name["Split"].full_name
INFERENCE = "inference.GRPCInferenceService"
"""The Open Inference Protocol over gRPC."""
INFER = f"/{INFERENCE}/ModelInfer"
BEGINS_WORK = frozenset({*(f"/{SERVICE}/{name}" for name in ("Session", "Probe", "Profile")), INFER})
"""Calls that a draining server refuses; health, reflection and the list of models are answered to the end."""
SESSION = f"/{SERVICE}/Session"
OPEN_TO_ALL = frozenset({"/grpc.health.v1.Health/Check", f"/{INFERENCE}/ServerLive", f"/{INFERENCE}/ServerReady"})
"""Methods for callers without credentials (orchestrators), which answer with one word."""
LOOK_SECONDS = 1.0
"""The interval of checks of credentials."""
MAX_WAITING = 32
"""Most calls that wait for their client's message, listen, or use reflection."""
MESSAGE_SECONDS = 5.0
"""How long to wait for the message of a call that has only one."""
MAX_MESSAGE_BYTES = 64 << 10
"""The largest message of such a call."""
FETCH_SECONDS = 60.0
"""How long a client may take to fetch a message, except in sessions, which have limits of their own
(`StreamSession`).
"""


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A call as it arrives: the full name of the method (``/isthmus.v1.Split/Session``), and its metadata."""

    method: str
    metadata: tuple[tuple[str, str | bytes], ...]


class ServerContext(Protocol):
    """Serves the calls; implemented by `core.Core`."""

    @property
    def limits(self) -> Limits: ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    def check_open(self) -> None:
        """Raise ServerUnavailable while draining."""
        ...


class AuthInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Authenticates every call of one server. ``register``: the known identities; None: all callers are allowed."""

    def __init__(self, server: ServerContext, register: Register | None = None) -> None:
        self._server = server
        self._register = register or Register()
        self.active_calls = ActiveCalls(self._register)
        """The authenticated calls, shared with REST; they are watched here."""
        self._sending: dict[grpc.ServicerContext, float] = {}
        """When each call began to send its current message."""
        self._waiting = WaitingCalls(MAX_WAITING, MESSAGE_SECONDS)
        self._uploading = WaitingCalls(server.limits.max_clients, server.limits.deadline_seconds)
        """Requests in a single message, which may be large."""
        self._closed = threading.Event()

    # Every call

    def check(self, call: IncomingCall) -> None:
        """Raise an `IsthmusError`, whose status the caller gets, if a call must not be served."""
        if call.method not in OPEN_TO_ALL and self._looks_at(call.metadata):
            self._register.check(CallCredentials(token_in(call.metadata), None, passport_in(call.metadata)))
        if call.method in BEGINS_WORK:
            self._server.check_open()

    def _looks_at(self, metadata: Any) -> bool:
        """Return whether callers must authenticate, or another server vouches for this one."""
        return self._register.requires_credentials or bool(passport_in(metadata or ()))

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        """gRPC's entry point: the method's own handler, or one that refuses."""
        handler = continuation(details)
        if handler is None:
            return None
        try:
            self.check(IncomingCall(details.method, tuple(details.invocation_metadata or ())))
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
        """Yield a handler whose call counts as waiting, as long as nothing else limits it.

        A single message is received as the first of a stream: otherwise gRPC would wait for it indefinitely in a
        thread, and parse it in the one thread that serves all clients.
        """
        behaviour = getattr(handler, _kind(handler))
        listens = handler.response_streaming and method not in BEGINS_WORK

        def one(incoming: Iterator[Any], context: grpc.ServicerContext, place: WaitingCall) -> Any:
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
        """Wait for a request's only message. Raises BadFrame, and ServerUnavailable if the call must end."""
        with self._uploading.place(Caller(context.peer()).address, context.cancel) as place:
            try:
                data = next(incoming, None)
            except Exception:  # gRPC raises a bare Exception here when the call ends
                raise place.error or Cancelled("the call has ended") from None
        if data is None:
            raise BadFrame("no message came")
        return data

    def is_open(self, method: str) -> bool:
        """Return whether the method needs no authentication."""
        return method in OPEN_TO_ALL

    def _fetched(self, handler: Any) -> Any:
        """Yield a handler that ends if its messages are not fetched, because it holds resources (a place, the lock on
        profiles).
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
    def _placed(self, method: str, context: grpc.ServicerContext) -> Iterator[WaitingCall]:
        """Hold a place. If the call must end, this is logged and reported to hooks; its client sees a cancellation."""
        with self._waiting.place(Caller(context.peer()).address, context.cancel) as place:
            try:
                yield place
            finally:
                if place.error is not None:
                    self._report_refused(method, context, place.error)

    def _guarded(self, method: str, handler: Any) -> Any:
        """Return the handler behind a check of the connection's certificate."""
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
        """Return a handler that only refuses. On the wire every call is one of streams, so it waits for nothing and
        reads nothing.
        """
        return grpc.stream_stream_rpc_method_handler(lambda _, context: self.refuse(method, context, error))

    def refuse(self, method: str, context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
        """Refuse a call; reported to hooks and logged, within what the caller may write there."""
        self._report_refused(method, context, error)
        abort(context, error)

    def _report_refused(self, method: str, context: grpc.ServicerContext, error: IsthmusError) -> None:
        caller = self.active_calls.caller(context) or Caller(context.peer())
        with on_behalf_of(caller.account):
            self._server.lifecycle.emit(Stage.ON_ERROR, where=f"{method} of {context.peer()}", error=error)

    def _admit(self, context: grpc.ServicerContext) -> None:
        names = names_in(context.auth_context()) if self._register.certificates else ()
        metadata = context.invocation_metadata() or ()
        shown = CallCredentials(token_in(metadata), names, passport_in(metadata))
        self.active_calls.enter(context, context.peer(), shown, context.cancel)
        if not context.add_callback(lambda: self.active_calls.left(context)):
            self.active_calls.left(context)

    # Identities

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Return the authenticated caller of a call. Raises NotAuthenticated if authentication is required and the call
        is not (or no longer) registered, so that a call that has just ended is not treated as anonymous.
        """
        caller = self.active_calls.caller(context)
        if caller is not None:
            return caller
        if self._register.requires_credentials:
            raise NotAuthenticated("the call has ended")
        return Caller(context.peer())

    def when_sent_away(self, context: grpc.ServicerContext, tell: Callable[[IsthmusError], object]) -> None:
        """Let ``tell`` end the call with an error, from any thread, when its credentials expire."""
        self.active_calls.when_sent_away(context, tell)

    def may_stay(self, context: grpc.ServicerContext) -> bool:
        """Return whether the client still listens. Raises the error that ends the call."""
        refused = self.active_calls.refused(context)
        if refused is not None:
            raise refused
        return bool(context.is_active())

    def open(self) -> None:
        """Start watching credentials and waiting calls."""
        threading.Thread(target=self._watch, name="isthmus-auth", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with logged(log, "looking after calls"):
                self._waiting.sweep()
                self._uploading.sweep()
                self._cut_unfetched()
            with logged(log, "looking for changed rights"):
                if self._register.refresh():
                    self.active_calls.look_again()


def _by(context: grpc.ServicerContext) -> dict[str, str]:
    """Return for the log the account that a line counts for."""
    return {"account": Caller(context.peer()).account}


def _kind(handler: Any) -> str:
    """Return the name of gRPC's attribute for this kind of handler."""
    return f"{_KINDS[handler.request_streaming]}_{_KINDS[handler.response_streaming]}"


_KINDS = {False: "unary", True: "stream"}


def abort(context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
    """End a call with the error's status, class and message."""
    text = f"{type(error).__name__}: {wire.message(error)}"
    if isinstance(error, Disagreement) and error.wants_facts:
        context.set_trailing_metadata(((FACTS_WANTED, "1"),))
    # Beyond ASCII a character takes up to twelve bytes of a trailer.
    context.abort(grpc.StatusCode[error.status], text if text.isascii() else text[:600])
    raise AssertionError("unreachable: abort raises")


# Certificates for gRPC and HTTP, read again for a new connection when their files have changed.


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """TLS credentials that follow changes of the files. Raises SpecError if the files cannot be used now."""
    files = CertificateFiles(tls)

    def changed() -> Any:
        found = files.changed()
        return None if found is None else _as_grpc(found)

    return grpc.dynamic_ssl_server_credentials(
        _as_grpc(files.first), changed, require_client_authentication=tls.client_ca is not None
    )


class CertificateFiles:
    """The files of TLS. Unusable changes are logged once each, and the previous content stays in use."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._state: State = state_of(tls.paths)
        self.first = self._known = tls.read()

    def changed(self) -> Certificates | None:
        """Return the changed content, or None; called before each handshake."""
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
    """TLS for HTTP, with the same files as for gRPC. Raises SpecError if the files cannot be used now."""
    files = CertificateFiles(tls)
    outer = current = _as_ssl(tls)

    def newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        if files.changed() is not None:
            current = _as_ssl(tls)
        connection.context = current

    outer.sni_callback = newest  # called in every handshake, with or without a server name
    return outer


def _as_ssl(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # No tickets: with one a client would resume without the handshake that checks its authority.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    if tls.client_ca is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # TLS 1.2 has sessions without tickets, too
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=str(tls.client_ca))
    return context
