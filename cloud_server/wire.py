"""The server's frames that answer no request: welcome, errors, identities as protobuf messages."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable

from cloud_server.access import Caller
from cloud_server.limits import Limits
from cloud_server.models import Identity
from protos import PROTOCOL_VERSION
from protos.frames import ServerFrame
from protos.isthmus.v1 import split_pb2
from shared_hooks.codecs import offered
from shared_hooks.errors import IsthmusError, ServerUnavailable

OutFrame = ServerFrame
"""What a session sends; `protos.frames.serialize_server_frame` encodes it."""

MAX_MESSAGE = 4000
"""Most characters of an error's text, which may travel in an HTTP/2 trailer, usually limited to 8 KiB."""

MOST_MS = 2**32 - 1

INLINE_BYTES = 64 << 10
"""Most bytes of a step's payload inside its header, and of an answer's inside its message."""

# https://grpc.github.io/grpc/core/md_doc_statuscodes.html, in the order of their numbers
STATUS_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


def welcome(
    limits: Limits,
    caller: Caller,
    identity: Identity,
    beat: float | None = None,
    notes: Iterable[str] = (),
    rounding: Iterable[str] = (),
    area: bool = False,
) -> split_pb2.ServerFrame:
    """Return the answer to a hello. ``beat``: seconds between heartbeats, if the client asked for them. ``notes``:
    differences without effect; ``rounding``: those that may affect last bits. ``area``: whether the client's shared
    memory is used.
    """
    return split_pb2.ServerFrame(
        welcome=split_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            max_request_bytes=caller.max_request_bytes(limits),
            max_in_flight=caller.max_in_flight(limits),
            chunk_bytes=limits.chunk_bytes,
            about=dict(identity.about),
            heartbeat_ms=round(1000 * (beat or 0)),
            notes=notes,
            rounding=rounding,
            inline_bytes=INLINE_BYTES,
            message_bytes=limits.max_message_bytes,
            area=area,
            open=True,
            codecs=offered(),
            cuts=None if caller.policy.cuts is None else split_pb2.Cuts(names=caller.policy.cuts),
        )
    )


def heartbeat() -> split_pb2.ServerFrame:
    return split_pb2.ServerFrame(heartbeat=split_pb2.Heartbeat())


def pong(number: int) -> split_pb2.ServerFrame:
    return split_pb2.ServerFrame(pong=split_pb2.Pong(number=number, clock_ns=time.perf_counter_ns()))


def draining() -> split_pb2.ServerFrame:
    return split_pb2.ServerFrame(draining=split_pb2.Draining())


def failed(id: int, error: IsthmusError, retry: bool | None = None) -> split_pb2.RequestFailed:
    """Return the report of an error.

    By default only an error of a busy or draining server may be retried. One that says when to retry means another
    request: this one's deadline would pass meanwhile.
    """
    return split_pb2.RequestFailed(
        id=id,
        code=STATUS_CODES.index(error.status),
        error=type(error).__name__,
        message=message(error),
        retry=isinstance(error, ServerUnavailable) and not error.retry_after_seconds if retry is None else retry,
        retry_after_ms=min(MOST_MS, math.ceil(1e3 * (error.retry_after_seconds or 0))),
    )


def message(error: BaseException) -> str:
    """Return an error's text, shortened to what a status can carry."""
    text = str(error) or type(error).__name__
    text = text.encode("utf-8", "replace").decode("utf-8")  # a model's text may contain lone surrogates
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 4] + " ..."


def model_list(identities: Iterable[Identity]) -> split_pb2.ListModelsReply:
    return split_pb2.ListModelsReply(
        models=[
            split_pb2.ModelInfo(
                model_id=identity.model_id,
                weights_hash=identity.weights_hash,
                structure_digest=identity.structure_digest,
                plan_digest=identity.plan_digest,
                layers=identity.layers,
                preprocess_digest=identity.preprocess_digest,
                machine=json.dumps(dict(identity.machine)),
            )
            for identity in identities
        ],
        unix_seconds=int(time.time()),
    )
