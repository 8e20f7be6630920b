"""The core behind gRPC: Isthmus's own protocol, and the Open Inference Protocol.

For each stream one handler thread sends the frames, another receives. A request of the Open Inference Protocol is
received as the first message of a stream, and its answer sent as one, which is identical on the wire: so a message is
parsed in its account's turn, not in the thread that serves all clients, and a call lasts until its answer is fetched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.inference import (
    MAX_VALUES,
    VALUE_BYTES,
    Inference,
    InferenceResult,
    NamedElements,
    Query,
    TensorInfo,
    Value,
    check_parameters,
    pack,
    unpack,
)
from cloud_server.streams import InFrame, ProbeStream, StreamSession
from cloud_server.transport.authentication import INFER, INFERENCE, SERVICE, AuthInterceptor, abort
from protos import frames, padding
from protos.frames import varint
from protos.inference import inference_pb2 as pb
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, InputMismatch, IsthmusError
from shared_hooks.lifecycle import on_behalf_of

log = logging.getLogger(__name__)


class Malformed:
    """Stands for a message that cannot be parsed: gRPC would end the stream without a reason."""


def take(session: StreamSession, data: bytes) -> bool:
    """Parse and process a message; returns False if the stream accepts no more. The time is charged to the account.

    gRPC would parse it in the one thread that serves every stream.
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
        """Yield a stream of requests."""
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
            session.gone()  # the client left before this line
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
        """Yield a stream that measures the link."""
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
        """Return the models that this caller may use."""
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


def _take_rounds(probe: ProbeStream, incoming: Iterator[padding.Padding | Malformed]) -> None:
    """Pass frames from the stream to the probe until either ends."""
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
    """Pass frames from the stream to the session until either ends."""
    with on_behalf_of(session.caller.account):
        try:
            for data in incoming:
                if not take(session, data):
                    return
            session.finish()
        except Exception as error:  # gRPC raises a bare Exception here when the stream breaks
            log.debug("stream of %s broke: %s", session.caller.peer, error)
            session.disconnect()


CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""The field that holds a datatype's elements; other datatypes are sent raw."""
MAX_ENTRIES: Final = 1024
"""Most inputs, outputs and parameters of one request."""
_RAW = bytes((pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2,))


class InferenceServicer:
    """inference.GRPCInferenceService. `add_to` registers it by hand, because requests are parsed by hand."""

    def __init__(self, inference: Inference, auth: AuthInterceptor) -> None:
        self._inference = inference
        self._auth = auth

    def infer(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """ModelInfer: one message, one answer."""
        try:
            caller = self._auth.caller(context)
            with on_behalf_of(caller.account):
                yield from self._infer(caller, incoming, context)
        except IsthmusError as error:
            self._auth.refuse(INFER, context, error)

    def _infer(self, caller: Caller, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        data = self._auth.message(incoming, context)
        with self._inference.asking(caller, context.cancel) as asking:
            self._auth.when_sent_away(context, asking.refuse)
            if not context.add_callback(asking.gone):
                asking.gone()
            query, raw = asking.read(partial(read, data))
            result = self._inference.infer(asking, query, context.time_remaining())
            del data, query
            with self._inference.held.hold(asking.owner, context.cancel) as hold:
                values = sum(one.count for one in result.outputs)
                raw = raw or values > MAX_VALUES
                hold.more(result.nbytes + (0 if raw else VALUE_BYTES * values))
                message = asking.read(partial(answer, result, raw))
                del result
                yield message

    def live(self, _: pb.ServerLiveRequest, caller: Caller) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def ready(self, _: pb.ServerReadyRequest, caller: Caller) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._inference.ready)

    def model_ready(self, requested: pb.ModelReadyRequest, caller: Caller) -> pb.ModelReadyResponse:
        self._inference.engine(caller, requested.name, requested.version)
        return pb.ModelReadyResponse(ready=self._inference.ready)

    def server(self, _: pb.ServerMetadataRequest, caller: Caller) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._inference.server())

    def model(self, requested: pb.ModelMetadataRequest, caller: Caller) -> pb.ModelMetadataResponse:
        info = self._inference.describe(caller, requested.name, requested.version)
        return pb.ModelMetadataResponse(
            name=info.name,
            versions=info.versions,
            platform=info.platform,
            inputs=_tensors(info.inputs),
            outputs=_tensors(info.outputs),
        )

    def config(self, requested: pb.ModelConfigRequest, caller: Caller) -> pb.ModelConfigResponse:
        info = self._inference.describe(caller, requested.name, requested.version)
        inputs = [
            pb.ModelConfig.Input(name=one.name, data_type=_kind(one), dims=one.shape)  # type: ignore[arg-type]
            for one in info.inputs
        ]
        outputs = [
            pb.ModelConfig.Output(name=one.name, data_type=_kind(one), dims=one.shape)  # type: ignore[arg-type]
            for one in info.outputs
        ]
        config = pb.ModelConfig(
            name=info.name, platform=info.platform, backend=info.platform, input=inputs, output=outputs
        )
        return pb.ModelConfigResponse(config=config)

    def statistics(self, requested: pb.ModelStatisticsRequest, caller: Caller) -> pb.ModelStatisticsResponse:
        found = self._inference.statistics(caller, requested.name, requested.version)
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**one) for one in found])

    def index(self, requested: pb.RepositoryIndexRequest, caller: Caller) -> pb.RepositoryIndexResponse:
        _check_repository(requested)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(**one)
                for one in self._inference.index(caller)
                if one["state"] == "READY" or not requested.ready
            ]
        )

    def load(self, requested: pb.RepositoryModelLoadRequest, caller: Caller) -> pb.RepositoryModelLoadResponse:
        _check_repository(requested)
        self._inference.load(caller, requested.model_name)
        return pb.RepositoryModelLoadResponse()

    def unload(self, requested: pb.RepositoryModelUnloadRequest, caller: Caller) -> pb.RepositoryModelUnloadResponse:
        _check_repository(requested)
        self._inference.unload(caller, requested.model_name)
        return pb.RepositoryModelUnloadResponse()

    def add_to(self, server: grpc.Server) -> None:
        """Register the service. Triton's further methods are UNIMPLEMENTED."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            INFER.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(self.infer)
        }
        for name, method, requested in (
            ("ServerLive", self.live, pb.ServerLiveRequest),
            ("ServerReady", self.ready, pb.ServerReadyRequest),
            ("ModelReady", self.model_ready, pb.ModelReadyRequest),
            ("ServerMetadata", self.server, pb.ServerMetadataRequest),
            ("ModelMetadata", self.model, pb.ModelMetadataRequest),
            ("ModelConfig", self.config, pb.ModelConfigRequest),
            ("ModelStatistics", self.statistics, pb.ModelStatisticsRequest),
            ("RepositoryIndex", self.index, pb.RepositoryIndexRequest),
            ("RepositoryModelLoad", self.load, pb.RepositoryModelLoadRequest),
            ("RepositoryModelUnload", self.unload, pb.RepositoryModelUnloadRequest),
        ):
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                self._answering(name, method),
                request_deserializer=requested.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
        server.add_registered_method_handlers(INFERENCE, handlers)

    def _answering(self, name: str, method: Callable[[Any, Caller], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answering(requested: Any, context: grpc.ServicerContext) -> Any:
            full = f"/{INFERENCE}/{name}"
            try:
                return method(
                    requested, Caller(context.peer()) if self._auth.is_open(full) else self._auth.caller(context)
                )
            except IsthmusError as error:
                self._auth.refuse(full, context, error)

        return answering


def _check_repository(
    requested: pb.RepositoryIndexRequest | pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> None:
    """Raise InputMismatch for parameters: only what the server's own files name can be loaded, as they say."""
    if requested.repository_name:
        raise InputMismatch("there is one repository, which has no name")
    if not isinstance(requested, pb.RepositoryIndexRequest):
        check_parameters({name: one.bool_param for name, one in requested.parameters.items()})


