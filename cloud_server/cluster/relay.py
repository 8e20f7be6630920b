"""Passes a client's calls on to its replica, byte for byte: one stream of the client is one stream there.

A session goes to the replica that its key names (`key`): the same for every stream of a client, so that it finds its
answers again, and for all clients of an identity with counted limits, so that one replica counts.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.cluster.census import Census, ReplicaFinder, ReplicaPlace
from cloud_server.cluster.passport import channel, counted, stamp
from cloud_server.inference import HeldBytes
from cloud_server.limits import Limits
from cloud_server.streams import check_form
from cloud_server.transport import INFER, INFERENCE, SERVICE, AuthInterceptor, WaitingCalls
from cloud_server.transport.servicer import MAX_ENTRIES
from protos import FACTS_WANTED, frames
from protos.inference import inference_pb2 as pb
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, IsthmusError, ServerUnavailable
from shared_hooks.sharing import Holding, Owner, Shares, evictions

# The calls that a front forwards: their maximum number, which belong elsewhere, and which are in flight.


log = logging.getLogger(__name__)

NOTIFY_BEATS: Final = 3
"""Heartbeats within which a client learns, with its next frame, that it must leave."""


class ProxiedCall:
    """A call that is passed on, from before a replica is chosen until its client has everything."""

    def __init__(self, group: str, session: str, caller: Caller, beat: float | None, cancel: Callable[[], Any]) -> None:
        """``cancel`` ends the client's call, from any thread, without informing it."""
        self.group = group
        self.session = session
        self.owner = Owner(caller.account)
        self.beat = beat
        """How often its client hears something while it waits, in seconds; infinity: only answers. None: it cannot be
        asked to leave.
        """
        self.replica = ""
        self.call: Any = None
        self.since = time.monotonic()
        """When it began, or began to send its current frame."""
        self.is_sending = False
        self.settled = True
        """Whether its replica was looked up since replicas came or went."""
        self.silences = 0
        """How often that lookup had no answer."""
        self.leave: float | None = None
        """When its client was asked to leave and reconnect."""
        self.reported = False
        self.refused: IsthmusError | None = None
        """Why it was ended here."""
        self._cancel = cancel

    @property
    def under_way(self) -> bool:
        """Whether its client, asked to leave, still waits for answers. One without a frame for some heartbeats cannot
        know.
        """
        if self.reported or self.beat is None or self.leave is None:
            return True
        return time.monotonic() < self.leave + NOTIFY_BEATS * self.beat

    def holding(self, idle_seconds: float) -> Holding[ProxiedCall]:
        """Return a call, for eviction: those whose client does not fetch go first, the longest first."""
        is_idle = self.is_sending and time.monotonic() - self.since > idle_seconds
        return Holding(self, self.owner, 1, (not self.is_sending, self.since), is_idle)

    def end(self, error: IsthmusError) -> None:
        """End it. Thread-safe."""
        self.refused = error
        if self.call is not None:
            self.call.cancel()

    def give_up(self, error: IsthmusError) -> None:
        """End it at once, even if its client does not fetch the reason."""
        self.end(error)
        if self.is_sending:
            self._cancel()


