"""The Open Inference Protocol's calls by gRPC, handed on: each by itself, to any replica of the model that it names."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from cloud_server.access import Caller
from cloud_server.cluster.allowed import counted
from cloud_server.cluster.census import Census
from cloud_server.cluster.relay import Relay, only
from cloud_server.inference import Held
from cloud_server.transport import INFER, INFERENCE, AuthInterceptor
from cloud_server.transport.inference_servicer import MAX_ENTRIES
from protos import fields
from protos.inference import inference_pb2 as pb
from shared_hooks.errors import BadFrame, IsthmusError
from shared_hooks.sharing import Party

MAX_FIELDS: Final = 4 * MAX_ENTRIES + 3
"""Fields of a request that a replica takes: inputs, outputs, parameters, raw inputs; model, version and id."""
_NAMED = {
    "ModelReady": pb.ModelReadyRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
    "ModelConfig": pb.ModelConfigRequest,
}


class InferenceRelay:
    """inference.GRPCInferenceService, for any replicas. ``held``: answers until they are fetched, for a replica is done
    with one when it is here. ``ready``: whether there are any replicas.
    """

    def __init__(
        self, relay: Relay, census: Census, auth: AuthInterceptor, held: Held, ready: Callable[[], bool]
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
            answers = self._hand_on(INFER, model, caller, iter([data]), context)
            del data
            party = Party(caller.account, caller.peer)
            with closing(answers), self._held.hold(party, context.cancel) as hold:
                for answer in answers:
                    hold.more(len(answer))
                    yield answer
        except IsthmusError as error:
            self._auth.refuse(INFER, context, error)

    def _hand_on(
        self, method: str, model: str, caller: Caller, frames: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, None]:
        group = self._census.group(caller, model) if model else self._census.any(caller)
        session = caller.account if counted(caller.policy) else secrets.token_hex(4)
        return self._relay.hand_on(method, group, session, caller, frames, context)

    def _about(self, name: str, read: Callable[[bytes], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        method = f"/{INFERENCE}/{name}"

        def about(asked: Any, context: grpc.ServicerContext) -> bytes:
            try:
                caller = self._auth.caller(context)
                model = getattr(asked, "name", "")
                return only(self._hand_on(method, model, caller, iter([asked.SerializeToString()]), context))
            except IsthmusError as error:
                self._auth.refuse(method, context, error)

        return grpc.unary_unary_rpc_method_handler(about, request_deserializer=read)

    def index(self, asked: pb.RepositoryIndexRequest, context: grpc.ServicerContext) -> bytes:
        """What is served to this caller, each model once."""
        method, found = f"/{INFERENCE}/RepositoryIndex", pb.RepositoryIndexResponse()
        try:
            for said in self._relay.ask_groups(method, asked, context):
                for one in pb.RepositoryIndexResponse.FromString(said).models:
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
    """The model that a ModelInferRequest names; a replica reads the rest, in its account's turn. Raises BadFrame."""
    try:
        return fields.text(data, pb.ModelInferRequest.MODEL_NAME_FIELD_NUMBER, MAX_FIELDS)
    except DecodeError as error:
        raise BadFrame(f"a message that is no ModelInferRequest: {error}") from None


def _alone(asked: Any, answer: Callable[[], Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A method that a front answers by itself."""
    return grpc.unary_unary_rpc_method_handler(
        lambda _, context: answer().SerializeToString(), request_deserializer=asked.FromString
    )
