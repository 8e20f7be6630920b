"""One request of a sweep: run, measured, and compared with the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edge_client.answer import Answer, Failure
from edge_client.client import EdgeClient
from edge_client.given import Given
from edge_client.modes import CLOUD_FILE, EDGE_ONLY
from edge_client.sweeping.observed import picture_of
from edge_client.sweeping.records import Records
from edge_client.sweeping.ways import Way
from edge_client.transport import Times, now_ns
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import Disagreement, InputMismatch
from shared_hooks.forward import run_plain
from shared_hooks.metrics import ForwardMetrics, LayerMetrics
from shared_hooks.models import ModelSpec, Prediction
from shared_hooks.models.example import to_device
from shared_hooks.tensors import flatten, identical

# Head and tail in this one process, through bytes as on the wire: is it exact, and what does a split itself cost?


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """As `Answer`, of a request that went nowhere. The cloud's rows are the tail's, run here."""

    output: Any
    layer_id: int
    times: Times
    layers_edge: Sequence[LayerMetrics]
    layers_cloud: Sequence[LayerMetrics]
    forward_edge: ForwardMetrics | None
    forward_cloud: ForwardMetrics | None
    bytes_up: int
    measured_ns: int
    finished_ns: int
    bytes_down: int = 0
    sends: int = 0
    codecs: Sequence[str] = ()


def split_here(
    wrapped: WrappedModel, args: tuple[Any, ...], kwargs: dict[str, Any], cut: str, codec: str, called: int
) -> LocalAnswer:
    """One request; ``called``: when it began (`now_ns`), before its input was read. Raises what the engine raises."""
    prepared = now_ns()
    early: EarlyOutput = wrapped.head(cut, *args, **kwargs)
    returned = now_ns()
    _wait(wrapped)
    head_ns = wrapped.durations().get("head", 0) + now_ns() - returned
    layers_edge, forward_edge = _metrics(wrapped)
    computed = now_ns()
    data = early.to_bytes(codec=codec)
    packed = now_ns()
    arrived = EarlyOutput.from_bytes(data, max_bytes=len(data) + (1 << 30))
    unpacked = now_ns()
    output = wrapped.tail(arrived)
    _wait(wrapped)
    finished = now_ns()
    inject_ns = wrapped.durations().get("inject", 0)
    layers_cloud, forward_cloud = _metrics(wrapped)
    times = Times(
        prepare=prepared - called,
        edge_other=computed - prepared - head_ns,
        edge_compute=head_ns,
        encode=packed - computed,
        server_decode=unpacked - packed,
        server_inject=inject_ns,
        server_compute=finished - unpacked - inject_ns,
    )
    return LocalAnswer(
        output=output,
        layer_id=early.layer_id,
        times=times,
        layers_edge=layers_edge,
        layers_cloud=layers_cloud,
        forward_edge=forward_edge,
        forward_cloud=forward_cloud,
        bytes_up=len(data),
        measured_ns=finished - called,
        finished_ns=finished,
    )


def _metrics(wrapped: WrappedModel) -> tuple[Sequence[LayerMetrics], ForwardMetrics | None]:
    return (wrapped.get_layer_metrics(), wrapped.get_forward_metrics()) if wrapped.metrics_enabled else ([], None)


def _wait(wrapped: WrappedModel) -> None:
    if wrapped.device.type == "cuda":  # else the device's time would count as what comes next
        torch.cuda.synchronize(wrapped.device)


Labels = tuple[str, ...] | None
"""The best label of each row; None for an output without class scores."""


@dataclass(frozen=True)
class Reference:
    """What the whole model says of one input, without observers."""

    structure: Any
    tensors: list[Any]
    labels: Labels

    def equals(self, output: Any) -> bool:
        """Whether ``output`` is the same, bit by bit, wherever it lies."""
        structure, tensors = flatten(output)
        if structure != self.structure or len(tensors) != len(self.tensors):
            return False
        return all(identical(mine, theirs.cpu()) for mine, theirs in zip(self.tensors, tensors, strict=True))


class Meter:
    """Runs requests of one model, one at a time; what is learnt goes into `Records`."""

    def __init__(self, client: EdgeClient, spec: ModelSpec, codec: str) -> None:
        self._client = client
        self._spec = spec
        self._codec = codec

    def reference(self, sweep_input: Given) -> Reference:
        """Raises what reading the input or the model raises."""
        args, kwargs = self._placed(sweep_input)
        output = run_plain(self._client.wrapped.model, args, kwargs)
        structure, tensors = flatten(output)
        return Reference(structure, [tensor.cpu() for tensor in tensors], labels_of(self._spec.postprocess(output)))

    def request(self, way: Way, sweep_input: Given) -> Answer | LocalAnswer:
        """Raises what went wrong, errors of the connection among it."""
        if way.mode == "local" and way.name != EDGE_ONLY:
            called = now_ns()
            args, kwargs = self._placed(sweep_input)
            return split_here(self._client.wrapped, args, kwargs, way.name, self._codec, called)
        source: Any = sweep_input.item if way.name == CLOUD_FILE else sweep_input
        answers = self._client.infer_many([source], split=way.name, prepare=self._read, failures="return")
        try:
            (answer,) = answers
        except Disagreement as error:
            if way.name == CLOUD_FILE:  # about reading files, not about the model: the other ways are as good as before
                raise InputMismatch(str(error)) from error
            raise
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def observe(self, way: Way, sweep_input: Given, observers: Sequence[str]) -> Answer:
        """One request with observers on both sides. Raises as `request`, and ObserverRefused."""
        before, self._client.observers = self._client.observers, tuple(observers)
        self._client.wrapped.metrics_enabled = False
        try:
            answer = self.request(way, sweep_input)
        finally:
            self._client.observers = before
        assert isinstance(answer, Answer)
        return answer

    def picture(self, sweep_input: Given) -> str | None:
        """What the model sees of an image, for the page; None of other inputs."""
        return picture_of(self._spec, sweep_input)

    def record(
        self,
        records: Records,
        way: Way,
        sweep_input: Given,
        reference: Reference,
        repetition: int,
        sequence: int,
        layers: bool,
    ) -> None:
        """One request, as a row; with its ``layers``, or with nothing that would delay it. Raises as `request`."""
        self._client.wrapped.metrics_enabled = layers
        answer = self.request(way, sweep_input)
        labels = labels_of(self._spec.postprocess(answer.output))
        known = {
            "layers": layers,
            "measured_ns": answer.measured_ns,
            "exact": reference.equals(answer.output),
            "top1": None if labels is None else ";".join(labels),
            "top1_agrees": None if labels is None or reference.labels is None else labels == reference.labels,
            "truth": sweep_input.shown_truth,
        }
        records.add(way, repetition, sequence, answer, known)

    def _read(self, sweep_input: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return sweep_input.read(self._spec)

    def _placed(self, sweep_input: Given) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = sweep_input.read(self._spec)
        return to_device(args, self._client.device), to_device(kwargs, self._client.device)


def labels_of(predictions: list[Prediction]) -> Labels:
    """The best of each row."""
    best: dict[int, str] = {}
    for prediction in predictions:
        best.setdefault(prediction.row, prediction.label)
    return tuple(best.values()) or None