class ProxiedCalls:
    """The calls that a front passes on. Thread-safe."""

    def __init__(self, finder: ReplicaFinder, places: int, idle_seconds: float) -> None:
        """``places``: the maximum number of calls, each of which holds a thread; beyond that calls of the account with
        the most are ended. ``idle_seconds``: of `Limits`.
        """
        self._finder = finder
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._stays: set[ProxiedCall] = set()
        self._places = Shares(places)

    def __len__(self) -> int:
        return len(self._stays)

    @contextmanager
    def place(self, stay: ProxiedCall) -> Iterator[None]:
        """Hold a place. Raises ServerUnavailable."""
        with self._lock:
            gone: list[ProxiedCall] | None = []
            if not self._places.has_room(1):
                holdings = [one.holding(self._idle_seconds) for one in self._stays]
                gone = evictions(self._places, stay.owner, 1, holdings)
            if gone is None:
                raise ServerUnavailable(
                    f"{len(self._stays)} calls are handed on here, as many as can be: try again later"
                )
            for one in gone:
                self._forget(one)
            self._stays.add(stay)
            self._places.add(stay.owner, 1)
        for one in gone:
            log.info("a call of %s gives up its place", one.owner.account, extra={"account": one.owner.account})
            one.give_up(ServerUnavailable("its place was needed: its account has the most here, or it was idle"))
        try:
            yield
        finally:
            with self._lock:
                self._forget(stay)

    def _forget(self, stay: ProxiedCall) -> None:
        """Release the place. The caller holds the lock."""
        if stay in self._stays:
            self._stays.remove(stay)
            self._places.remove(stay.owner, 1)

    def rebalance(self, *, moved: bool) -> None:
        """At every check: if replicas have come or gone (``moved``), ask clients that belong to another replica to
        reconnect.

        Where the right replica is unknown, it is looked up again at the next check, after all others.
        """
        with self._lock:
            stays = [one for one in self._stays if one.beat is not None and one.leave is None]
        for stay in stays:
            stay.settled = stay.settled and not moved
        silent: set[str] = set()
        for stay in sorted(stays, key=lambda one: one.silences):
            if stay.settled or not stay.replica or stay.group in silent:
                continue
            try:
                there = self._finder.find(stay.group, stay.session).replica
            except ServerUnavailable:
                stay.silences += 1
                silent.add(stay.group)  # a timeout may take seconds
                continue
            stay.settled = True
            if there != stay.replica:
                stay.leave = time.monotonic()

    def notify_all_calls(self) -> None:
        """Ask every client to leave, with its next frame."""
        with self._lock:
            for stay in self._stays:
                if stay.leave is None:
                    stay.leave = time.monotonic()

    def under_way(self) -> bool:
        """Return whether any client waits for answers."""
        with self._lock:
            return any(stay.under_way for stay in self._stays)

    def end_all(self, error: IsthmusError) -> None:
        with self._lock:
            stays = list(self._stays)
        for stay in stays:
            stay.end(error)


TRIES: Final = 4
"""Attempts to find a replica that answers: Ray Serve may list one that has just died."""
AGAIN_SECONDS: Final = 0.25
SESSION, PROBE, LIST_MODELS = (f"/{SERVICE}/{name}" for name in ("Session", "Probe", "ListModels"))
CONNECT_SECONDS: Final = 2.0
DRAINING: Final = wire.draining().SerializeToString()


def key(caller: Caller, client_id: str) -> str:
    """Return the key by which the replica of a session is chosen."""
    return caller.account if counted(caller.policy) else f"{caller.account}/{client_id}"


