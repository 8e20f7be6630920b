"""A core with decoding sessions, and steps as frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cloud_server import Core, Limits, ModelEntry, ServedModel
from protos.frames import cut as chunks
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel, WrappedModel
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models import ModelSpec, load_spec
from tests.cloud_server.decoding.tail import CUT, Adding
from tests.cloud_server.fakes import Client, CoreClient
from tests.cloud_server.real import greet

SMALL = "small=tests.edge_client.served:Small"


def spec() -> ModelSpec:
    return load_spec(SMALL)


def engine(lifecycle: Lifecycle | None = None, tail: Any = Adding) -> ServedModel:
    return ServedModel(ModelEntry(spec(), decoding=tail), torch.device("cpu"), lifecycle)


@contextmanager
def serving(limits: Limits | None = None, workers: int = 1, tail: Any = Adding, **more: Any) -> Iterator[Core]:
    lifecycle = Lifecycle("cloud")
    with Core([engine(lifecycle, tail)], limits, workers, lifecycle=lifecycle, **more) as core:
        yield core


def join(core: Core, client_id: str = "alice", **caller: Any) -> CoreClient:
    """A client of the model, greeted."""
    client = CoreClient(core, greet=False, **caller)
    with WrappedModel(spec().load_model("cpu")) as wrapped:
        client.send(greet(wrapped, "small", client_id=client_id))
    return client


def ones(elements: int = 4) -> torch.Tensor:
    return torch.ones(1, 1, elements, dtype=torch.bfloat16)


def frame(
    id: int,
    session: int,
    number: int,
    asked: Any = None,
    tensors: Sequence[torch.Tensor] = (),
    *,
    cut: str = CUT,
    fork: tuple[int, int] = (0, 0),
    branch: int = 0,
    **changes: Any,
) -> split_pb2.ClientFrame:
    """A step in one frame."""
    parcel = Parcel.of_tensors({} if asked is None else asked, list(tensors))
    values: dict[str, Any] = {
        "id": id,
        "session_id": session,
        "step": number,
        "header": parcel.header,
        "payload_bytes": parcel.nbytes,
        "payload": b"".join(parcel.buffers),
        "decoding": split_pb2.Decoding(cut=cut, fork_of=fork[0], fork_step=fork[1], branch=branch),
    }
    return split_pb2.ClientFrame(request=split_pb2.RequestHeader(**{**values, **changes}))


def close(id: int, session: int) -> split_pb2.ClientFrame:
    return frame(id, session, 0, header=b"", payload_bytes=0, decoding=split_pb2.Decoding(cut=CUT, close=True))


def send_large(client: Client, id: int, session: int, number: int, tensor: torch.Tensor) -> None:
    """A step whose payload comes in chunks."""
    parcel = Parcel.of_tensors({}, [tensor])
    client.send(frame(id, session, number, {}, [tensor], payload=b""), *chunks(id, parcel.buffers, 10_000))


def answered(client: Client, id: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    result = client.answer(id)
    assert result.reply is not None, result.failed
    said, tensors = Parcel.tensors(result.reply.header, bytearray(result.reply.payload or result.data))
    return said, tensors


def said(client: Client, id: int) -> dict[str, Any]:
    """What the tail answered."""
    return answered(client, id)[0]


def rows(client: Client, id: int) -> tuple[int, float]:
    """How many tensors the tail has, and their sum."""
    reported, (total, *_) = answered(client, id)
    return reported["rows"], float(total)
