"""The model's half on this side: loaded, wrapped, planned; heads run and packed here."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edge_client import wire
from edge_client.answer import Call
from edge_client.exchange import Exchange, Outgoing
from edge_client.times import Stamps, now_ns
from protos.isthmus.v1 import split_pb2
from shared_hooks import EarlyOutput, LayerMetrics, WrappedModel
from shared_hooks.errors import IsthmusError, ModelFailed, SpecError
from shared_hooks.hierarchy import holder_modules
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.models.example import to_device
from shared_hooks.parcel import CODECS
from shared_hooks.trees import classes_of

Cut = int | str
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Head:
    """A head that has run: its frontier as bytes, where it was cut, and its layers' times."""

    outgoing: Outgoing
    split: str
    layer_id: int
    layers: list[LayerMetrics]


class EdgeHalf:
    """A wrapped model on a device; of what `load_spec` takes, a `ModelSpec`, or a module with a ``model_id``."""

    def __init__(
        self,
        model: str | ModelSpec | nn.Module,
        device: torch.device,
        *,
        model_id: str | None = None,
        example: Inputs | None = None,
        depth: int | None = None,
        codec: str = "raw",
        metrics: bool = True,
    ) -> None:
        if codec not in CODECS:
            raise SpecError(f'codec="{codec}": must be one of {", ".join(CODECS)}')
        self.device = device
        self.spec: ModelSpec | None = None
        if isinstance(model, nn.Module):
            if model_id is None:
                raise SpecError("model_id is missing: a module does not say what the server calls it")
            module = model.to(device)
        else:
            self.spec = model if isinstance(model, ModelSpec) else load_spec(model)
            module = self.spec.load_model(device)
            example = example or self.spec.example(device)
        self.model_id: str = model_id or (self.spec.model_id if self.spec else "")
        self.wrapped = WrappedModel(module, depth=depth, metrics=metrics)
        self._example = example
        self._codec = codec
        self._metrics = metrics
        self._find = classes_of(holder_modules(module))

    def greeting(self, client_id: str) -> split_pb2.ClientFrame:
        """Plan the example, hash the weights: what the server must agree on."""
        return wire.hello_frame(
            client_id=client_id,
            model_id=self.model_id,
            weights_hash=self.wrapped.weights_hash(),
            structure_digest=self.wrapped.structure_digest(),
            plan_digest="" if self._example is None else self.plan(Call(*self._example)),
            environment=self.wrapped.environment(),
            about={"torch": torch.__version__, "python": platform.python_version(), "device": str(self.device)},
        )

    def plan(self, call: Call) -> str:
        """Plan this call, or add the path that it takes; the plan's digest."""
        args, kwargs = self._placed(call)
        return self.wrapped.plan(*args, **kwargs).digest

    def head(self, call: Call, cut: Cut, stamps: Stamps) -> Head:
        """Run the model up to ``cut`` and pack what crosses; stamps `computed` and `packed`.

        Raises UnknownLayer, CutRefused, InputMismatch, and ModelFailed with what the model raised for its cause.
        """
        args, kwargs = self._placed(call)
        try:
            early: EarlyOutput = self.wrapped.forward(*args, end=cut, **kwargs)
            returned = now_ns()
            if self.device.type == "cuda":  # else the device's time would count as encoding
                torch.cuda.synchronize(self.device)
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"the head of {self.model_id} raised {type(error).__name__}: {error}") from error
        stamps.head_ns = self.wrapped.durations().get("head", 0) + now_ns() - returned
        layers = self.wrapped.get_layer_metrics() if self._metrics else []
        stamps.computed = now_ns()
        outgoing = wire.outgoing(early, self._codec)
        stamps.packed = now_ns()
        return Head(outgoing, early.layer_name, early.layer_id, layers)

    def output(self, exchange: Exchange) -> Any:
        """The model's output from an answered exchange, on the CPU."""
        return wire.answer_value(exchange, self._find)

    def _placed(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call.args, dict(call.kwargs)
        if self.device.type == "cpu":
            return args, kwargs
        return to_device(args, self.device), to_device(kwargs, self.device)