class Relay:
    """isthmus.v1.Split for any replicas. `add_to` registers it."""

    def __init__(
        self, finder: ReplicaFinder, census: Census, auth: AuthInterceptor, limits: Limits, stays: ProxiedCalls
    ) -> None:
        self._finder = finder
        self._census = census
        self._auth = auth
        self._greeting = WaitingCalls(limits.max_clients, limits.hello_seconds)
        self._limits = limits
        self._stays = stays

    # Streams

    def session(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield a stream of requests."""
        try:
            caller = self._auth.caller(context)
            first, hello = self._hello(incoming, context)
            group = self._census.group(caller, hello.model_id, hello.weights_hash)
            session, frames = key(caller, hello.client_id), chain([first], _until_broken(incoming))
            wished = hello.heartbeat_ms / 1000 or math.inf
            beat = max(wished, self._limits.heartbeat_seconds)
            yield from self.forward_to_next(SESSION, group, session, caller, frames, context, beat)
        except IsthmusError as error:
            self._auth.refuse(SESSION, context, error)

    def _hello(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> tuple[bytes, split_pb2.Hello]:
        """Return the first frame, raw and parsed. Raises BadFrame, and the error that ends a waiting call."""
        with self._greeting.place(self._auth.caller(context).address, context.cancel) as place:
            try:
                first = next(incoming, b"")
            except Exception as error:  # gRPC raises a bare Exception here when the stream breaks
                raise place.error or ServerUnavailable("the stream broke before hello") from error
        try:
            frame = split_pb2.ClientFrame.FromString(first)
        except DecodeError as error:
            raise BadFrame("a message that is no ClientFrame") from error
        if frame.WhichOneof("frame") != "hello":
            raise BadFrame("the stream's first frame must be hello")
        check_form(frame.hello)
        return first, frame.hello

    def forward_to_next(
        self,
        method: str,
        group: str,
        session: str,
        caller: Caller,
        frames: Iterator[bytes],
        context: grpc.ServicerContext,
        beat: float | None = None,
    ) -> Generator[bytes, None, None]:
        """Pass on a call of any kind, because on the wire every call is one of streams. Raises the error of a refusal
        here.

        ``beat``: of `ProxiedCall`.
        """
        stay = ProxiedCall(group, session, caller, beat, context.cancel)
        with self._stays.place(stay):
            self._auth.when_sent_away(context, stay.end)
            with self._to(stay, caller) as (place, way):
                stay.replica = place.replica
                stay.call = way.stream_stream(method)(frames, metadata=stamp(caller, place.secret))
                yield from self._answers(stay, context)

    def _answers(self, stay: ProxiedCall, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the replica's frames, until either side ends the call."""
        if not context.add_callback(stay.call.cancel):
            stay.call.cancel()
        try:
            if stay.refused is not None:  # cancelled before there was a call to cancel
                raise stay.refused
            for data in stay.call:
                yield from self._sent(stay, data)
                if stay.leave is not None and stay.beat is not None and not stay.reported:
                    stay.reported = True
                    yield from self._sent(stay, DRAINING)
        except grpc.RpcError as error:
            if stay.refused is not None:
                raise stay.refused from error
            ended: Any = error
            reported = [(key, value) for key, value in ended.trailing_metadata() or () if key == FACTS_WANTED]
            context.set_trailing_metadata(tuple(reported))
            context.abort(ended.code(), ended.details())
        finally:
            stay.call.cancel()

    def _sent(self, stay: ProxiedCall, data: bytes) -> Iterator[bytes]:
        """Yield a frame, marked as being sent, and raise if the call was ended meanwhile."""
        stay.since, stay.is_sending = time.monotonic(), True
        if stay.refused is not None:
            raise stay.refused
        yield data
        stay.is_sending = False

    def probe(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield a stream that measures the link to a replica."""
        try:
            caller = self._auth.caller(context)
            frames = _until_broken(incoming)
            yield from self.forward_to_next(PROBE, self._census.any(caller), caller.account, caller, frames, context)
        except IsthmusError as error:
            self._auth.refuse(PROBE, context, error)

    # Single messages

    def list_models(
        self, request: split_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> split_pb2.ListModelsReply:
        """Return the models that this caller may use."""
        reply = split_pb2.ListModelsReply(unix_seconds=int(time.time()))
        try:
            for reported in self.query_groups(LIST_MODELS, request, context):
                reply.models.extend(split_pb2.ListModelsReply.FromString(reported).models)
        except IsthmusError as error:
            self._auth.refuse(LIST_MODELS, context, error)
        return reply

    def query_groups(self, method: str, request: Message, context: grpc.ServicerContext) -> list[bytes]:
        """Return a replica's answer for each group that serves what the caller may use. Raises ServerUnavailable if
        none answers.
        """
        caller, found, error = self._auth.caller(context), [], None
        for group in self._census.groups(caller):
            stay = ProxiedCall(group, caller.account, caller, None, context.cancel)
            try:
                with self._stays.place(stay), self._to(stay, caller) as (place, way):
                    requested, who = request.SerializeToString(), stamp(caller, place.secret)
                    found.append(way.unary_unary(method)(requested, metadata=who, timeout=CONNECT_SECONDS))
            except grpc.RpcError as failed:
                error = ServerUnavailable(f"a replica: {_words(failed)}")
            except ServerUnavailable as silent:
                error = silent
        if error is not None and not found:
            raise error
        return found

    def one_message(self, method: str, request: Message, context: grpc.ServicerContext) -> Generator[bytes, None, None]:
        """Yield a call of one message that names a model; yields the answers."""
        try:
            caller = self._auth.caller(context)
            wanted: Any = request
            group = self._census.group(caller, getattr(wanted, "model_id", ""), getattr(wanted, "weights_hash", ""))
            frames = iter([request.SerializeToString()])
            yield from self.forward_to_next(method, group, caller.account, caller, frames, context)
        except IsthmusError as error:
            self._auth.refuse(method, context, error)

    @contextmanager
    def _to(self, stay: ProxiedCall, caller: Caller) -> Iterator[tuple[ReplicaPlace, Any]]:
        """The replica of the call's session, and a channel to it that is up; another one if it cannot be reached and
        nothing is counted there. Raises ServerUnavailable.
        """
        error = ServerUnavailable(f"no replica of {stay.group} can be reached; it is being replaced: try again later")
        for tried in range(TRIES):
            if tried:
                time.sleep(AGAIN_SECONDS)
            if stay.refused is not None:
                raise stay.refused
            elsewhere = tried % 2 and not counted(caller.policy)
            try:
                place = self._finder.find(stay.group, f"{stay.session}#{tried}" if elsewhere else stay.session)
            except ServerUnavailable as silent:
                error = silent
                continue
            with channel(place) as way:
                if _is_up(way):
                    yield place, way
                    return
        raise error

    def sweep(self) -> None:
        """End calls whose hello does not come."""
        self._greeting.sweep()

    # Registration

    def add_to(self, server: grpc.Server) -> None:
        """Register every method of the service, including later ones whose message has ``model_id``."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(self.session),
            "Probe": grpc.stream_stream_rpc_method_handler(self.probe),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=split_pb2.ListModelsRequest.FromString,
                response_serializer=split_pb2.ListModelsReply.SerializeToString,
            ),
        }
        for name, method in _METHODS.items():
            if name not in handlers and not method.client_streaming:
                handlers[name] = self._handler(name, method)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)

    def _handler(self, name: str, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
        read, path = getattr(split_pb2, method.input_type.name).FromString, f"/{SERVICE}/{name}"
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: self.one_message(path, request, context), request_deserializer=read
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: only(self.one_message(path, request, context)), request_deserializer=read
        )


