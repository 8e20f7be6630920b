"""A server of a small model, asked by the Open Inference Protocol's messages alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models import Engine, ServedModel
from cloud_server.transport import CloudServer
from protos.inference import inference_pb2 as pb
from shared_hooks import WrappedModel
from shared_hooks.config import Table
from shared_hooks.crossing import named_crossing
from shared_hooks.models.spec import spec_from_table
from tests.cloud_server.real import Residual
from tests.waiting import PATIENCE

SERVICE = "/inference.GRPCInferenceService/"


def entry(
    factory: str = "Residual", module: str = Residual.__module__, tails: tuple[str, ...] = (), **more: Any
) -> ModelEntry:
    table = {"id": "residual", "factory": f"{module}:{factory}", "example": {"args": [{"shape": [2, 8]}]}, **more}
    return ModelEntry(spec_from_table(Table(table, "test"), Path.cwd()), tails=tails)


def engine(**more: Any) -> ServedModel:
    return ServedModel(entry(**more), torch.device("cpu"))


@contextmanager
def serving(*engines: Engine, limits: Limits | None = None, **options: Any) -> Iterator[CloudServer]:
    server = CloudServer(Core(engines, limits), "127.0.0.1:0", **options)
    server.start()
    try:
        yield server
    finally:
        server.stop(grace=1)


class Asker:
    """One connection; each method of the service by its name."""

    def __init__(self, port: int, token: str = "") -> None:
        own = ("grpc.use_local_subchannel_pool", 1)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[own])
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(self, name: str, message: Any = None, answer: Any = None, **options: Any) -> Any:
        asked = getattr(pb, f"{name}Request")() if message is None else message
        data = asked if isinstance(asked, bytes) else asked.SerializeToString()
        made = self.channel.unary_unary(f"{SERVICE}{name}")
        options.setdefault("timeout", PATIENCE)
        found = made(data, metadata=self._metadata, **options)
        return getattr(pb, f"{name}Response").FromString(found)

    def infer(self, request: pb.ModelInferRequest | bytes, **options: Any) -> pb.ModelInferResponse:
        found: pb.ModelInferResponse = self.call("ModelInfer", request, **options)
        return found

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def asked(x: torch.Tensor, **changes: Any) -> pb.ModelInferRequest:
    """A request of the whole model, raw."""
    request = pb.ModelInferRequest(model_name="residual", **changes)
    request.inputs.add(name="x", datatype="FP32", shape=list(x.shape))
    request.raw_input_contents.append(x.numpy().tobytes())
    return request


def typed(x: torch.Tensor) -> pb.ModelInferRequest:
    """The same with contents."""
    request = pb.ModelInferRequest(model_name="residual", id="mine")
    one = request.inputs.add(name="x", datatype="FP32", shape=list(x.shape))
    one.contents.fp32_contents.extend(x.flatten().tolist())
    return request


def crossing(model: torch.nn.Module, cut: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What crosses a cut of a model of ``x``, by name."""
    with WrappedModel(model) as edge:
        early = edge.head(cut, x)
        named = named_crossing(early.crossing, ["x"]).tensors
        return {one.name: one.tensor_of(early.pieces[one.piece]).contiguous() for one in named}


def tail(cut: str, given: dict[str, torch.Tensor], **changes: Any) -> pb.ModelInferRequest:
    """A request of the tail behind a cut."""
    request = pb.ModelInferRequest(model_name=f"residual@{cut}", **changes)
    for name, value in given.items():
        request.inputs.add(name=name, datatype="FP32", shape=list(value.shape))
        request.raw_input_contents.append(value.contiguous().numpy().tobytes())
    return request


def outputs(answer: pb.ModelInferResponse) -> dict[str, torch.Tensor]:
    """Return the FP32 outputs."""
    found = {}
    for number, one in enumerate(answer.outputs):
        raw = answer.raw_output_contents
        flat = np.frombuffer(raw[number], "<f4") if raw else np.array(one.contents.fp32_contents, "<f4")
        found[one.name] = torch.tensor(flat.copy()).reshape(tuple(one.shape))
    return found
