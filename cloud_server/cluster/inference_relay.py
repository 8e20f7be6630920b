"""The Open Inference Protocol's calls by gRPC, handed on: each by itself, to any replica of the model that it names."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cloud_server.access import Caller
from cloud_server.cluster.allowed import counted
from cloud_server.cluster.census import Census, Finder
from cloud_server.cluster.passport import stamp
from cloud_server.cluster.relay import CONNECT_SECONDS, Relay, only
from cloud_server.transport import INFER, INFERENCE, Door
from protos.inference import inference_pb2 as pb
from shared_hooks.errors import BadFrame, IsthmusError, ServerUnavailable

_NAMED = {
    "ModelReady": pb.ModelReadyRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
    "ModelConfig": pb.ModelConfigRequest,
}


class InferenceRelay:
    """inference.GRPCInferenceService, for any replicas. ``ready``: whether there are any."""

    def __init__(self, relay: Relay, finder: Finder, census: Census, door: Door, ready: Callable[[], bool]) -> None:
        self._relay = relay
        self._finder = finder
        self._census = census
        self._door = door
        self._ready = ready

    def infer(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """ModelInfer: one message, one answer."""
        try:
            caller = self._door.caller(context)
            data = self._door.message(incoming, context)
            try:
                model = pb.ModelInferRequest.FromString(data).model_name
            except DecodeError:
                raise BadFrame("a message that is no ModelInferRequest") from None
            yield from self._hand_on(INFER, model, caller, data, context)
        except IsthmusError as error:
            self._door.refuse(INFER, context, error)

    def _hand_on(
        self, method: str, model: str, caller: Caller, data: bytes, context: grpc.ServicerContext
    ) -> Generator[bytes, None, None]:
        group = self._census.group(caller, model) if model else self._finder.groups[-1]
        session = caller.account if counted(caller.policy) else secrets.token_hex(4)
        return self._relay.hand_on(method, group, session, caller, iter([data]), context)

    def _about(self, name: str, read: Callable[[bytes], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        method = f"/{INFERENCE}/{name}"

        def about(asked: Any, context: grpc.ServicerContext) -> bytes:
            try:
                caller = self._door.caller(context)
                model = getattr(asked, "name", "")
                return only(self._hand_on(method, model, caller, asked.SerializeToString(), context))
            except IsthmusError as error:
                self._door.refuse(method, context, error)

        return grpc.unary_unary_rpc_method_handler(about, request_deserializer=read)

    def index(self, asked: pb.RepositoryIndexRequest, context: grpc.ServicerContext) -> bytes:
        """What all of them serve, each model once."""
        method, found = f"/{INFERENCE}/RepositoryIndex", pb.RepositoryIndexResponse()
        try:
            caller = self._door.caller(context)
            for group in self._finder.groups:
                with self._relay.to(group, caller.account) as (place, way):
                    said = way.unary_unary(method)(
                        asked.SerializeToString(), metadata=stamp(caller, place.secret), timeout=CONNECT_SECONDS
                    )
                for one in pb.RepositoryIndexResponse.FromString(said).models:
                    if one not in found.models:
                        found.models.append(one)
        except grpc.RpcError as error:
            self._door.refuse(method, context, ServerUnavailable(f"a replica: {error}"))
        except IsthmusError as error:
            self._door.refuse(method, context, error)
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


def _alone(asked: Any, answer: Callable[[], Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A method that a front answers by itself."""
    return grpc.unary_unary_rpc_method_handler(
        lambda _, context: answer().SerializeToString(), request_deserializer=asked.FromString
    )