_METHODS: Final = split_pb2.DESCRIPTOR.services_by_name["Split"].methods_by_name


def _until_broken(incoming: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from incoming
    except Exception as error:  # gRPC raises a bare Exception here when the stream breaks
        log.debug("a stream broke: %s", error)


def only(answers: Generator[bytes, None, None]) -> bytes:
    """Return the only message of an answer, which ends the call."""
    with closing(answers):
        return next(answers)


def _is_up(way: grpc.Channel) -> bool:
    """Wait until the channel is connected, or cannot be."""
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    way.subscribe(states.put, try_to_connect=True)
    limit = time.monotonic() + CONNECT_SECONDS
    try:
        while (left := limit - time.monotonic()) > 0:
            state = states.get(timeout=left)
            if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                return state is grpc.ChannelConnectivity.READY
    except queue.Empty:
        pass
    finally:
        way.unsubscribe(states.put)
    return False


def _words(error: grpc.RpcError) -> str:
    call: Any = error
    return f"{call.code().name}: {call.details()}"


# The Open Inference Protocol's gRPC calls, forwarded one by one to any replica of the model that they name.


MAX_FIELDS: Final = 4 * MAX_ENTRIES + 3
"""Most fields of a request: inputs, outputs, parameters, raw inputs; model, version and id."""
_NAMED = {
    "ModelReady": pb.ModelReadyRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
    "ModelConfig": pb.ModelConfigRequest,
}


class InferenceRelay:
    """inference.GRPCInferenceService for any replicas. ``held``: limits answers that are not fetched yet. ``ready``:
    whether there are any replicas.
    """

    def __init__(
        self, relay: Relay, census: Census, auth: AuthInterceptor, held: HeldBytes, ready: Callable[[], bool]
    ) -> None:
        self._relay = relay
        self._census = census
        self._auth = auth
        self._held = held
        self._ready = ready

    def infer(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """ModelInfer: one message, one answer."""
        try:
            caller = self._auth.caller(context)
            data = self._auth.message(incoming, context)
            model = _model_of(data)
            answers = self._forward_call(INFER, model, caller, iter([data]), context)
            del data
            owner = Owner(caller.account, caller.peer)
            with closing(answers), self._held.hold(owner, context.cancel) as hold:
                for answer in answers:
                    hold.more(len(answer))
                    yield answer
        except IsthmusError as error:
            self._auth.refuse(INFER, context, error)

    def _forward_call(
        self, method: str, model: str, caller: Caller, frames: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, None]:
        group = self._census.group(caller, model) if model else self._census.any(caller)
        session = caller.account if counted(caller.policy) else secrets.token_hex(4)
        return self._relay.forward_to_next(method, group, session, caller, frames, context)

    def _about(self, name: str, read: Callable[[bytes], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        method = f"/{INFERENCE}/{name}"

        def about(requested: Any, context: grpc.ServicerContext) -> bytes:
            try:
                caller = self._auth.caller(context)
                model = getattr(requested, "name", "")
                return only(self._forward_call(method, model, caller, iter([requested.SerializeToString()]), context))
            except IsthmusError as error:
                self._auth.refuse(method, context, error)

        return grpc.unary_unary_rpc_method_handler(about, request_deserializer=read)

    def index(self, requested: pb.RepositoryIndexRequest, context: grpc.ServicerContext) -> bytes:
        """Return the models that this caller may use, each once."""
        method, found = f"/{INFERENCE}/RepositoryIndex", pb.RepositoryIndexResponse()
        try:
            for reported in self._relay.query_groups(method, requested, context):
                for one in pb.RepositoryIndexResponse.FromString(reported).models:
                    if one not in found.models:
                        found.models.append(one)
        except IsthmusError as error:
            self._auth.refuse(method, context, error)
        return found.SerializeToString()

    def add_to(self, server: grpc.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            INFER.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self.infer),
            "ServerLive": _alone(pb.ServerLiveRequest, lambda: pb.ServerLiveResponse(live=True)),
            "ServerReady": _alone(pb.ServerReadyRequest, lambda: pb.ServerReadyResponse(ready=self._ready())),
            "ServerMetadata": self._about("ServerMetadata", pb.ServerMetadataRequest.FromString),
            "RepositoryIndex": grpc.unary_unary_rpc_method_handler(
                self.index, request_deserializer=pb.RepositoryIndexRequest.FromString
            ),
            **{name: self._about(name, kind.FromString) for name, kind in _NAMED.items()},
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
        server.add_registered_method_handlers(INFERENCE, handlers)


def _model_of(data: bytes) -> str:
    """Return the model that a ModelInferRequest names; a replica parses the rest. Raises BadFrame."""
    try:
        return frames.text(data, pb.ModelInferRequest.MODEL_NAME_FIELD_NUMBER, MAX_FIELDS)
    except DecodeError as error:
        raise BadFrame(f"a message that is no ModelInferRequest: {error}") from None


def _alone(requested: Any, answer: Callable[[], Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a method that a front answers itself."""
    return grpc.unary_unary_rpc_method_handler(
        lambda _, context: answer().SerializeToString(), request_deserializer=requested.FromString
    )