def read(data: bytes) -> tuple[Query, bool]:
    """Return a request, and whether its tensors came as raw bytes. Raises BadFrame and InputMismatch."""
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        raise BadFrame("a message that is no ModelInferRequest") from None
    if max(len(message.inputs), len(message.outputs), len(message.parameters)) > MAX_ENTRIES:
        raise BadFrame(f"more than {MAX_ENTRIES} inputs, outputs or parameters")
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise BadFrame(f"{len(raw)} raw_input_contents came for {len(message.inputs)} inputs")
    inputs = []
    for number, one in enumerate(message.inputs):
        _check_parameters(one.parameters)
        if raw:
            if one.HasField("contents"):
                raise BadFrame(f'input "{one.name[:80]}" has contents, and raw_input_contents came, too')
            content = memoryview(raw[number])
        else:
            content = _typed(one)
        inputs.append(NamedElements(one.name, one.datatype, tuple(one.shape), content))
    for wanted in message.outputs:
        _check_parameters(wanted.parameters)
    names = tuple(one.name for one in message.outputs)
    query = Query(
        message.model_name, tuple(inputs), message.model_version, message.id, names, _parameters(message.parameters)
    )
    return query, bool(raw)


def _typed(one: pb.ModelInferRequest.InferInputTensor) -> memoryview:
    where = f'input "{one.name[:80]}"'
    field = CONTENTS.get(one.datatype)
    others = [known.name for known, _ in one.contents.ListFields() if known.name != field]
    if others:
        raise InputMismatch(f"{where}: {others[0]} came for datatype {one.datatype[:40]!r}")
    return pack(list(getattr(one.contents, field)) if field else [], one.datatype, where)


def _check_parameters(parameters: Mapping[str, pb.InferParameter]) -> None:
    """Check a tensor's parameters. Raises InputMismatch for those that would change the tensor's meaning."""
    for name in parameters:
        if name.startswith("shared_memory_") or name == "classification":
            raise InputMismatch(f"the parameter {name} is not served: tensors come and go in messages")


def _parameters(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(parameter, kind)
    return found


def answer(result: InferenceResult, raw: bool) -> bytes:
    """Return the bytes of a ModelInferResponse: raw if the request was, or if a datatype has no field of its own."""
    raw = raw or any(one.datatype not in CONTENTS for one in result.outputs)
    message = pb.ModelInferResponse(model_name=result.model, model_version=result.version, id=result.id)
    for name, value in result.parameters.items():
        _put(message.parameters[name], value)
    for one in result.outputs:
        output = message.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        if not raw:
            field = getattr(output.contents, CONTENTS[one.datatype])
            for some in unpack(one.data, one.datatype):
                field.extend(some)
    pieces: list[bytes | memoryview] = [message.SerializeToString()]
    if raw:  # encoded by hand, to be copied only once
        for one in result.outputs:
            pieces += [_RAW + varint(one.data.nbytes), one.data]
    return b"".join(pieces)


def _put(parameter: pb.InferParameter, value: Value) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        parameter.int64_param = value
    elif isinstance(value, (int, float)):
        parameter.double_param = float(value)
    else:
        parameter.string_param = value


def _tensors(infos: Sequence[TensorInfo]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=one.name, datatype=one.datatype, shape=one.shape) for one in infos
    ]


def _kind(info: TensorInfo) -> int:
    names = pb.ModelConfig.DataType.items()
    return dict(names).get(f"TYPE_{info.datatype}", 0)
