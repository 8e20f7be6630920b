"""The core behind gRPC: one handler thread sends a stream's frames, one more takes what comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.streams import InFrame, Probe, StreamSession
from cloud_server.transport.authentication import SERVICE, AuthInterceptor, abort
from protos import frames, padding
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, IsthmusError
from shared_hooks.lifecycle import on_behalf_of

log = logging.getLogger(__name__)


class Malformed:
    """Stands for a message that is no frame: gRPC would end the stream without saying why."""


def take(session: StreamSession, data: bytes) -> bool:
    """A message is read, and handled as a frame; False when the stream takes no more. What that costs is its account's.

    gRPC would read it in the one thread that serves every stream.
    """
    session.wait_turn()
    began = time.thread_time()
    try:
        with session.turn:
            frame: InFrame = frames.parse_client_frame(data)
    except DecodeError:
        session.broke(BadFrame("a message that is no ClientFrame"))
        return False
    try:
        return session.receive(frame)
    finally:
        session.spent(time.thread_time() - began)


def parse_probe(data: bytes) -> padding.Padding | Malformed:
    try:
        return padding.parse_frame(data)
    except DecodeError:
        return Malformed()


class SplitServicer:
    """isthmus.v1.Split. `add_to` registers it by hand, because chunks are serialized by hand (`protos.frames`)."""

    def __init__(self, core: Core, auth: AuthInterceptor) -> None:
        self._core = core
        self._auth = auth

    def session(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[wire.OutFrame]:
        """One standing stream."""
        caller = self._caller("Session", context)
        with on_behalf_of(caller.account):
            yield from self._session(caller, incoming, context)

    def _session(
        self, caller: Caller, incoming: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[wire.OutFrame]:
        try:
            session = self._core.open(caller)
        except IsthmusError as error:
            self._auth.refuse(f"/{SERVICE}/Session", context, error)
        self._auth.when_sent_away(context, session.broke)
        session.on_drop = context.cancel
        if not context.add_callback(session.gone):
            session.gone()  # the client went away before this line
        threading.Thread(target=_take, args=(session, incoming), name="isthmus-receive", daemon=True).start()
        try:
            yield from session.frames()
        except IsthmusError as error:
            abort(context, error)
        finally:
            session.disconnect()

    def probe(
        self, incoming: Iterator[padding.Padding | Malformed], context: grpc.ServicerContext
    ) -> Iterator[split_pb2.ProbeReply | padding.Padding]:
        """One stream of rounds."""
        try:
            with self._core.probing(self._auth.caller(context)) as probe:
                self._auth.when_sent_away(context, probe.end)
                threading.Thread(target=_take_rounds, args=(probe, incoming), name="isthmus-probe", daemon=True).start()
                yield from probe.frames()
        except IsthmusError as error:
            self._auth.refuse(f"/{SERVICE}/Probe", context, error)

    def profile(
        self, request: split_pb2.ProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[split_pb2.ProfileReply]:
        """Progress, then the profile."""
        try:
            wanted = partial(self._auth.may_stay, context)
            yield from self._core.profiles.stream(request, self._auth.caller(context), wanted)
        except IsthmusError as error:
            self._auth.refuse(f"/{SERVICE}/Profile", context, error)

    def list_models(self, _: split_pb2.ListModelsRequest, context: grpc.ServicerContext) -> split_pb2.ListModelsReply:
        """What is served to this caller."""
        served = self._core.engines_for(self._caller("ListModels", context))
        return wire.model_list(engine.identity for engine in served.values())

    def _caller(self, name: str, context: grpc.ServicerContext) -> Caller:
        try:
            return self._auth.caller(context)
        except IsthmusError as error:
            self._auth.refuse(f"/{SERVICE}/{name}", context, error)

    def add_to(self, server: grpc.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self.session, response_serializer=frames.serialize_server_frame
            ),
            "Probe": grpc.stream_stream_rpc_method_handler(
                self.probe, request_deserializer=parse_probe, response_serializer=padding.serialize_reply
            ),
            "Profile": grpc.unary_stream_rpc_method_handler(
                self.profile,
                request_deserializer=split_pb2.ProfileRequest.FromString,
                response_serializer=split_pb2.ProfileReply.SerializeToString,
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=split_pb2.ListModelsRequest.FromString,
                response_serializer=split_pb2.ListModelsReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)


def _take_rounds(probe: Probe, incoming: Iterator[padding.Padding | Malformed]) -> None:
    """Moves frames from the stream to the probe until either ends."""
    error: IsthmusError | None = None
    try:
        for frame in incoming:
            if isinstance(frame, Malformed):
                error = BadFrame("a message that is no ProbeFrame")
                break
            if not probe.receive(frame):
                return
    except Exception as broken:  # gRPC raises a bare Exception here when the stream breaks
        log.debug("a probe broke: %s", broken)
    probe.end(error)


def _take(session: StreamSession, incoming: Iterator[bytes]) -> None:
    """Moves frames from the stream to the session until either ends."""
    with on_behalf_of(session.caller.account):
        try:
            for data in incoming:
                if not take(session, data):
                    return
            session.finish()
        except Exception as error:  # gRPC raises a bare Exception here when the stream breaks
            log.debug("stream of %s broke: %s", session.caller.peer, error)
            session.disconnect()
