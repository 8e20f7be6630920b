"""A client's calls handed on to its replica, byte for byte: one stream of the client is one stream there.

A session goes to the replica that its key names (`key`): the same for every stream of a client, so that it finds its
answers again, and for all clients of an identity whose use is counted, so that one replica counts.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.cluster.allowed import counted
from cloud_server.cluster.census import Census, Finder, Place
from cloud_server.cluster.passport import stamp
from cloud_server.cluster.private_tls import channel
from cloud_server.cluster.proxied_calls import ProxiedCall, ProxiedCalls
from cloud_server.limits import Limits
from cloud_server.streams import check_form
from cloud_server.transport import SERVICE, AuthInterceptor, WaitingCalls
from protos import FACTS_WANTED
from protos.isthmus.v1 import split_pb2, split_pb2_grpc  # noqa: F401  (the second registers the descriptors)
from shared_hooks.errors import BadFrame, IsthmusError, ServerUnavailable

log = logging.getLogger(__name__)

TRIES: Final = 4
"""To find a replica that answers: Ray Serve may name one that has just died."""
AGAIN_SECONDS: Final = 0.25
SESSION, PROBE, LIST_MODELS = (f"/{SERVICE}/{name}" for name in ("Session", "Probe", "ListModels"))
CONNECT_SECONDS: Final = 2.0
DRAINING: Final = wire.draining().SerializeToString()


def key(caller: Caller, client_id: str) -> str:
    """What a session is found by."""
    return caller.account if counted(caller.policy) else f"{caller.account}/{client_id}"


class Relay:
    """isthmus.v1.Split, for any replicas. `add_to` registers it."""

    def __init__(
        self, finder: Finder, census: Census, auth: AuthInterceptor, limits: Limits, stays: ProxiedCalls
    ) -> None:
        self._finder = finder
        self._census = census
        self._auth = auth
        self._greeting = WaitingCalls(limits.max_clients, limits.hello_seconds)
        self._limits = limits
        self._stays = stays

    # Streams

    def session(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One standing stream."""
        try:
            caller = self._auth.caller(context)
            first, hello = self._hello(incoming, context)
            group = self._census.group(caller, hello.model_id, hello.weights_hash)
            session, frames = key(caller, hello.client_id), chain([first], _until_broken(incoming))
            wished = hello.heartbeat_ms / 1000 or math.inf
            beat = max(wished, self._limits.heartbeat_seconds)
            yield from self.hand_on(SESSION, group, session, caller, frames, context, beat)
        except IsthmusError as error:
            self._auth.refuse(SESSION, context, error)

    def _hello(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> tuple[bytes, split_pb2.Hello]:
        """The first frame, as it came and read. Raises BadFrame, and what a waiting call is sent away with."""
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

    def hand_on(
        self,
        method: str,
        group: str,
        session: str,
        caller: Caller,
        frames: Iterator[bytes],
        context: grpc.ServicerContext,
        beat: float | None = None,
    ) -> Generator[bytes, None, None]:
        """A call of any kind, for to the wire every call is one of streams. Raises what it is refused with here.

        ``beat``: of `Stay`.
        """
        stay = ProxiedCall(group, session, caller, beat, context.cancel)
        with self._stays.place(stay):
            self._auth.when_sent_away(context, stay.end)
            with self._to(stay, caller) as (place, way):
                stay.replica = place.replica
                stay.call = way.stream_stream(method)(frames, metadata=stamp(caller, place.secret))
                yield from self._answers(stay, context)

    def _answers(self, stay: ProxiedCall, context: grpc.ServicerContext) -> Iterator[bytes]:
        """What the replica says, until either side ends it."""
        if not context.add_callback(stay.call.cancel):
            stay.call.cancel()
        try:
            if stay.refused is not None:  # before there was a call to be cancelled
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
        """Who ends it meanwhile sees that it is being sent, or is seen here."""
        stay.since, stay.is_sending = time.monotonic(), True
        if stay.refused is not None:
            raise stay.refused
        yield data
        stay.is_sending = False

    def probe(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream of rounds: the way to a replica, which requests go, too."""
        try:
            caller = self._auth.caller(context)
            frames = _until_broken(incoming)
            yield from self.hand_on(PROBE, self._census.any(caller), caller.account, caller, frames, context)
        except IsthmusError as error:
            self._auth.refuse(PROBE, context, error)

    # Single messages

    def list_models(
        self, request: split_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> split_pb2.ListModelsReply:
        """What is served to this caller."""
        reply = split_pb2.ListModelsReply(unix_seconds=int(time.time()))
        try:
            for said in self.ask_groups(LIST_MODELS, request, context):
                reply.models.extend(split_pb2.ListModelsReply.FromString(said).models)
        except IsthmusError as error:
            self._auth.refuse(LIST_MODELS, context, error)
        return reply

    def ask_groups(self, method: str, request: Message, context: grpc.ServicerContext) -> list[bytes]:
        """What a replica says of each group that answers and serves what the caller may use. Raises ServerUnavailable
        where none does.
        """
        caller, found, error = self._auth.caller(context), [], None
        for group in self._census.groups(caller):
            stay = ProxiedCall(group, caller.account, caller, None, context.cancel)
            try:
                with self._stays.place(stay), self._to(stay, caller) as (place, way):
                    asked, who = request.SerializeToString(), stamp(caller, place.secret)
                    found.append(way.unary_unary(method)(asked, metadata=who, timeout=CONNECT_SECONDS))
            except grpc.RpcError as failed:
                error = ServerUnavailable(f"a replica: {_words(failed)}")
            except ServerUnavailable as silent:
                error = silent
        if error is not None and not found:
            raise error
        return found

    def one_message(self, method: str, request: Message, context: grpc.ServicerContext) -> Generator[bytes, None, None]:
        """A call of one message that names a model: what comes back, one or many."""
        try:
            caller = self._auth.caller(context)
            wanted: Any = request
            group = self._census.group(caller, getattr(wanted, "model_id", ""), getattr(wanted, "weights_hash", ""))
            frames = iter([request.SerializeToString()])
            yield from self.hand_on(method, group, caller.account, caller, frames, context)
        except IsthmusError as error:
            self._auth.refuse(method, context, error)

    @contextmanager
    def _to(self, stay: ProxiedCall, caller: Caller) -> Iterator[tuple[Place, Any]]:
        """The replica where the stay's session belongs, and a channel to it that is up; another if it cannot be reached
        and nothing is counted there.

        Raises ServerUnavailable.
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
        """Sends those away who do not greet."""
        self._greeting.sweep()

    # Registration

    def add_to(self, server: grpc.Server) -> None:
        """Every method of the service, those of later versions, too, as far as their message says ``model_id``."""
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
    """The one message that comes back; the call is over with it."""
    with closing(answers):
        return next(answers)


def _is_up(way: grpc.Channel) -> bool:
    """Waits until it is connected, or cannot be."""
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
