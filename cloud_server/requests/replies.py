"""What a request is answered with: its result or its error, as frames."""

from __future__ import annotations

from collections.abc import Iterator

from cloud_server import wire
from cloud_server.models import Computed
from cloud_server.requests import layer_metrics
from cloud_server.requests.answers import Answer
from cloud_server.requests.request import Request
from cloud_server.requests.took import Took
from protos.chunks import cut
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError
from shared_hooks.metrics import NOT_SAMPLED


def answer(request: Request, computed: Computed, started_ns: int, load: split_pb2.Load) -> Answer:
    """The answer to a request whose tail was started at ``started_ns`` (perf_counter)."""
    request.took = took = Took(
        receive=request.complete_ns - request.began_ns,
        queue=started_ns - request.complete_ns,
        decode=computed.decode_ns,
        inject=computed.inject_ns,
        compute=computed.compute_ns,
        encode=computed.encode_ns,
        energy=NOT_SAMPLED if computed.forward is None else computed.forward.energy,
    )
    reply = split_pb2.ReplyHeader(
        id=request.id,
        header=computed.header,
        payload_bytes=computed.nbytes,
        load=load,
        observations=request.observations,
        transforms=computed.transforms,
        durations=took.durations(),
    )
    layer_metrics.put(reply, computed.layers, computed.forward)
    buffers = computed.buffers
    if computed.nbytes <= request.inline_bytes:
        reply.payload, buffers = b"".join(buffers), ()
    return Answer(request.key, request.fingerprint, reply=reply, buffers=buffers, about=request.about)


def failure(request: Request, error: IsthmusError) -> Answer:
    """The answer to a request that failed."""
    return Answer(request.key, request.fingerprint, failed=wire.failed(request.id, error), about=request.about)


def frames(answer: Answer, chunk_bytes: int) -> Iterator[wire.OutFrame]:
    """What is sent for an answer: its reply and the payload in chunks, or its failure."""
    if answer.reply is None:
        yield split_pb2.ServerFrame(failed=answer.failed)
        return
    yield split_pb2.ServerFrame(reply=answer.reply)
    if not answer.reply.payload:
        yield from cut(answer.reply.id, answer.buffers, chunk_bytes)
