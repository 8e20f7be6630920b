"""What a request is answered with: its result or its error, as frames."""

from __future__ import annotations

from collections.abc import Iterator

from cloud_server import wire
from cloud_server.models import Computed
from cloud_server.requests.answers import Answer
from cloud_server.requests.request import Request
from protos.chunks import cut
from protos.headed import HeadedReply
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError


def answer(request: Request, computed: Computed, started_ns: int, load: split_pb2.Load) -> Answer:
    """The answer to a request whose tail was started at ``started_ns`` (perf_counter). Completes the engine's reply."""
    reply, buffers = computed.reply, computed.buffers
    request.reply = reply
    reply.id = request.id
    reply.load.CopyFrom(load)
    reply.observations = request.observations or reply.observations
    reply.durations.receive_ns = request.complete_ns - request.began_ns
    reply.durations.queue_ns = started_ns - request.complete_ns - request.read_ns
    if reply.payload_bytes <= request.inline_bytes:
        reply.payload, buffers = b"".join(buffers), ()
    return Answer(request.key, request.fingerprint, reply=reply, buffers=buffers, about=request.about)


def failure(request: Request, error: IsthmusError) -> Answer:
    """The answer to a request that failed."""
    return Answer(request.key, request.fingerprint, failed=wire.failed(request.id, error), about=request.about)


def frames(answer: Answer, chunk_bytes: int, headed: bool = False) -> Iterator[wire.OutFrame]:
    """What is sent for an answer: its reply and the payload in chunks, or its failure. ``headed``: the first of these
    chunks is in the reply's message.
    """
    if answer.reply is None:
        yield split_pb2.ServerFrame(failed=answer.failed)
        return
    chunks = iter(()) if answer.reply.payload else cut(answer.reply.id, answer.buffers, chunk_bytes)
    first = next(chunks, None) if headed else None
    if first is None:
        yield split_pb2.ServerFrame(reply=answer.reply)
    else:
        yield HeadedReply(answer.reply, first.pieces)
    yield from chunks
